"""Entries that leave lanes as spans and come back: bit for bit, in order, with no page lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lanes import DIM, HEADS, LAYERS, PAGE
from test_merging_store import MergedMirror
from tiering import KV_DTYPES, MODEL, same

from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool
from minikv.cache.tiers.encode import Encoder
from minikv.cache.tiers.moves import put_back, spans_of
from minikv.cache.tiers.span import Owner, Span, owner_key
from minikv.models.config import RopeConfig
from minikv.models.rope import Rope

EXACT = Encoder(MODEL)
KEY = owner_key("sequence")


def filled(length, dtype=torch.float32, keys_transposed=False, dim=DIM, pages=400):
    """A store with one sequence of random rows, `length` in each lane."""
    pool = PagePool(pages, PAGE, dim, dtype, poison=True, keys_transposed=keys_transposed)
    store = LaneStore(pool, 3, LAYERS, HEADS, 400)
    seq = store.open()
    assert store.reserve(seq, length)
    slots = torch.from_numpy(store.next_slots(seq, length))
    rows = torch.randn(2, *slots.shape, dim, generator=torch.Generator().manual_seed(length))
    pool.write_rows(slots, rows[0], rows[1])
    pool.write_entries(slots, torch.arange(length))
    store.append(seq, length)
    return store, seq


def everything(store, seq):
    """All entries of a sequence, layer by layer."""
    taken = []
    for layer in range(LAYERS):
        width = int(store.lengths[seq, layer].max())
        taken.append(store.take(seq, layer, torch.ones(HEADS, width, dtype=torch.bool)))
    return taken


def equal(one, other):
    return all(same(a, b) for a, b in zip(one, other, strict=True))


def chosen(store, seq, share, seed=0):
    """A random part of all entries: [layers, kv_heads, n] bool."""
    shape = (LAYERS, HEADS, int(store.lengths[seq].max()))
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


# Lengths around multiples of a page, where others lost or repeated entries (T4).
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 61])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("keys_transposed", [False, True])
@pytest.mark.parametrize("most_rows", [None, PAGE])
def test_t4_t7_what_leaves_comes_back_bit_for_bit(length, dtype, keys_transposed, most_rows):
    store, seq = filled(length, dtype, keys_transposed)
    before = everything(store, seq)
    for share in (0.0, 0.3, 1.0):
        leaving = chosen(store, seq, share)
        spans = [Span.from_bytes(s.to_bytes()) for s in spans_of(store, seq, leaving, KEY, EXACT, most_rows)]
        assert equal(everything(store, seq), before)  # the lanes keep them
        assert sum(one.header.num_rows for one in spans) == int(leaving.sum())
        store.rewrite(seq, ~leaving)
        store.check()
        assert put_back(store, seq, spans[::-1], EXACT, length)
        store.check()
        assert equal(everything(store, seq), before)
        assert store.pages_of(seq) == store.pages_for(length)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_sequence_that_left_whole_comes_back_as_another(dtype):
    store, seq = filled(30, dtype)
    store.rewrite(seq, chosen(store, seq, 0.5))  # lanes of their own lengths
    before, tokens = everything(store, seq), int(store.num_tokens[seq])
    every = torch.ones(LAYERS, HEADS, int(store.lengths[seq].max()), dtype=torch.bool)
    spans = list(spans_of(store, seq, every, KEY, EXACT))
    assert [one.owner for one in spans] == [Owner(KEY, layer) for layer in range(LAYERS)]
    store.close(seq)
    other = store.open()
    assert put_back(store, other, spans, EXACT, tokens)
    store.check()
    assert equal(everything(store, other), before) and store.num_tokens[other] == tokens
    assert store.reserve(other, 5)


def test_masses_counts_and_the_end_of_what_was_merged_come_back():
    mirror = MergedMirror()
    mirror.open()
    mirror.append(0, 40)
    mirror.merge(0, 3)
    store = mirror.store
    before, end = everything(store, 0), store.merged_end(0)
    assert end and store.num_merged(0) and store.has_mass[0]
    every = torch.ones(LAYERS, HEADS, int(store.lengths[0].max()), dtype=torch.bool)
    spans = list(spans_of(store, 0, every, KEY, EXACT))
    store.close(0)
    seq = store.open()
    assert put_back(store, seq, spans, EXACT, 40)
    store.check()
    assert equal(everything(store, seq), before)
    assert store.merged_end(seq) == end and store.has_mass[seq] and not store.can_truncate(seq, end - 1)


def test_entries_of_one_head_go_to_that_head():
    store, seq = filled(20)
    before = everything(store, seq)
    leaving = torch.zeros(LAYERS, HEADS, 20, dtype=torch.bool)
    leaving[1, 2, 3:9] = True
    entries = store.take(seq, 1, leaving[1])
    span = EXACT.encode(entries.lane(2), Owner(KEY, 1, 2), 20)
    store.rewrite(seq, ~leaving)
    assert put_back(store, seq, [span], EXACT, 20)
    store.check()
    assert equal(everything(store, seq), before)


def test_pages_that_are_short_change_nothing():
    store, seq = filled(40, pages=61)
    leaving = chosen(store, seq, 0.6)
    spans = list(spans_of(store, seq, leaving, KEY, EXACT))
    store.rewrite(seq, ~leaving)
    other = store.open()
    assert store.reserve(other, 16)
    store.append(other, 16)
    before, free = everything(store, seq), store.pool.num_free
    assert not put_back(store, seq, spans, EXACT, 40)
    store.check()
    assert equal(everything(store, seq), before) and store.pool.num_free == free
    store.close(other)
    assert put_back(store, seq, spans, EXACT, 40)
    store.check()


def test_a_layer_that_cannot_be_had_loses_no_page():
    store, seq = filled(40)
    before = everything(store, seq)
    leaving = torch.ones(LAYERS, HEADS, 40, dtype=torch.bool)
    entries = [store.take(seq, layer, leaving[layer]) for layer in range(LAYERS)]
    store.rewrite(seq, ~leaving)

    def entries_of(layer):
        if layer == 1:
            raise KeyError(layer)
        return entries[layer]

    with pytest.raises(KeyError):
        store.insert(seq, np.full((LAYERS, HEADS), 40), entries_of, 40)
    store.check()
    assert store.lengths[seq].tolist() == [[40] * HEADS, [0] * HEADS]
    assert store.pages_of(seq) == HEADS * 10
    assert same(everything(store, seq)[0], before[0])


def test_a_position_that_the_lane_holds_is_refused():
    store, seq = filled(8)
    spans = list(spans_of(store, seq, chosen(store, seq, 0.5), KEY, EXACT))
    with pytest.raises(AssertionError, match="holds an entry"):
        put_back(store, seq, spans, EXACT, 8)
    store.check()


def test_spans_of_another_model_are_refused():
    store, seq = filled(8)
    spans = list(spans_of(store, seq, chosen(store, seq, 0.5), KEY, Encoder(b"other".ljust(32))))
    store.rewrite(seq, ~chosen(store, seq, 0.5))
    with pytest.raises(AssertionError, match="another model"):
        put_back(store, seq, spans, EXACT, 8)
    store.check()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_rows_that_were_rounded_come_back_within_the_error(dtype):
    store, seq = filled(120, dtype, dim=32)
    encoder = Encoder(MODEL, Rope(RopeConfig(), 32), 0.02)
    before = everything(store, seq)
    leaving = chosen(store, seq, 0.5)
    spans = list(spans_of(store, seq, leaving, KEY, encoder))
    store.rewrite(seq, ~leaving)
    assert put_back(store, seq, spans, encoder, 120)
    store.check()
    slots, valid = store.slots(seq)
    keys, values = (rows[valid].float() for rows in store.pool.read_rows(slots))
    for layer, rows in enumerate(before):
        assert torch.equal(everything(store, seq)[layer].rows.positions, rows.rows.positions)
    assert keys.isfinite().all() and values.isfinite().all()
    assert all(one.header.error <= 0.02 for one in spans)


steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "merge", "rewrite", "leave", "return", "return", "leave whole", "close"]),
        st.integers(0, 30),
        st.integers(0, 2**31),
    ),
    min_size=5,
    max_size=30,
)


class Leaving(MergedMirror):
    """With spans of entries that have left; `away` has them beside what the lanes held of them."""

    away: tuple[int, list, np.ndarray] | None = None

    def leave(self, seed, share):
        store, seq = self.store, 0
        shape = (LAYERS, HEADS, int(store.lengths[seq].max()))
        leaving = torch.from_numpy(np.random.default_rng(seed).random(shape) < share)
        spans = list(spans_of(store, seq, leaving, KEY, EXACT, 1 + seed % 7))
        gone = np.empty((LAYERS, HEADS), dtype=object)
        for lane in np.ndindex(LAYERS, HEADS):
            entries = self.rows[seq][lane]
            gone[lane] = [e for e, left in zip(entries, leaving[lane].tolist(), strict=False) if left]
            self.rows[seq][lane] = [e for e in entries if e not in gone[lane]]
        store.rewrite(seq, ~leaving)
        self.away = (self.next_position[seq], spans, gone)

    def come_back(self):
        if self.away is None:
            return
        tokens, spans, gone = self.away
        if not put_back(self.store, 0, spans, EXACT, max(tokens, self.next_position[0])):
            return
        for lane in np.ndindex(LAYERS, HEADS):
            self.rows[0][lane] = sorted(self.rows[0][lane] + gone[lane], key=lambda entry: entry[1])
        self.away = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@given(steps)
@settings(max_examples=25)
def test_random_leaving_and_returning_keeps_every_row_count_and_page(dtype, steps):
    mirror = Leaving(pages=90, dtype=dtype)
    mirror.open()
    for kind, number, seed in steps:
        if kind == "append":
            mirror.append(0, number)
        elif kind == "rewrite":
            mirror.rewrite(0, np.random.default_rng(seed), fresh=bool(seed % 2))
        elif kind == "merge" and mirror.away is None:
            mirror.merge(0, 2 + number % 3)
        elif kind.startswith("leave") and mirror.away is None:
            mirror.leave(seed, 1.0 if kind == "leave whole" else 0.5)
        elif kind == "return":
            mirror.come_back()
        elif kind == "close":
            mirror.close(0)
            mirror.away = None
            mirror.open()
            mirror.counts[0] = {}
        mirror.check()
    mirror.close(0)
    mirror.store.check()
    assert mirror.pool.num_free == mirror.pool.num_pages
