"""What needs a CUDA device: `pytest -m gpu`. Those of test_triton_attention.py run there too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from keeping import keep
from tiny import TINY, RandomWeights, drain, greedy, prompt
from triton_tools import DEVICE, HEAD_DIMS, ragged_batch, random_rows, run

from minikv.config import EngineConfig
from minikv.engine import Engine
from minikv.kernels.backend import CPU
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


def engine_on(device, weights, kv_dtype):
    config = replace(TINY, head_dim=64, hidden_size=128, intermediate_size=256, max_context=2048)
    backend = ReferenceBackend() if device == CPU else TritonBackend(device)
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


def test_a_pool_that_does_not_fit_is_one_sentence():
    from minikv.cache.pool import PagePool
    from minikv.errors import ConfigError

    with pytest.raises(ConfigError, match="could not be allocated; ask for less with kv_hot"):
        PagePool(10**9, 16, 128, torch.bfloat16, device=DEVICE)
