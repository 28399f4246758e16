"""The whole of minikv on a CUDA device, against the CPU and against itself: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from keeping import POLICIES
from late_stream import exercise
from model_files import hf_config, write_directory
from moving import CACHES, check_moved, load_at
from tiny import RandomWeights
from triton_tools import DEVICE

from minikv import LLM, CacheConfig, ConfigError, SamplingParams, TierConfig
from minikv.cache.copies import Copies, CudaStream
from minikv.kernels.backend import BACKENDS, choose_backend
from minikv.models.hf_config import normalise_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device, or TRITON_INTERPRET is set"),
    pytest.mark.filterwarnings("ignore:compresskv has no calibration profile"),
]

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = ["The sea is wide and the wind is cold. " * n for n in (3, 11, 6, 9, 2, 7)]


def backends(kv_dtype: str = "auto") -> list[str]:
    """Those that this device can be served by, with queries and entries of such a type."""
    found = []
    for name in BACKENDS if DEVICE.type == "cuda" else ("triton",):
        try:
            choose_backend(name, "cuda", 1, 64, None, kv_dtype)
        except ConfigError:
            continue
        found.append(name)
    return found or ["triton"]


every_backend = pytest.mark.parametrize("backend", backends())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    raw = hf_config(head_dim=64, num_attention_heads=6, max_position_embeddings=2048)
    weights = RandomWeights(normalise_config(raw))
    tensors = {name: weights.load(name) for name in weights.names()}
    return write_directory(tmp_path_factory.mktemp("models") / "tiny", raw, tensors)


def load(model, backend: str, **options: Any) -> LLM:
    """The model on the device."""
    options = {"tiers": TierConfig(hot="64MiB"), "device": "cuda", "backend": backend, **options}
    return LLM(str(model), **options)


def replies(llm: LLM, together: bool = False, **options: Any) -> list[tuple[int, ...]]:
    """Tokens for every prompt, one after the other or in one batch."""
    if together:
        return [result.token_ids for result in llm.generate(PROMPTS, PARAMS, **options)]
    return [llm.generate(prompt, PARAMS, **options)[0].token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def on_cpu(model):
    with LLM(str(model), backend="reference", tiers=TierConfig(hot="64MiB")) as llm:
        yield llm


def agreement(found, expected) -> float:
    """The part of all replies that is as expected, up to the first token that is not: after a near tie that
    falls the other way a reply goes on by itself."""
    same = total = 0
    for mine, theirs in zip(found, expected, strict=True):
        total += len(theirs)
        same += next(
            (n for n, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(theirs)
        )
    return same / total


@pytest.mark.parametrize("backend", backends("float32"))
@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_every_policy_says_in_float32_what_the_cpu_says(model, on_cpu, backend, policy):
    cache = CacheConfig() if policy is None else CacheConfig(policy=policy, budget=0.4, recent=8, window=8)
    expected = replies(on_cpu, cache=cache)
    with load(model, backend, dtype="fp32", cache=cache) as llm:
        found = replies(llm)
        assert llm.kv_dtype == "float32"
    assert agreement(found, expected) >= 0.8


def types() -> list[tuple[str, str, str]]:
    """Backends with each `dtype` and KV dtype that they can serve."""
    pairs = product(("bf16", "fp16", "fp32"), ("auto", "int8"))
    return [
        (backend, dtype, kv_dtype)
        for dtype, kv_dtype in pairs
        for backend in backends("float32" if dtype == "fp32" else kv_dtype)
    ]


@pytest.mark.parametrize(("backend", "dtype", "kv_dtype"), types())
def test_every_dtype_speaks(model, on_cpu, backend, dtype, kv_dtype):
    expected = replies(on_cpu)
    with load(model, backend, dtype=dtype, cache=CacheConfig(kv_dtype=kv_dtype)) as llm:
        found = replies(llm)
        weight = llm.engine.model.head.weight
    assert weight.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    assert weight.device.type == "cuda"
    first = [mine[0] == theirs[0] for mine, theirs in zip(found, expected, strict=True)]
    assert sum(first) >= len(first) - 1  # the first token of each has the same history


@every_backend
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_session_goes_from_the_cpu_to_the_device_and_back(model, backend, cache, tmp_path):
    options = {"device": "cuda", "backend": backend, "dtype": "fp16", "threads": None}
    with load_at(model, backend="torch") as here, load_at(model, **options) as there:
        check_moved(here, there, cache, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "policy", "kv_dtype"),
    [
        ("bf16", {}, "auto"),
        ("bf16", {"policy": "window", "budget": 0.5, "decode_slack": 4}, "int8"),
        ("fp16", {"policy": "gracekv", "budget": 0.5}, "auto"),
        ("fp32", {}, "auto"),
    ],
)
def test_graphs_change_nothing(model, dtype, policy, kv_dtype):
    """One request has a bucket of its own size; of six in a batch of eight the matrices are multiplied with
    other numbers of rows, by which a last bit may differ. No policy here has rows of replies recorded, which
    is done without graphs: one rewrites lanes between the steps, one has log masses."""
    cache = CacheConfig(kv_dtype=kv_dtype, recent=8, window=8, **policy)
    alone, together = [], []
    for graphs in (False, True):
        with load(model, "triton", dtype=dtype, cache=cache, cuda_graphs=graphs) as llm:
            alone.append(replies(llm))
            together.append(replies(llm, together=True))
            recorded = llm.engine.model.graphs
    assert recorded.num_replayed > 6 * PARAMS.max_tokens and not recorded._failed
    assert alone[0] == alone[1]
    assert agreement(together[1], together[0]) >= (0.9 if dtype == "fp32" else 0.6)


def test_a_graph_serves_lanes_that_outgrow_its_bucket(model):
    ids = [3 + n % 90 for n in range(1015)]
    said = []
    for graphs in (False, True):
        with load(model, "triton", dtype="bf16", cuda_graphs=graphs) as llm:
            said.append(llm.generate(ids, PARAMS)[0].token_ids)
            recorded = llm.engine.model.graphs
    assert said[0] == said[1]
    assert {bucket.entries for bucket in recorded._steps} == {1024, 2048}


@every_backend
@pytest.mark.parametrize("policy", [None, "snapkv", "gracekv"])
def test_streams_change_nothing(model, backend, policy):
    """Many requests in a small pool: they are demoted and restored all the time."""
    cache = CacheConfig() if policy is None else CacheConfig(policy=policy, budget=0.5, recent=8, window=8)
    said, stats = [], []
    for beside in (False, True):
        tiers = TierConfig(hot="1MiB", warm="64MiB", async_copies=beside)
        with load(model, backend, dtype="bf16", cache=cache, tiers=tiers) as llm:
            results = llm.generate(PROMPTS, replace(PARAMS, max_tokens=300))
            said.append([result.token_ids for result in results])
            stats.append(llm.engine.tier_stats)
    assert said[0] == said[1]
    assert stats[1]["preemptions"] and stats[1]["sequences_restored"]
    assert policy == "gracekv" or stats[1]["copies_beside"]
    assert "copies_beside" not in stats[0]


@pytest.mark.parametrize("backend", backends("float32"))
def test_spans_zoom_in_as_on_the_cpu(model, backend):
    """With rows that come by the side stream and without, alone and together."""
    cache = CacheConfig(policy="sekv", budget=0.5, recent=8, window=8, decode_slack=8)
    options = {"dtype": "fp32", "cache": cache}
    tiers = TierConfig(hot="64MiB", warm="64MiB")
    with LLM(str(model), backend="reference", tiers=tiers, cache=cache) as llm:
        expected = replies(llm)
        assert llm.engine.zoomed.rows
    said = []
    for beside in (False, True):
        with load(model, backend, **options, tiers=replace(tiers, async_copies=beside)) as llm:
            said += [replies(llm), replies(llm, together=True)]
            stats, recorded = llm.engine.tier_stats, llm.engine.model.graphs
            assert stats["zoomed_rows"] and (not beside or stats["copies_beside"] > 100)
            assert recorded is None or not recorded._failed
    assert all(agreement(found, expected) >= 0.8 for found in said)
    assert said[0] == said[2]


@pytest.mark.parametrize("nbytes", [1 << 16, 64 << 20])
def test_the_side_stream_keeps_its_word(nbytes):
    copies = Copies(CudaStream(DEVICE), nbytes)
    busy = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(30):  # the compute stream has work when the copies are begun
        busy = (busy @ busy).clamp_(-1, 1)
    exercise(copies, 400, DEVICE, most=1 << 14)
    assert copies.num_begun
