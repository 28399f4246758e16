"""The whole engine on the FlashInfer backend over emulated kernels: the same tokens as on the reference."""

from __future__ import annotations

import pytest
import torch
from flashinfer_tools import Recording, documented
from keeping import keep
from test_triton_engine import PROMPTS, two_turns
from tiny import drain, greedy, prompt, tiny_decoder, tiny_engine
from triton_tools import INTERPRETED_ONLY

from minikv.config import TierConfig
from minikv.kernels.flashinfer import backend as backend_module
from minikv.kernels.flashinfer import runs, shares
from minikv.kernels.flashinfer.backend import FlashInferBackend
from minikv.kernels.reference import ReferenceBackend
from minikv.scheduler.request import Lanes

pytestmark = INTERPRETED_ONLY


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little memory, and tails short enough for short conversations."""
    monkeypatch.setattr(runs, "WORKSPACE_BYTES", 1 << 24)
    monkeypatch.setattr(shares, "TAIL", 3)


@pytest.fixture
def merged(monkeypatch):
    """One number for each time that results of both were merged."""
    calls, merge = [], backend_module.merge
    monkeypatch.setattr(backend_module, "merge", lambda *given: calls.append(1) or merge(*given))
    return calls


@pytest.mark.parametrize(
    ("policy", "kv_dtype", "page_size", "head_dim"),
    [
        (None, torch.float16, 16, 64),
        ("adakv", torch.float16, 32, 64),
        ("gracekv", torch.float16, 16, 64),
        ("gracekv", torch.int8, 16, 64),
        (None, torch.float16, 16, 32),
    ],
)
def test_chunks_compression_and_decoding_give_the_tokens_of_the_reference(
    policy, kv_dtype, page_size, head_dim, merged
):
    cache = None if policy is None else keep(policy, 0.4, refit=policy == "gracekv")
    options = cache, kv_dtype, page_size, head_dim, torch.float16
    library = Recording(documented())
    backend = FlashInferBackend(library)
    expected, given = two_turns(ReferenceBackend(), *options), two_turns(backend, *options)
    assert given == expected and not backend._broken
    assert bool(library.count("run")) == (kv_dtype == torch.float16 and head_dim == 64)
    assert bool(merged) == (policy == "gracekv" and kv_dtype == torch.float16)


def test_spans_that_zoom_in_while_a_step_is_computed(merged):
    """Masses of what lanes held before change in each layer, between writing and attending."""

    def said(backend):
        decoder = tiny_decoder(backend, head_dim=64, num_query_heads=6, num_kv_heads=2)
        decoder._attention_dtype = torch.float16
        engine = tiny_engine(
            decoder, page_size=16, kv_dtype=torch.float16, prefill_chunk=32, tiers=TierConfig(warm="8MiB")
        )
        ids, lanes, tokens = PROMPTS[0], Lanes(), []
        for turn in range(2):
            (request,) = engine.add(ids, greedy(6), lanes=lanes, cache=keep("sekv", 24))
            tokens.append(drain(engine).tokens[request])
            ids = [*ids, *tokens[-1], *prompt(20, seed=turn)]
        return tokens, engine.zoomed.rows

    backend = FlashInferBackend(Recording(documented()))
    expected = said(ReferenceBackend())
    assert said(backend) == expected and not backend._broken
    assert expected[1] and merged


def test_a_run_that_fails_ends_no_request(caplog):
    """After some that did not."""
    library = Recording(documented(), {"run": (11, RuntimeError("no kernel image is available"))})
    backend = FlashInferBackend(library)
    options = keep("gracekv", 0.4), torch.float16, 16, 64, torch.float16
    assert two_turns(backend, *options) == two_turns(ReferenceBackend(), *options)
    assert backend._broken and library.count("run") == 12
    assert [record.message.count("it cannot run") for record in caplog.records] == [1]
