"""Every tensor of a pass is where it has to be: the engine on a device that is only pretended."""

from __future__ import annotations

import pytest
import torch
from flashinfer_tools import Recording, documented
from keeping import keep
from pretended_device import DEVICE, Distant, near, pretended_device
from tiny import TINY, RandomWeights, drain, greedy, prompt
from triton_tools import HEAD_DIMS, INTERPRETED_ONLY  # before the kernels: it skips if there is no triton

from minikv.cache.compress import Compressor
from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool, page_bytes
from minikv.config import EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.kernels.backend import CPU
from minikv.kernels.flashinfer import shares
from minikv.kernels.flashinfer.backend import FlashInferBackend
from minikv.kernels.triton import backend as backend_module
from minikv.kernels.triton import entries as entries_module
from minikv.kernels.triton.backend import TritonBackend
from minikv.kernels.triton.entries import TritonEntries
from minikv.models.decoder import Decoder
from minikv.scheduler.request import Lanes

pytestmark = INTERPRETED_ONLY

KERNELS = {
    backend_module: ("rotate_and_write", "attend_lanes", "merge_splits"),
    entries_module: ("copy_entries", "put_rounded"),
}


def test_the_pretended_device_keeps_its_tensors_apart(monkeypatch):
    with pretended_device(monkeypatch, KERNELS):
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        assert isinstance(there, Distant) and there.device.type == DEVICE.type
        assert isinstance(there + 1, Distant) and not isinstance(there.to(CPU), Distant)
        assert isinstance(there[torch.tensor([0, 2])], Distant)
        with pytest.raises(RuntimeError, match="of the host and of the device"):
            there + here
        with pytest.raises(AssertionError, match="a tensor of the host"):
            entries_module.copy_entries[(1,)](here)


class OnDevice:
    """FlashInfer's wrappers for the pretended device: page tables to plan for are of the host, all else is of
    the device."""

    def __init__(self, library):
        self.library = library

    def __getattr__(self, name):
        make = getattr(self.library, name)

        def construct(*given, **named):
            return _OnDevice(make(*map(near, given), **{key: near(value) for key, value in named.items()}))

        return construct


class _OnDevice:
    def __init__(self, wrapper):
        self.wrapper, self.plan = wrapper, wrapper.plan

    def run(self, q, paged_kv_cache, **options):
        found = self.wrapper.run(near(q), tuple(map(near, paged_kv_cache)), **options)
        return tuple(map(Distant, found))


def talk(device, cache, kv_dtype, kind, make=TritonBackend, size=50, tiers=None, **changes):
    """Two turns of a conversation, the second after the pages moved; what was said."""
    config = TINY.__class__(**{**TINY.__dict__, "head_dim": HEAD_DIMS[0], **changes})
    decoder = Decoder(config, RandomWeights(config), make(device), kind)
    engine = Engine(
        decoder,
        EngineConfig(debug_checks=True, prefill_chunk=32, tiers=tiers or TierConfig()),
        kv_dtype,
        16,
        (),
        entry_kernels=decoder.backend.entries,
        device=device,
    )
    ids, lanes, said = prompt(size), Lanes(), []
    for turn in range(2):
        (request,) = engine.add(ids, greedy(3), lanes=lanes, cache=cache)
        collector = drain(engine)
        assert collector.reason(request) == "length", collector.finished[request].message
        said.append(collector.tokens[request])
        ids = [*ids, *said[-1], *prompt(5, seed=turn)]
    if tiers is not None:
        assert engine.tier_stats["prompts_staged"] == 2
    return said, engine.store.pool


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
def test_nothing_that_is_staged_is_left_behind(kv_dtype, monkeypatch):
    cache = keep("adakv", 12, evicted="demote")
    width = page_bytes(16, HEAD_DIMS[0], kv_dtype)
    tiers = TierConfig(hot=width * 78, warm="64MiB", async_copies=False)
    options = {"num_layers": 6, "size": 101, "tiers": tiers}
    expected, _ = talk(CPU, cache, kv_dtype, "f32", **options)
    with pretended_device(monkeypatch, KERNELS):
        assert talk(DEVICE, cache, kv_dtype, "f32", **options)[0] == expected


@pytest.mark.parametrize(
    ("policy", "kv_dtype", "kind", "changes"),
    [
        (None, torch.bfloat16, "bf16", {"qkv_bias": True, "architecture": "qwen2"}),
        (None, torch.float32, "f32", {}),
        ("adakv", torch.float16, "f16", {"qk_norm": True, "architecture": "qwen3"}),
        ("expected", torch.bfloat16, "bf16", {}),
        ("compresskv", torch.int8, "bf16", {}),
        ("gracekv", torch.int8, "bf16", {}),
    ],
)
def test_nothing_of_a_pass_or_a_compression_is_left_behind(policy, kv_dtype, kind, changes, monkeypatch):
    cache = None if policy is None else keep(policy, 0.4, refit=policy == "gracekv")
    expected, _ = talk(CPU, cache, kv_dtype, kind, **changes)
    seen, view = [], Compressor.view

    def watched(self, *args, **options):
        found = view(self, *args, **options)
        seen.append(isinstance(found.keys, Distant))
        return found

    monkeypatch.setattr(Compressor, "view", watched)
    with pretended_device(monkeypatch, KERNELS):
        said, pool = talk(DEVICE, cache, kv_dtype, kind, **changes)
    assert said == expected
    # Trees are made on the host; scores where the keys are.
    assert set(seen) == (set() if policy is None else {policy != "gracekv"})
    assert all(isinstance(t, Distant) for t in (pool.keys, pool.values, pool.log_mass, pool.positions))


@pytest.mark.parametrize("policy", [None, "gracekv"])
def test_nothing_that_flashinfer_reads_is_left_behind(policy, monkeypatch):
    monkeypatch.setattr(shares, "TAIL", 3)
    library = Recording(documented())
    cache = None if policy is None else keep(policy, 0.4, refit=True)
    expected, _ = talk(CPU, cache, torch.bfloat16, "bf16", lambda device: FlashInferBackend(library, device))
    calls = len(library.calls)
    assert library.count("run")
    with pretended_device(monkeypatch, KERNELS):
        backend = FlashInferBackend(OnDevice(library), DEVICE)
        said, _ = talk(DEVICE, cache, torch.bfloat16, "bf16", lambda device: backend)
    assert said == expected and not backend._broken
    assert len(library.calls) == 2 * calls


def handled(device, dtype):
    """What lanes hold after a fork, a cut, compaction in place and to fresh pages, and a way out and back."""
    pool = PagePool(60, 16, 64, dtype, poison=True, device=device)
    pool.kernels = TritonEntries()
    store = LaneStore(pool, 4, 2, 2, 100)
    generator = torch.Generator().manual_seed(0)
    seq = store.open()
    assert store.reserve(seq, 70)
    slots = torch.from_numpy(store.next_slots(seq, 70))
    rows = torch.randn(2, *slots.shape, 64, generator=generator).to(torch.bfloat16).float()
    pool.write_rows(slots, *(rows.to(device)))
    pool.write_entries(slots, torch.arange(70), torch.rand(slots.shape, generator=generator))
    store.append(seq, 70)
    store.has_mass[seq], store.mass_ends[seq] = True, store.lengths[seq]
    twin = store.fork(seq)
    store.truncate(twin, 60)
    for fresh in (False, True):
        longest = int(store.lengths[twin].max())
        store.rewrite(twin, torch.rand(2, 2, longest, generator=generator) < 0.7, fresh)
    chosen = torch.arange(int(store.lengths[seq, 1].max())).expand(2, -1) >= 30
    out = store.take(seq, 1, chosen)
    store.check()
    return [pool.stored(store.slots(s)[0][store.slots(s)[1]]) for s in (seq, twin)] + [out.rows]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_lanes_are_handled_as_on_the_host(dtype, monkeypatch):
    expected = handled(CPU, dtype)
    with pretended_device(monkeypatch, KERNELS):
        found = handled(DEVICE, dtype)
    for got, wanted in zip(found, expected, strict=True):
        for a, b in zip(got, wanted, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
