"""Sequences that leave the page pool whole and come back as they were.

    a sequence --> demote: exact copies of all entries --> Swapped, of one request or of one conversation
    Swapped    --> restore: a new sequence, spans are gone   |   forget: spans are gone

Whoever holds a Swapped owns its spans, and ends with `restore` or `forget`. Rows are bit for bit those of the
pool, so that what goes on from them says what it would have said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from minikv.cache.lanes import LaneStore
from minikv.cache.tiers.base import Handle
from minikv.cache.tiers.moves import put_back, spans_of
from minikv.cache.tiers.storage import Storage
from minikv.once import Once

if TYPE_CHECKING:
    from minikv.scheduler.request import Lanes

_LOG = logging.getLogger(__name__)

# Of a lane in one span: longer sequences then need no room for a whole layer in one piece.
_MOST_ROWS = 8192


@dataclass(eq=False)
class Swapped:
    """A sequence below the pool.

    handles: of its spans, layer after layer. lengths: [layers, kv_heads] int32, entries of each lane.
    num_tokens: logical length. end: what is at this position or later is to be cut off when it is back.
    pages: that its entries took.
    """

    handles: list[Handle]
    lengths: np.ndarray
    num_tokens: int
    end: int
    pages: int
    fetched: bool = False


class Swap:
    """Moves sequences between a pool and the tiers below it; where there are none, nothing is moved.

    demoted: idle lanes that are below the pool, as a copy of what they were or with what their conversation
    demotes anyway; those that have been there for longest first. They make way for what is demoted later,
    unless a request waits for them. give_way: gives up idle lanes that are in the pool and have something
    below it; False if there are none.
    """

    def __init__(self, store: LaneStore, storage: Storage | None, once: Once) -> None:
        self.demoted: list[Lanes] = []
        self.give_way: Callable[[], bool] | None = None
        self._store = store
        self._storage = storage
        self._once = once
        if storage is not None:
            storage.make_way = self._make_way

    # Down

    def demote(self, seq: int) -> Swapped | None:
        """Copy a sequence below the pool, for the caller to close; None, and nothing is kept, if it is empty
        or there is no room. One with an area is not copied: what is zoomed in follows from all rows since its
        turn began."""
        store, storage = self._store, self._storage
        lengths = store.lengths[seq].copy()
        if storage is None or not lengths.any() or store.has_area(seq):
            return None
        handles = self._copies(seq, storage)
        if handles is None:
            self._once.say(
                _LOG,
                logging.WARNING,
                "The tiers below the KV pool are full: recomputing instead; raise --kv-warm or --kv-cold.",
            )
            return None
        self._once.say(
            _LOG, logging.INFO, "The KV pool is full: demoting whole sequences to the tiers below it."
        )
        storage.num_swapped += 1
        pages = int((-(-lengths // store.pool.page_size)).sum())
        num_tokens = int(store.num_tokens[seq])
        return Swapped(handles, lengths, num_tokens, num_tokens, pages)

    def _copies(self, seq: int, storage: Storage) -> list[Handle] | None:
        """Spans of all entries, or None and no span."""
        store, pool = self._store, self._store.pool
        lengths = store.lengths[seq]
        if int(lengths.sum()) * 2 * pool.head_dim * pool.dtype.itemsize > storage.tiers.limit:
            return None  # before others have made way for nothing
        every = torch.ones(*store.lane_shape, int(lengths.max()), dtype=torch.bool)
        handles: list[Handle] = []
        try:
            for span in spans_of(store, seq, every, storage.new_key(), storage.exact, _MOST_ROWS):
                handle = storage.keep(span)
                if handle is None:
                    break
                handles.append(handle)
            else:
                return handles
        except (MemoryError, RuntimeError):  # torch's way to say that memory is short
            _LOG.debug("a demotion failed", exc_info=True)
        storage.forget(handles)
        return None

    def _make_way(self) -> bool:
        oldest = next((lanes for lanes in self.demoted if not lanes.busy), None)
        if oldest is None:
            return self.give_way is not None and self.give_way()
        self.drop(oldest)
        oldest.lose()
        return True

    # Up

    def fetch(self, swapped: Swapped) -> None:
        """Begin to read what is in cold alone, for a `restore` that will come soon."""
        if self._storage is not None and not swapped.fetched:
            swapped.fetched = True
            for handle in swapped.handles:
                self._storage.tiers.fetch(handle)

    def restore(self, swapped: Swapped) -> int | None:
        """A new sequence that is as the old one was; None if something of it is lost. No span is kept. The
        caller sees to it that there are pages and a sequence."""
        storage = self._storage
        assert storage is not None, "nothing is demoted without tiers"
        seq = self._store.open()
        try:
            whole = self._fill(seq, swapped, storage)
        except (MemoryError, RuntimeError):
            _LOG.debug("a sequence could not be put back", exc_info=True)
            whole = False
        storage.forget(swapped.handles)
        if not whole:
            self._store.close(seq)
            return None
        if swapped.end < swapped.num_tokens:
            self._store.truncate(seq, swapped.end)
        storage.num_restored += 1
        return seq

    def _fill(self, seq: int, swapped: Swapped, storage: Storage) -> bool:
        # Layer by layer: never is there a second copy of all of it.
        for _, handles in groupby(swapped.handles, key=lambda handle: handle.owner.layer):
            spans = []
            for handle in handles:
                span = storage.tiers.read(handle)
                if span is None:
                    return False
                spans.append(span)
            enough = put_back(self._store, seq, spans, storage.exact, swapped.num_tokens)
            assert enough, "the caller must have made room"
        assert np.array_equal(self._store.lengths[seq], swapped.lengths), "other entries came back"
        return True

    def forget(self, swapped: Swapped) -> None:
        """Drop the spans."""
        if self._storage is not None:
            self._storage.forget(swapped.handles)

    def pages_missing(self, swapped: Swapped, count: int) -> int:
        """Pages besides its own that the sequence needs at most for `count` more tokens once it is back."""
        kept = np.minimum(swapped.lengths, swapped.end)
        return max(0, int((-(-(kept + count) // self._store.pool.page_size)).sum()) - swapped.pages)

    # Idle lanes

    def hand_over(self, swapped: Swapped | None, lanes: Lanes) -> None:
        """Give a demoted sequence to lanes that have none; None if they are below the pool without it."""
        lanes.swapped = swapped
        self.demoted.append(lanes)

    def keep_or_drop(self, lanes: Lanes) -> None:
        """See that lanes without a sequence are among the demoted if, and only if, there is something of them
        below the pool."""
        if not lanes.token_ids or not lanes.holds:
            self.drop(lanes)
        elif lanes not in self.demoted:
            self.demoted.append(lanes)

    def restore_lanes(self, lanes: Lanes) -> int | None:
        """The sequence of demoted lanes, which have none any more; None if there is none. Lanes of which
        something is lost are then to be computed again."""
        swapped = self._taken(lanes)
        if swapped is None:
            return None
        seq = self.restore(swapped)
        if seq is None:
            lanes.lose()
        return seq

    def drop(self, lanes: Lanes) -> None:
        """Drop the spans of lanes, if they have any."""
        swapped = self._taken(lanes)
        if swapped is not None:
            self.forget(swapped)

    def _taken(self, lanes: Lanes) -> Swapped | None:
        swapped, lanes.swapped = lanes.swapped, None
        if lanes in self.demoted:
            self.demoted.remove(lanes)
        return swapped
