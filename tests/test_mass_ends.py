"""From which entry on a lane has no log masses: known on the host, so that no step has to ask the device."""

from __future__ import annotations

import pytest
import torch
from test_merging_store import HEADS, LAYERS, PAGE, merged_mirror

from minikv.cache.lanes import LaneStore
from minikv.cache.policies.base import Rows
from minikv.scheduler.batching import Rows as BatchRows
from minikv.scheduler.batching import batch_of


def put_masses(mirror, *places):
    """Give entries at these places of every lane a mass, and none to the others."""
    mirror.pool.log_mass.zero_()
    slots, _ = mirror.store.slots(0)
    mirror.pool.log_mass.view(-1)[slots[..., list(places)]] = 1.0


def kept(count, *dropped):
    keep = torch.ones(LAYERS, HEADS, count, dtype=torch.bool)
    keep[..., list(dropped)] = False
    return keep


def test_what_is_appended_to_merged_lanes_comes_after_the_masses():
    mirror = merged_mirror()
    store = mirror.store
    ends = store.mass_ends[0].copy()
    assert (ends == 16).all()
    assert store.reserve(0, 9)
    slots = torch.from_numpy(store.next_slots(0, 9))
    store.pool.write_entries(slots, torch.arange(40, 49))
    store.append(0, 9)
    store.check()
    assert (store.mass_ends[0] == ends).all()
    store.pool.log_mass.view(-1)[slots[1, 2, 4]] = 1.0
    with pytest.raises(AssertionError, match="has a mass where none should"):
        store.check()


def test_rewriting_and_truncating_move_the_end_with_the_last_entry_that_has_a_mass():
    mirror = merged_mirror()
    put_masses(mirror, 2, 9)
    mirror.store.rewrite(0, kept(16, 0, 5, 12))
    assert (mirror.store.mass_ends[0] == 8).all()
    mirror.store.rewrite(0, kept(13, 7))
    assert (mirror.store.mass_ends[0] == 2).all()
    mirror.store.rewrite(0, kept(12, 1))
    assert not mirror.store.mass_ends[0].any() and not mirror.store.has_mass[0]
    mirror.store.check()


def test_lanes_of_one_sequence_have_ends_of_their_own():
    mirror = merged_mirror()
    mirror.pool.log_mass.zero_()
    slots, _ = mirror.store.slots(0)
    mirror.pool.log_mass.view(-1)[slots[1, 2, 4]] = -torch.inf
    mirror.store.rewrite(0, kept(16))
    assert mirror.store.mass_ends[0].tolist() == [[0, 0, 0], [0, 0, 5]]


def test_a_fork_has_the_ends_of_its_source_and_a_closed_sequence_none():
    mirror = merged_mirror()
    copy = mirror.store.fork(0)
    assert (mirror.store.mass_ends[copy] == mirror.store.mass_ends[0]).all()
    mirror.store.close(copy)
    assert not mirror.store.mass_ends[copy].any()
    mirror.store.check()


def test_entries_put_back_bring_their_masses():
    mirror = merged_mirror()
    put_masses(mirror, 3)
    taken = [mirror.store.take(0, layer, kept(16)[layer]) for layer in range(LAYERS)]
    lengths = mirror.store.lengths[0].copy()
    other = LaneStore(mirror.pool, 1, LAYERS, HEADS, 64)
    seq = other.open()
    assert other.insert(seq, lengths, taken.__getitem__, 40, 40)
    assert (other.mass_ends[seq] == 4).all() and other.has_mass[seq]


def test_layers_replaced_before_one_fails_have_their_ends():
    mirror = merged_mirror()
    put_masses(mirror)
    mirror.store.rewrite(0, kept(16))
    assert not mirror.store.mass_ends[0].any()

    def rows_of(layer):
        if layer:
            raise RuntimeError("no more")
        ones = torch.ones(HEADS, 4)
        rows = torch.zeros(HEADS, 4, mirror.pool.head_dim)
        place = torch.arange(4).expand(HEADS, 4)
        return Rows(rows, rows, ones, place, ones.long(), ones > 0), place

    with pytest.raises(RuntimeError):
        mirror.store.replace(0, rows_of, 40)
    assert mirror.store.mass_ends[0].tolist() == [[4] * HEADS, [0] * HEADS]
    assert mirror.store.has_mass[0]


def test_a_batch_says_where_the_masses_of_its_lanes_end():
    mirror = merged_mirror()
    mirror.open()
    mirror.append(1, 5)
    mirror.store.truncate(1, 0)
    rows = [BatchRows(1, [3], 0), BatchRows(0, [3, 4], 40)]
    assert all(mirror.store.reserve(part.seq, len(part.ids)) for part in rows)
    batch = batch_of(mirror.store, rows)
    assert batch.has_mass == [False, True]
    assert not batch.mass_ends[0].any()
    assert (batch.mass_ends[1] == 16).all()
    assert batch_of(mirror.store, rows[:1]).mass_ends is None


def test_any_entry_may_get_a_mass_where_there_is_an_area():
    mirror = merged_mirror()
    put_masses(mirror, 3)
    mirror.store.rewrite(0, kept(16))
    mirror.append(0, 5)
    mirror.store.ask_area(0, 2)
    rows = [BatchRows(0, [3, 4], 45)]
    assert mirror.store.reserve(0, 2)
    batch = batch_of(mirror.store, rows)
    assert (batch.mass_ends == batch.past_lengths).all()
    assert (batch.past_lengths == 21 + 2 * PAGE).all()
