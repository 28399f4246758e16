"""Staging on every backend and KV dtype: bit for bit what lies in the pool otherwise, so the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from demoting import demoting
from tiny import TINY, RandomWeights, drain, greedy, prompt, tiny_decoder

from minikv.cache.pool import page_bytes
from minikv.config import EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.kernels.cpu.backend import CpuBackend, why_unusable
from minikv.kernels.reference import ReferenceBackend
from minikv.kernels.torch_cpu import TorchBackend
from minikv.models.packed_decoder import PackedDecoder
from minikv.scheduler.request import Lanes

LAYERS = 6
LANES = LAYERS * TINY.num_kv_heads
CACHE = demoting("snapkv", 0.2)


def talk(make, dtype, pages, cache, page=32, sizes=(401, 33), transposed=False):
    """Two turns, and how many of them were staged."""
    hot = None if pages is None else (pages + 1) * page_bytes(page, TINY.head_dim, dtype)
    tiers = TierConfig(hot=hot, warm="64MiB")
    config = EngineConfig(debug_checks=True, prefill_chunk=32, tiers=tiers)
    engine = Engine(make(), config, dtype, page, (), keys_transposed=transposed)
    lanes, history, said = Lanes(), [], []
    for seed, size in enumerate(sizes):
        history += prompt(size, seed=seed)
        (request,) = engine.add(history, greedy(5), lanes=lanes, cache=cache)
        said.append(drain(engine).tokens[request])
        history += said[-1]
    return said, engine.scheduler.starting.num_staged


def check(make, dtype, cache=CACHE, pages=9 * LANES, **options):
    expected, none = talk(make, dtype, None, cache, **options)
    given, twice = talk(make, dtype, pages, cache, **options)
    assert (given, none, twice) == (expected, 0, 2)


def decoder_on(backend):
    return lambda: tiny_decoder(backend(), num_layers=LAYERS, max_context=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("backend", [TorchBackend, ReferenceBackend])
def test_backends_in_torch_say_what_they_would_in_a_larger_pool(backend, dtype):
    check(decoder_on(backend), dtype)


@pytest.mark.skipif(why_unusable(TINY.head_dim, 32) is not None, reason="the kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("cache", [CACHE, demoting("gracekv", 0.2, refit=True), demoting("adakv", 60)])
def test_compiled_kernels_say_what_they_would_in_a_larger_pool(dtype, cache):
    shape = replace(TINY, hidden_size=64, intermediate_size=96, num_layers=LAYERS, max_context=512)

    def make():
        return PackedDecoder(shape, RandomWeights(shape), CpuBackend(2), "f32")

    check(make, dtype, cache, transposed=True)


@pytest.mark.slow  # minutes in Triton's interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_triton_says_what_it_would_in_a_larger_pool(dtype):
    pytest.importorskip("triton", reason="triton is not installed (pip install 'minikv[triton]')")
    from minikv.kernels.triton.backend import TritonBackend
    from minikv.kernels.triton.probe import interpreted

    if not interpreted():
        pytest.skip("TRITON_INTERPRET is off")
    check(decoder_on(TritonBackend), dtype, pages=83, page=16, sizes=(101, 17))
