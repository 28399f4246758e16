"""The whole engine on the Triton backend, interpreted: the same tokens as on the reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_tools import write_tiny_model
from keeping import keep
from tiny import drain, greedy, prompt, tiny_decoder, tiny_engine
from triton_tools import INTERPRETED_ONLY, ragged_batch

from minikv import LLM, CacheConfig, ConfigError, SamplingParams, TierConfig
from minikv.kernels.reference import ReferenceBackend
from minikv.kernels.triton import entries
from minikv.kernels.triton.backend import TritonBackend
from minikv.scheduler.request import Lanes

pytestmark = INTERPRETED_ONLY

PROMPTS = [prompt(70, seed=1), prompt(45, seed=2)]
FOLLOW_UP = prompt(9, seed=3)


def two_turns(backend, cache, kv_dtype, page_size, head_dim=32, queries=torch.float32):
    """Tokens of two conversations in one batch, prompts in chunks, with a second turn each."""
    decoder = tiny_decoder(backend, head_dim=head_dim, num_query_heads=6, num_kv_heads=2)
    decoder._attention_dtype = queries
    tiers = TierConfig(warm="64MiB" if cache is not None and cache.policy == "sekv" else None)
    engine = tiny_engine(decoder, page_size=page_size, kv_dtype=kv_dtype, prefill_chunk=32, tiers=tiers)
    known, lanes, tokens = list(PROMPTS), [Lanes(), Lanes()], []
    for _ in range(2):
        asked = [
            engine.add(ids, greedy(5), lanes=lane, cache=cache)[0]
            for ids, lane in zip(known, lanes, strict=True)
        ]
        collector = drain(engine)
        tokens += [collector.tokens[request] for request in asked]
        known = [[*ids, *collector.tokens[r], *FOLLOW_UP] for ids, r in zip(known, asked, strict=True)]
    merged = [engine.store.num_merged(lane.seq) for lane in lanes]
    held = [engine.store.lengths[lane.seq].sum() for lane in lanes]
    return tokens, held, merged, engine.zoomed.rows


@pytest.mark.parametrize(
    ("policy", "kv_dtype", "page_size"),
    [
        (None, torch.float32, 16),
        ("adakv", torch.float16, 32),
        ("adakv", torch.int8, 16),
        ("gracekv", torch.float32, 16),
        ("gracekv", torch.int8, 32),
        ("sekv", torch.float32, 16),
    ],
)
def test_prefill_compression_and_decoding_give_the_tokens_of_the_reference(
    policy, kv_dtype, page_size, monkeypatch
):
    calls = []
    for name in ("copy_entries", "put_rounded"):
        monkeypatch.setattr(entries, name, Recorder(getattr(entries, name), calls))
    budget, merges = (0.7 if policy == "sekv" else 0.4), policy in ("gracekv", "sekv")
    cache = None if policy is None else keep(policy, budget, refit=policy == "gracekv")
    expected = two_turns(ReferenceBackend(), cache, kv_dtype, page_size)
    assert two_turns(TritonBackend(), cache, kv_dtype, page_size) == expected
    _, _, merged, zoomed = expected
    assert (all(merged), zoomed > 0) == (merges, policy == "sekv")
    assert ("copy_entries" in calls) == (policy == "adakv" or kv_dtype == torch.int8)
    assert ("put_rounded" in calls) == merges


class Recorder:
    """A kernel that notes its launches."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        self.calls.append(self.kernel.__name__)
        return self.kernel[grid]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def test_a_model_is_loaded_on_the_backend_by_name(model_dir):
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    cache = CacheConfig(policy="snapkv", budget=24, sinks=2, recent=4, window=8)
    given = []
    for backend in ("reference", "triton"):
        with LLM(model_dir, tiers=TierConfig(hot="4MiB"), backend=backend, cache=cache) as llm:
            assert llm.backend_name == backend
            given.append(llm.generate("the rain had not stopped " * 2, params)[0].token_ids)
            kernels = llm.engine.store.pool.kernels
    assert given[0] == given[1]
    assert isinstance(kernels, entries.TritonEntries)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"cache": CacheConfig(page_size=8)},
            "cannot be used: its pages have 16 or 32 entries",
        ),
        ({"weights": "q4"}, "weights must be auto or f32 with backend triton"),
        ({"device": "cuda"}, "TRITON_INTERPRET is set, which runs its kernels on the CPU; unset it"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(model_dir, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        LLM(model_dir, **{"backend": "triton", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_other_backends_are_for_the_cpu(model_dir, backend):
    with pytest.raises(ConfigError, match=f"backend {backend} runs on the CPU; use backend triton"):
        LLM(model_dir, backend=backend, device="cuda")


def test_without_device_and_interpreter_it_says_so(model_dir, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, words in (("auto", "torch finds no CUDA device"), ("cpu", "only run interpreted")):
        with pytest.raises(ConfigError, match=words) as caught:
            LLM(model_dir, backend="triton", device=device)
        assert "TRITON_INTERPRET=1" in str(caught.value)


def test_a_pool_of_the_store_is_poisoned_where_nothing_was_written():
    """The other tests rely on it."""
    batch = ragged_batch([1], [[5, 20]])
    assert int(torch.isnan(batch.pool.log_mass).sum()) == batch.pool.log_mass.numel() - 2 * 25 - 4


@pytest.mark.slow
def test_the_benchmark_for_devices_runs():
    """In the interpreter it measures nothing, but checks every attention before it is timed."""
    script = Path(__file__).parents[1] / "benchmarks" / "bench_gpu.py"
    done = subprocess.run([sys.executable, script, "--tiny"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "of copy" in done.stdout and "end to end" in done.stdout
    zoomed = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["sekv"])
    assert int(zoomed.split()[-1]) > 0
