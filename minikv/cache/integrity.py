"""Whether what a lane store has noted is what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from minikv.cache.merged import Merged

if TYPE_CHECKING:
    from minikv.cache.lanes import LaneStore


def check_lanes(store: LaneStore, is_open: np.ndarray, merged: Sequence[Merged | None]) -> None:
    """Re-derive every count of a store, whose sequences are open as `is_open` [max_seqs] bool says; an
    AssertionError names the first that is wrong."""
    place = np.arange(store.max_pages)
    held = place < store.num_pages[..., None]
    assert not store.num_pages[~is_open].any(), "a closed sequence holds pages"
    assert not store.lengths[~is_open].any(), "a closed sequence has entries"
    assert (store.lengths >= 0).all(), "a lane has a negative length"
    assert (store.lengths <= store.num_pages * store.pool.page_size).all(), "a lane is longer than its pages"
    assert not any(merged[seq] for seq in np.flatnonzero(~is_open).tolist()), "a closed sequence has counts"
    assert (store.lengths.max(axis=(1, 2)) <= store.num_tokens).all(), "a lane stands for too many tokens"
    for seq in (seq for seq, known in enumerate(merged) if known is not None):
        counts = store.counts(seq).numpy()
        stored = np.arange(counts.shape[-1]) < store.lengths[seq][..., None]
        assert (counts[stored] >= 1).all(), "an entry stands for no token"
        assert (counts.sum(axis=-1) <= store.num_tokens[seq]).all(), "a lane stands for too many tokens"
    _check_masses(store, is_open)
    assert (store.pages[held] > 0).all() and not store.pages[~held].any(), "a lane table has a hole"
    closed = [area for area, there in zip(store.areas, is_open, strict=True) if not there]
    assert not any(closed), "a closed sequence has an area"
    areas = [area.ids for area in store.areas if area is not None]
    store.pool.check(np.concatenate([store.pages[held], *areas]).astype(np.int64))


def _check_masses(store: LaneStore, is_open: np.ndarray) -> None:
    assert (store.mass_ends <= store.lengths).all(), "masses end past a lane's end"
    for seq in np.flatnonzero(is_open).tolist():
        assert store.has_mass[seq] or not store.mass_ends[seq].any(), "masses of a sequence that has none"
        slots, valid = store.slots(seq)
        light = torch.arange(slots.shape[-1]) >= torch.from_numpy(store.mass_ends[seq])[..., None]
        log_mass, _ = store.pool.masses_and_positions(slots[valid & light])
        assert not log_mass.any(), "an entry has a mass where none should"
