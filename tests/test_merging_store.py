"""Lanes with merged entries: counts and masses against a plain model of lists, and what kernels see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lanes import DIM, HEADS, LAYERS, PAGE, Mirror
from tiny import TINY, RandomWeights, prompt, tiny_decoder

from minikv.cache.lanes import LaneStore
from minikv.cache.policies.base import Rows
from minikv.cache.pool import PagePool
from minikv.kernels.cpu.library import LibraryMissing, load_library
from minikv.kernels.reference import ReferenceBackend
from minikv.kernels.torch_cpu import TorchBackend
from minikv.scheduler.batching import Rows as BatchRows
from minikv.scheduler.batching import batch_of


class MergedMirror(Mirror):
    """Entries are (number, position) as before; `counts` has how many tokens an entry of a lane stands for,
    if more than one, and `ends` the position after the last token that was merged."""

    def __init__(self, **options):
        super().__init__(**options)
        self.counts: dict = {}
        self.ends: dict[int, int] = {}

    def merge(self, seq, size):
        """Every `size` neighbours of a lane, but for the last few, become the first of them."""
        new = np.empty((LAYERS, HEADS), dtype=object)
        counts = dict(self.counts.get(seq, {}))
        end = 0
        for lane in np.ndindex(LAYERS, HEADS):
            entries = self.rows[seq][lane]
            cut = max(0, len(entries) - 3)
            groups = [entries[i : min(i + size, cut)] for i in range(0, cut, size)]
            groups += [[entry] for entry in entries[cut:]]
            new[lane] = [group[0] for group in groups]
            for group in groups:
                if len(group) > 1:
                    # Lanes share their entries but not their fate: the count is one of the lane.
                    counts[(lane, group[0])] = sum(self.lane_count(seq, lane, e) for e in group)
            end = max([end, *(group[-1][1] + 1 for group in groups[:-3])])
        self.store.replace(seq, lambda layer: self.as_rows(seq, layer, new, counts), end)
        self.rows[seq], self.counts[seq] = new, counts
        self.ends[seq] = max(self.ends.get(seq, 0), end)

    def lane_count(self, seq, lane, entry, counts=None):
        return (counts or self.counts.get(seq, {})).get((lane, entry), 1)

    def as_rows(self, seq, layer, new, counts):
        longest = max((len(new[layer, head]) for head in range(HEADS)), default=0)
        numbers = torch.zeros(HEADS, longest)
        positions = torch.full((HEADS, longest), -1)
        held = torch.zeros(HEADS, longest, dtype=torch.int64)
        source = torch.zeros(HEADS, longest, dtype=torch.int64)
        for head in range(HEADS):
            for i, entry in enumerate(new[layer, head]):
                numbers[head, i], positions[head, i] = entry
                held[head, i] = self.lane_count(seq, (layer, head), entry, counts)
                source[head, i] = self.rows[seq][layer, head].index(entry)
        keys = numbers[..., None].expand(-1, -1, DIM).contiguous()
        fixed = torch.zeros(HEADS, longest, dtype=torch.bool)
        return Rows(keys, -keys, numbers, positions, held, fixed), source

    def truncate(self, seq, position):
        whole = position >= self.ends.get(seq, 0)
        assert self.store.can_truncate(seq, position) == whole
        if whole:
            super().truncate(seq, position)

    def fork(self, seq):
        known = set(self.rows)
        super().fork(seq)
        for copy in set(self.rows) - known:
            self.counts[copy], self.ends[copy] = dict(self.counts.get(seq, {})), self.ends.get(seq, 0)

    def close(self, seq):
        super().close(seq)
        self.counts.pop(seq, None)
        self.ends.pop(seq, None)

    def check(self):
        super().check()
        for seq, lanes in self.rows.items():
            counts = self.store.counts(seq)
            for layer, head in np.ndindex(LAYERS, HEADS):
                expected = [self.lane_count(seq, (layer, head), e) for e in lanes[layer, head]]
                assert counts[layer, head, : len(expected)].tolist() == expected
                assert not counts[layer, head, len(expected) :].any()
                one_layer = self.store.counts(seq, layer)[head]
                assert one_layer[: len(expected)].tolist() == expected
            merged = sum(
                self.lane_count(seq, lane, e) > 1 for lane in np.ndindex(LAYERS, HEADS) for e in lanes[lane]
            )
            assert self.store.num_merged(seq) == merged


operations = st.lists(
    st.tuples(
        st.sampled_from(["open", "append", "merge", "rewrite", "fresh", "truncate", "fork", "close"]),
        st.integers(0, 2),
        st.integers(0, 30),
        st.integers(0, 2**31),
    ),
    max_size=40,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("keys_transposed", [False, True])
@given(operations)
@settings(max_examples=20, deadline=None)
def test_random_operations_keep_every_row_count_and_page(dtype, keys_transposed, steps):
    mirror = MergedMirror(dtype=dtype, keys_transposed=keys_transposed)
    for kind, which, number, seed in steps:
        seqs = sorted(mirror.rows)
        if kind == "open" or not seqs:
            mirror.open()
            continue
        seq = seqs[which % len(seqs)]
        if kind == "append":
            mirror.append(seq, number)
        elif kind == "merge":
            mirror.merge(seq, 2 + number % 3)
        elif kind in ("rewrite", "fresh"):
            mirror.rewrite(seq, np.random.default_rng(seed), kind == "fresh")
        elif kind == "truncate":
            mirror.truncate(seq, number)
        elif kind == "fork":
            mirror.fork(seq)
        else:
            mirror.close(seq)
        mirror.check()


def merged_mirror(tokens=40, size=3, **options):
    mirror = MergedMirror(pages=200, **options)
    mirror.open()
    mirror.append(0, tokens)
    mirror.merge(0, size)
    return mirror


def test_replaced_lanes_free_the_pages_no_longer_needed_in_the_same_call():
    mirror = merged_mirror()
    assert mirror.store.lengths[0].tolist() == [[16] * HEADS] * LAYERS
    assert mirror.pool.num_pages - mirror.pool.num_free == LAYERS * HEADS * 16 // PAGE
    mirror.store.check()


def test_a_fork_of_merged_lanes_goes_its_own_way():
    mirror = merged_mirror()
    copy = mirror.store.fork(0)
    before = mirror.store.counts(0)
    assert torch.equal(mirror.store.counts(copy), before)
    mirror.store.rewrite(copy, torch.arange(16).expand(LAYERS, HEADS, 16) > 12)
    assert mirror.store.num_merged(copy) == 0
    assert torch.equal(mirror.store.counts(0), before)


def test_masses_are_forgotten_once_no_entry_has_one():
    mirror = merged_mirror()
    mirror.pool.log_mass.zero_()
    slots, _ = mirror.store.slots(0)
    mirror.pool.log_mass.view(-1)[slots[..., 0]] = 1.0
    assert mirror.store.has_mass[0]
    mirror.store.rewrite(0, torch.arange(16).expand(LAYERS, HEADS, 16) != 3)
    assert mirror.store.has_mass[0], "the first entries still have masses"
    mirror.store.rewrite(0, torch.arange(15).expand(LAYERS, HEADS, 15) != 0)
    assert not mirror.store.has_mass[0]


def test_an_entry_that_comes_back_unchanged_is_not_rounded_again():
    pool = PagePool(60, PAGE, 16, torch.int8)
    store = LaneStore(pool, 1, 1, 2, 64)
    seq = store.open()
    assert store.reserve(seq, 24)
    slots = torch.from_numpy(store.next_slots(seq, 24))
    rows = torch.randn(2, *slots.shape, 16, generator=torch.Generator().manual_seed(0))
    pool.write_rows(slots, rows[0], rows[1])
    pool.write_entries(slots, torch.arange(24).expand(slots.shape))
    store.append(seq, 24)
    before = [t.clone() for t in pool.take_rows(slots.reshape(-1))]
    keys, values = pool.read_rows(slots[0])
    kept = torch.arange(0, 24, 2).expand(2, 12)
    positions, ones = kept.clone(), torch.ones(2, 12, dtype=torch.int64)
    changed = values[:, ::2] + 0.5
    given = Rows(keys[:, ::2], changed, torch.zeros(2, 12), positions, ones, torch.zeros(2, 12) > 0)
    store.replace(seq, lambda layer: (given, kept), 0)
    slots, _ = store.slots(seq)
    after = pool.take_rows(slots.reshape(-1))
    for old, new in ((before[0], after[0]), (before[2], after[2])):
        assert torch.equal(new.view(2, 12, -1), old.view(2, 24, -1)[:, ::2])
    torch.testing.assert_close(pool.read_rows(slots)[1][0], changed, atol=0.02, rtol=0)


# What is appended to lanes that once held masses


def decoders():
    yield "torch", lambda: (tiny_decoder(TorchBackend()), False, 32)
    yield "reference", lambda: (tiny_decoder(ReferenceBackend()), False, 32)
    try:
        load_library()
    except LibraryMissing:
        return
    from minikv.kernels.cpu.backend import CpuBackend
    from minikv.models.packed_decoder import PackedDecoder

    yield "cpu", lambda: (PackedDecoder(TINY, RandomWeights(TINY), CpuBackend(2), "f32"), True, 32)
    yield "cpu-plain", lambda: (tiny_decoder(CpuBackend(2)), True, 32)


@pytest.mark.parametrize("name", [name for name, _ in decoders()])
def test_new_rows_in_slots_that_held_masses_have_none(name):
    make = dict(decoders())[name]
    decoder, transposed, page = make()
    pool = PagePool(20, page, TINY.head_dim, torch.float32, keys_transposed=transposed)
    store = LaneStore(pool, 1, TINY.num_layers, TINY.num_kv_heads, 128)
    seq = store.open()
    ids = prompt(30)

    def feed(count):
        assert store.reserve(seq, count)
        first = int(store.num_tokens[seq])
        batch = batch_of(store, [BatchRows(seq, ids[first : first + count], first)])
        out = decoder.forward(batch)
        store.append(seq, count)
        return out

    feed(20)
    slots, _ = store.slots(seq)
    pool.log_mass.view(-1)[slots] = 3.0
    store.has_mass[seq] = True
    store.rewrite(seq, torch.arange(20).expand(TINY.num_layers, TINY.num_kv_heads, 20) < 8)
    feed(9)
    feed(1)
    slots, _ = store.slots(seq)
    masses = pool.log_mass.view(-1)[slots]
    assert (masses[..., :8] == 3.0).all()
    assert (masses[..., 8:] == 0.0).all()
    assert store.counts(seq).sum().item() == 18 * TINY.num_layers * TINY.num_kv_heads


def test_the_backends_agree_on_lanes_with_masses():
    outputs = []
    for name, make in decoders():
        decoder, transposed, page = make()
        pool = PagePool(20, page, TINY.head_dim, torch.float32, keys_transposed=transposed)
        store = LaneStore(pool, 1, TINY.num_layers, TINY.num_kv_heads, 128)
        seq = store.open()
        ids = prompt(30)
        assert store.reserve(seq, 30)
        decoder.forward(batch_of(store, [BatchRows(seq, ids[:20], 0)]))
        store.append(seq, 20)
        slots, _ = store.slots(seq)
        pool.log_mass.view(-1)[slots[..., ::3]] = 1.5
        store.has_mass[seq] = True
        outputs.append((name, decoder.forward(batch_of(store, [BatchRows(seq, ids[20:], 20)]))))
    for _, other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0][1], rtol=1e-3, atol=1e-3)
