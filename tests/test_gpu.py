"""What needs a CUDA device: `pytest -m gpu`. Those of test_triton_attention.py run there too.

FlashInfer compiles its kernels for each head size and type the first time, which takes minutes: here are two.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flashinfer_tools import Recording, batch_with
from keeping import keep
from tiny import TINY, RandomWeights, drain, greedy, prompt
from triton_tools import DEVICE, HEAD_DIMS, ragged_batch, random_rows, run
from zooming import Shape, routed

from minikv.config import EngineConfig
from minikv.engine import Engine
from minikv.kernels.backend import CPU
from minikv.kernels.flashinfer import probe, shares
from minikv.kernels.flashinfer.backend import FlashInferBackend
from minikv.kernels.reference import ReferenceBackend
from minikv.kernels.triton.backend import TritonBackend
from minikv.models.decoder import Decoder
from minikv.scheduler.request import Lanes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device, or TRITON_INTERPRET is set"),
]


@pytest.mark.parametrize("queries", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_lanes_equal_the_reference(head_dim, dtype, queries):
    lengths = [[5000, 17], [0, 3000], [256, 1023], [900, 0]]
    batch = ragged_batch([1, 1, 200, 33], lengths, head_dim=head_dim, dtype=dtype)
    qkv = random_rows(batch, 4).to(torch.bfloat16).to(queries)
    result = run(TritonBackend(DEVICE), batch, qkv)
    expected = run(ReferenceBackend(), batch, qkv.float())
    for got, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(got.float(), wanted, atol=3e-2, rtol=3e-2)


def test_a_pass_gives_the_same_bits_every_time():
    batch = ragged_batch([1, 40, 1], [[3000, 5], [90, 700], [0, 64]], dtype=torch.bfloat16)
    qkv = random_rows(batch, 8).to(torch.bfloat16)
    first = run(TritonBackend(DEVICE), batch, qkv)
    for _ in range(20):
        assert all(map(torch.equal, run(TritonBackend(DEVICE), batch, qkv), first))


@pytest.fixture(scope="module")
def flashinfer():
    """The package, its calls recorded; skips with the probe's reason where it cannot serve."""
    library = probe.load("cuda", 64, 16, "auto")
    return pytest.skip(library) if isinstance(library, str) else Recording(library)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16)])
def test_long_lanes_are_flashinfers_and_equal_the_reference(flashinfer, head_dim, dtype, group):
    """Without masses, with masses up to some entry, and with masses to the end."""
    lengths = [[5000, 17], [0, 3000], [256, 1023], [900, 0], [4000, 3300], [2500, 2000], [300, 200]]
    masses = {4: 2000, 5: 700, 6: 300}
    batch = batch_with([1, 1, 200, 33, 1, 300, 1], lengths, masses, head_dim=head_dim, dtype=dtype)
    backend, before = FlashInferBackend(flashinfer, DEVICE), flashinfer.count("run")
    qkv = random_rows(batch, group).to(dtype)
    for layer in range(2):
        result = run(backend, batch, qkv, layer)
        expected = run(ReferenceBackend(), batch, qkv.float(), layer)
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got.float(), wanted, atol=3e-2, rtol=3e-2)
    assert flashinfer.count("run") - before == 2 * len(batch.plan.parts) == 2 * 5
    assert not backend._broken


def test_a_plan_of_flashinfers_serves_until_a_page_is_added(flashinfer):
    backend = FlashInferBackend(flashinfer, DEVICE)
    for length in range(1000, 1020):
        batch = batch_with([1, 1], [[length, length]] * 2, dtype=torch.bfloat16)
        before, qkv = flashinfer.count("plan"), random_rows(batch, 4).to(torch.bfloat16)
        _, out, _ = run(backend, batch, qkv)
        _, expected, _ = run(ReferenceBackend(), batch, qkv.float())
        torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)
        assert flashinfer.count("plan") - before == (length in (1000, 1008))


def engine_on(device, weights, kv_dtype, make=TritonBackend):
    config = replace(TINY, head_dim=64, hidden_size=128, intermediate_size=256, max_context=2048)
    backend = ReferenceBackend() if device == CPU else make(device)
    decoder = Decoder(config, RandomWeights(config), backend, weights)
    options = EngineConfig(debug_checks=True, prefill_chunk=128)
    return Engine(decoder, options, kv_dtype, 16, (), entry_kernels=backend.entries, device=device)


def talk(engine, cache, ids, said=()):
    """Replies of a conversation's two turns, and the lengths of its lanes. What was `said` in them can be
    given, so that the second turn has the same history."""
    lanes, given = Lanes(), []
    for turn in range(2):
        (request,) = engine.add(ids, greedy(8), lanes=lanes, cache=cache)
        tokens = drain(engine).tokens[request]
        given.append(tokens)
        ids = [*ids, *(said[turn] if said else tokens), *prompt(20, seed=turn)]
    return given, engine.store.lengths[lanes.seq].copy()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("policy", [None, "snapkv", "adakv", "expected", "gracekv"])
def test_the_engine_speaks_as_on_the_cpu(policy, kv_dtype):
    cache = None if policy is None else keep(policy, 0.4)
    ids = prompt(400, seed=5)
    expected, lengths = talk(engine_on(CPU, "f32", kv_dtype), cache, ids)
    found, held = talk(engine_on(DEVICE, "bf16", kv_dtype), cache, ids, expected)
    # In bfloat16 a near tie may fall the other way, after which a reply goes on by itself.
    pairs = list(zip(found[0] + found[1], expected[0] + expected[1], strict=True))
    assert sum(mine == theirs for mine, theirs in pairs) >= 0.6 * len(pairs)
    assert held.sum() == lengths.sum()


@pytest.mark.parametrize("policy", [None, "adakv", "gracekv"])
def test_the_engine_speaks_with_flashinfer_as_on_the_cpu(flashinfer, policy, monkeypatch):
    monkeypatch.setattr(shares, "TAIL", 3)
    cache = None if policy is None else keep(policy, 0.4)
    ids, before = prompt(400, seed=5), flashinfer.count("run")
    expected, lengths = talk(engine_on(CPU, "f32", torch.bfloat16), cache, ids)
    engine = engine_on(DEVICE, "bf16", torch.bfloat16, lambda place: FlashInferBackend(flashinfer, place))
    found, held = talk(engine, cache, ids, expected)
    pairs = list(zip(found[0] + found[1], expected[0] + expected[1], strict=True))
    assert sum(mine == theirs for mine, theirs in pairs) >= 0.6 * len(pairs)
    assert held.sum() == lengths.sum() and flashinfer.count("run") > before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_rows_zoom_in_as_on_the_cpu(dtype):
    for options in (
        {},
        {"rows": 300, "spans": 400, "moves": 20},
        {"longest": 60, "router": True, "parts": 3},
    ):
        shape = Shape(dtype=dtype, **options)
        expected, found = routed(shape, CPU), routed(shape, DEVICE)
        # Of tokens that are worth nearly as much one may go for another.
        assert int((found & expected).sum()) >= 0.98 * int(expected.sum()) > 0


def test_a_pool_that_does_not_fit_is_one_sentence():
    from minikv.cache.pool import PagePool
    from minikv.errors import ConfigError

    with pytest.raises(ConfigError, match="could not be allocated; ask for less with kv_hot"):
        PagePool(10**9, 16, 128, torch.bfloat16, device=DEVICE)
