"""Room beside the lanes of a sequence: pages of the same pool, whose rows the lanes see as well.

    LaneStore.ask_area --> reserve: pool.allocate --> Area, all rows masked
    Area               --> release_area (also when lanes are rewritten or closed) --> pool.free

Rows of an area lie in no order. One that is not in use has the log mass -inf, which attention adds to its
score, so that it has no weight. An area may be shared by all layers, for rows that are put there in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from minikv.cache.pool import PagePool


@dataclass(eq=False)
class Area:
    """pages: [layers, kv_heads, n] int32, as many in every lane; of a shared one the same in all layers.
    state: of whoever uses it; undo: what makes the lanes again what they were before it was used. spare: ids
    of pages that wait for what the lanes will hold when the area is given up."""

    pages: np.ndarray
    shared: bool = False
    spare: np.ndarray | None = None
    state: Any = None
    undo: Callable[[], None] | None = None

    @property
    def per_lane(self) -> int:
        """Pages of each lane."""
        return self.pages.shape[-1]

    @property
    def ids(self) -> np.ndarray:
        """All its pages, each once: [m] int64."""
        own = (self.pages[:1] if self.shared else self.pages).reshape(-1).astype(np.int64)
        return own if self.spare is None else np.concatenate([own, self.spare])

    def reset(self) -> None:
        """Mask all rows and make the lanes what they were."""
        if self.undo is not None:
            self.undo()
        self.state = self.undo = None


class Asked(NamedTuple):
    """An area that a sequence is to have: pages of each lane, whether all layers share them, and pages to
    spare."""

    per_lane: int = 0
    shared: bool = False
    spare: int = 0


class Areas:
    """Of the sequences of one store: what each has and is to have."""

    def __init__(self, pool: PagePool, max_seqs: int, lane_shape: tuple[int, int]) -> None:
        self._pool, self._lane_shape = pool, lane_shape
        self._held: list[Area | None] = [None] * max_seqs
        self._asked = [Asked()] * max_seqs

    def __getitem__(self, seq: int) -> Area | None:
        return self._held[seq]

    def __iter__(self) -> Iterator[Area | None]:
        return iter(self._held)

    def __contains__(self, seq: int) -> bool:
        """Whether a sequence has an area, or is to get one."""
        return self._held[seq] is not None or self._asked[seq].per_lane > 0

    def shared(self, seq: int) -> bool:
        """Whether it is one that all layers share."""
        area = self._held[seq]
        return self._asked[seq].shared if area is None else area.shared

    def missing(self, seq: int) -> int:
        """Pages that `take` takes from the pool."""
        return self.pages_of(self._asked[seq])

    def pages_of(self, asked: Asked) -> int:
        """Pages of an area."""
        layers, heads = self._lane_shape
        return asked.per_lane * heads * (1 if asked.shared else layers) + asked.spare

    def ask(self, seq: int, asked: Asked) -> bool:
        """Note what a sequence is to have in the place of what it has, and of what was asked for before;
        False if it has that."""
        area = self._held[seq]
        if asked.per_lane == (0 if area is None else area.per_lane):
            self._asked[seq] = Asked()
            return False
        self.release(seq)
        self._asked[seq] = asked
        return True

    def take(self, seq: int) -> None:
        """Give a sequence what it asked for; the caller sees to it that there are pages."""
        asked, self._asked[seq] = self._asked[seq], Asked()
        if not asked.per_lane:
            return
        ids = self._pool.allocate(self.pages_of(asked))
        own, spare = np.split(ids, [len(ids) - asked.spare])
        self._pool.log_mass[torch.from_numpy(own)] = -torch.inf
        pages = own.astype(np.int32).reshape(-1, self._lane_shape[1], asked.per_lane)
        if asked.shared:
            pages = np.broadcast_to(pages, (*self._lane_shape, asked.per_lane))
        self._held[seq] = Area(pages, asked.shared, spare)

    def release_spare(self, seq: int) -> None:
        """Give back the pages that an area holds to spare, for its lanes to take."""
        area = self._held[seq]
        if area is not None and area.spare is not None:
            spare, area.spare = area.spare, None
            self._pool.free(spare)

    def release(self, seq: int) -> None:
        """Give up what a sequence has and was to get."""
        self._asked[seq] = Asked()
        area, self._held[seq] = self._held[seq], None
        if area is not None:
            area.reset()
            self._pool.free(area.ids)
