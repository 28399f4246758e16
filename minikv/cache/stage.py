"""Entries of a sequence that are below the pool, in the pool one layer at a time.

    Below.layer --fill, between writing and attending in each layer--> rows of an area that all layers share
    rows of the area, lanes --Compressor--> lanes, in which a policy's choice of all of them is then

So a prompt, or a turn of a conversation, is computed against everything that came before it in a pool that
holds one layer of that at a time. What it computes itself goes below after each chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minikv.cache.area import Area
from minikv.cache.entries import Entries, Stored
from minikv.cache.lanes import LaneStore
from minikv.cache.tiers.below import Below
from minikv.errors import MinikvError


class NotThere(MinikvError):
    """Entries below the pool that were to be staged cannot be had any more."""

    def __init__(self) -> None:
        super().__init__("Entries that were demoted cannot be read any more.")


@dataclass
class Stage:
    """The first `num_tokens` tokens of a sequence, all entries of which are below the pool and none in its
    lanes. failed: some could not be had; what was computed with them means nothing."""

    store: LaneStore
    seq: int
    below: Below
    num_tokens: int
    failed: bool = False
    _places: Tensor | None = None  # of the area, for what is put there

    @classmethod
    def of(cls, store: LaneStore, seq: int, below: Below | None) -> Stage | None:
        """That of a sequence as it is now; None if it has no shared area."""
        if below is None or store.areas[seq] is None or not store.areas.shared(seq):
            return None
        return cls(store, seq, below, store.num_aside(seq))

    @classmethod
    def open(cls, store: LaneStore, below: Below, num_tokens: int) -> int | None:
        """A new sequence of `num_tokens` tokens that are below the pool, for which the caller has made room;
        None, and lost, if memory is short or they cannot be had. Its lanes hold those of the last page that
        is not full, so that entries lie as if all were there."""
        seq = store.open()
        aside = num_tokens - num_tokens % store.pool.page_size
        store.set_aside(seq, aside)
        if aside == num_tokens:
            return seq
        heads = store.lane_shape[1]
        lane = torch.arange(heads).repeat_interleave(num_tokens - aside)
        token = torch.arange(aside, num_tokens).repeat(heads)
        ones, lengths = torch.ones(len(token), dtype=torch.int32), lane.bincount(minlength=heads)

        def entries_of(layer: int) -> Entries:
            rows = below.rows(layer, lane, token)
            if rows is None:
                raise NotThere
            return Entries(rows, ones, lengths)

        added = np.full(store.lane_shape, num_tokens - aside, dtype=np.int32)
        try:
            enough = store.insert(seq, added, entries_of, num_tokens)
        except (NotThere, MemoryError, RuntimeError):  # torch's way to say that memory is short
            store.close(seq)
            below.lose("there is not enough memory to put it back")
            return None
        assert enough, "the caller must make room for what is put back"
        return seq

    def fill(self, layer: int) -> None:
        """Put the entries of a layer into the area."""
        area = self.store.areas[self.seq]
        if self.failed or area is None or not self.num_tokens:
            return
        parts = self.below.layer(layer, self.num_tokens)
        if parts is None:
            self.failed = True
            return
        if self._places is None:
            self._places = self._placed(area, [(start, end) for start, end, _ in parts])
        # All at once: many short parts would take longer to write than to read.
        self.store.pool.put(self._places, Stored.joined([rows for _, _, rows in parts]))
        self.below.ahead((layer + 1) % self.store.lane_shape[0])

    def _placed(self, area: Area, parts: list[tuple[int, int]]) -> Tensor:
        """The pool's rows [n] int64 for parts of tokens [start, end), lane after lane in each; they are the
        same in every layer."""
        size, token = self.store.pool.page_size, torch.arange(self.num_tokens)
        pages = torch.from_numpy(area.pages[0].astype(np.int64))
        slots = pages[:, token // size] * size + token % size
        return torch.cat([slots[:, start:end].reshape(-1) for start, end in parts])

    def filled(self, layer: int) -> None:
        """`fill`; raises NotThere where that cannot be."""
        self.fill(layer)
        if self.failed:
            raise NotThere

    @property
    def positions(self) -> Tensor:
        """Of its entries in every lane: [layers, kv_heads, num_tokens] int32."""
        return torch.arange(self.num_tokens, dtype=torch.int32).expand(*self.store.lane_shape, -1)
