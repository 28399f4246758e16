"""The page pool and the lanes: random operations against a plain model of lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool

LAYERS, HEADS, DIM, PAGE = 2, 3, 4, 4


class Mirror:
    """A LaneStore beside what it should hold: per sequence and lane, a list of row numbers."""

    def __init__(self, pages=60, seqs=3, dtype=torch.float32, keys_transposed=False):
        self.pool = PagePool(pages, PAGE, DIM, dtype, poison=True, keys_transposed=keys_transposed)
        self.store = LaneStore(self.pool, seqs, LAYERS, HEADS, 64)
        self.rows: dict[int, np.ndarray] = {}
        self.next_row = 1
        self.next_position: dict[int, int] = {}

    def open(self):
        if self.store.num_free_seqs:
            seq = self.store.open()
            self.rows[seq] = np.empty((LAYERS, HEADS), dtype=object)
            for lane in np.ndindex(LAYERS, HEADS):
                self.rows[seq][lane] = []
            self.next_position[seq] = 0

    def append(self, seq, count):
        longest = int(self.store.lengths[seq].max())
        if longest + count > 64 or not self.store.reserve(seq, count):
            return
        slots = torch.from_numpy(self.store.next_slots(seq, count))
        start = self.next_position[seq]
        numbers = torch.arange(self.next_row, self.next_row + count)
        rows = numbers.view(1, 1, -1, 1).expand(LAYERS, HEADS, count, DIM).float()
        self.pool.write_rows(slots, rows, -rows)
        self.pool.write_entries(slots, torch.arange(start, start + count), numbers.float())
        self.store.append(seq, count)
        # Nothing else appends entries with masses, so this is not known of itself.
        self.store.has_mass[seq], self.store.mass_ends[seq] = True, self.store.lengths[seq]
        for lane in np.ndindex(LAYERS, HEADS):
            self.rows[seq][lane] = self.rows[seq][lane] + [
                (int(n), start + i) for i, n in enumerate(numbers.tolist())
            ]
        self.next_row += count
        self.next_position[seq] += count

    def rewrite(self, seq, random, fresh):
        longest = int(self.store.lengths[seq].max())
        keep = torch.from_numpy(random.random((LAYERS, HEADS, longest)) < random.random())
        self.store.rewrite(seq, keep, fresh)
        for lane in np.ndindex(LAYERS, HEADS):
            entries = self.rows[seq][lane]
            self.rows[seq][lane] = [e for i, e in enumerate(entries) if keep[lane][i]]

    def truncate(self, seq, position):
        self.store.truncate(seq, position)
        for lane in np.ndindex(LAYERS, HEADS):
            self.rows[seq][lane] = [e for e in self.rows[seq][lane] if e[1] < position]
        self.next_position[seq] = min(position, self.next_position[seq])

    def fork(self, seq):
        copy = self.store.fork(seq)
        if copy is not None:
            self.rows[copy] = self.rows[seq].copy()
            self.next_position[copy] = self.next_position[seq]

    def close(self, seq):
        self.store.close(seq)
        del self.rows[seq]

    def check(self):
        self.store.check()
        for seq, lanes in self.rows.items():
            slots, valid = self.store.slots(seq)
            keys, values = self.pool.read_rows(slots)
            positions, mass = self.store.positions(seq), self.pool.log_mass.view(-1)[slots]
            for lane in np.ndindex(LAYERS, HEADS):
                kept = valid[lane]
                numbers = [n for n, _ in lanes[lane]]
                # A row of equal numbers comes back from int8 but for the last bit of its scale.
                assert keys[lane][kept][:, 0].float().round(decimals=2).tolist() == numbers
                assert values[lane][kept][:, -1].float().round(decimals=2).tolist() == [-n for n in numbers]
                assert mass[lane][kept].tolist() == numbers
                assert positions[lane][kept].tolist() == [p for _, p in lanes[lane]]
                # No lane holds a page it does not need, but for room reserved ahead.
                assert self.store.num_pages[seq][lane] >= -(-len(numbers) // PAGE)


operations = st.lists(
    st.tuples(
        st.sampled_from(["open", "append", "rewrite", "rewrite-fresh", "truncate", "fork", "close"]),
        st.integers(0, 2),
        st.integers(0, 30),
        st.integers(0, 2**31),
    ),
    max_size=40,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("keys_transposed", [False, True])
@given(operations)
@settings(max_examples=60)
def test_random_operations_keep_every_row_and_every_page(dtype, keys_transposed, steps):
    mirror = Mirror(dtype=dtype, keys_transposed=keys_transposed)
    for kind, which, number, seed in steps:
        seqs = sorted(mirror.rows)
        if kind == "open" or not seqs:
            mirror.open()
            mirror.check()
            continue
        seq = seqs[which % len(seqs)]
        if kind == "append":
            mirror.append(seq, number)
        elif kind.startswith("rewrite"):
            mirror.rewrite(seq, np.random.default_rng(seed), kind.endswith("fresh"))
        elif kind == "truncate":
            mirror.truncate(seq, number)
        elif kind == "fork":
            mirror.fork(seq)
        else:
            mirror.close(seq)
        mirror.check()
    for seq in list(mirror.rows):
        mirror.close(seq)
    mirror.store.check()
    assert mirror.pool.num_free == mirror.pool.num_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("keys_transposed", [False, True])
def test_rewrite_moves_whole_entries_bit_for_bit(dtype, keys_transposed):
    mirror = Mirror(pages=200, dtype=dtype, keys_transposed=keys_transposed)
    mirror.open()
    mirror.append(0, 37)
    slots, _ = mirror.store.slots(0)
    noise = torch.randn(2, *slots.shape, DIM, generator=torch.Generator().manual_seed(0))
    mirror.pool.write_rows(slots, noise[0], noise[1])
    keys, values = mirror.pool.read_rows(slots)
    keep = torch.zeros(LAYERS, HEADS, 37, dtype=torch.bool)
    keep[..., 1::3] = True
    mirror.store.rewrite(0, keep)
    slots, _ = mirror.store.slots(0)
    kept_keys, kept_values = mirror.pool.read_rows(slots)
    assert torch.equal(kept_keys, keys[:, :, 1::3])
    assert torch.equal(kept_values, values[:, :, 1::3])


@pytest.mark.parametrize("fresh", [False, True])
def test_rewrite_frees_the_pages_no_longer_needed_in_the_same_call(fresh):
    mirror = Mirror(pages=200)
    mirror.open()
    mirror.append(0, 40)
    assert mirror.pool.num_pages - mirror.pool.num_free == LAYERS * HEADS * 10
    keep = torch.zeros(LAYERS, HEADS, 40, dtype=torch.bool)
    keep[:, 0, :4] = True
    keep[:, 1, ::8] = True
    mirror.store.rewrite(0, keep, fresh)
    assert mirror.store.lengths[0].tolist() == [[4, 5, 0]] * LAYERS
    assert mirror.pool.num_pages - mirror.pool.num_free == LAYERS * (1 + 2 + 0)
    mirror.store.check()


def test_rewrite_that_keeps_everything_changes_no_bit():
    mirror = Mirror(pages=200)
    mirror.open()
    mirror.append(0, 37)
    before = [t.clone() for t in (mirror.pool.keys, mirror.pool.values, mirror.pool.positions)]
    mirror.store.rewrite(0, torch.ones(LAYERS, HEADS, 37, dtype=torch.bool))
    for old, new in zip(before, (mirror.pool.keys, mirror.pool.values, mirror.pool.positions), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())


def test_rewrite_to_fresh_pages_without_room_falls_back_to_in_place():
    mirror = Mirror(pages=LAYERS * HEADS * 2)
    mirror.open()
    mirror.append(0, 8)
    assert mirror.pool.num_free == 0
    mirror.store.rewrite(0, torch.ones(LAYERS, HEADS, 8, dtype=torch.bool), fresh=True)
    mirror.check()


def test_reserve_without_room_changes_nothing():
    mirror = Mirror(pages=LAYERS * HEADS)
    mirror.open()
    mirror.append(0, 3)
    assert not mirror.store.reserve(0, 2)
    assert mirror.pool.num_free == 0
    mirror.check()


def test_a_lane_gets_a_run_of_consecutive_pages_from_an_empty_pool():
    mirror = Mirror(pages=200)
    mirror.open()
    mirror.append(0, 40)
    assert (np.diff(mirror.store.pages[0][..., :10]) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_reused_page_shows_nothing_of_its_former_owner(dtype):
    mirror = Mirror(dtype=dtype)
    mirror.open()
    mirror.append(0, 6)
    mirror.close(0)
    assert torch.isnan(mirror.pool.keys[1]).all(), "freed pages are poisoned in tests"
    mirror.open()
    assert mirror.store.reserve(0, 1)
    assert not mirror.pool.keys[mirror.store.pages[0, 0, 0, 0]].any()


def test_freeing_a_page_twice_is_caught():
    pool = PagePool(4, PAGE, DIM, torch.float32)
    ids = pool.allocate(2)
    pool.free(ids)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(ids)


def test_a_large_pool_takes_no_memory_until_it_is_written():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    PagePool(200_000, 32, 64, torch.float32)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_an_area_that_is_not_wanted_any_more_is_not_taken():
    mirror = Mirror()
    mirror.open()
    store, free = mirror.store, mirror.pool.num_free
    store.ask_area(0, 2)
    store.ask_area(0, 0)
    assert not store.has_area(0) and store.pages_missing(0, 1) == LAYERS * HEADS
    assert store.reserve(0, 1)
    assert store.areas[0] is None and mirror.pool.num_free == free - LAYERS * HEADS
    store.ask_area(0, 2)
    assert store.take_area(0) and store.areas[0].per_lane == 2
    store.ask_area(0, 2)
    assert store.areas[0].per_lane == 2
    store.check()
