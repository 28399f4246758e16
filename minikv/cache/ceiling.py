"""A budget in bytes, in terms of pages: lanes of any lengths must fit a number of whole pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from minikv.cache.budget import Budget
from minikv.cache.lanes import LaneStore
from minikv.errors import ConfigError
from minikv.sizes import format_size


@dataclass(frozen=True)
class Ceiling:
    """Most pages that one sequence may hold at any time."""

    max_pages: int
    page_size: int
    num_lanes: int
    page_bytes: int

    @classmethod
    def of(cls, budget: Budget, store: LaneStore) -> Ceiling:
        """The ceiling that a budget in bytes sets; ConfigError if it does not hold a page per lane."""
        pool = store.pool
        pages = min(budget.pages(pool.page_bytes), pool.num_pages)
        ceiling = cls(pages, pool.page_size, store.num_lanes, pool.page_bytes)
        # A lane of one entry would have no room for the next token.
        least = store.num_lanes * (2 if pool.page_size == 1 else 1)
        if pages < least:
            raise ConfigError(
                f"A budget of {format_size(budget.amount)} is too little for this model, which needs at "
                f"least {format_size(least * pool.page_bytes)}: {least // store.num_lanes} "
                f"page{'s' if least > store.num_lanes else ''} in each of its lanes."
            )
        return ceiling

    @property
    def per_lane(self) -> int:
        """Entries that every lane can hold when all are equally long."""
        return self.max_pages // self.num_lanes * self.page_size

    def part(self, share: float) -> Ceiling:
        """What is left when as many whole pages of every lane are taken away as the rest of `share` holds."""
        return replace(self, max_pages=self.max_pages - self.pages_beside(share) * self.num_lanes)

    def pages_beside(self, share: float) -> int:
        """Pages per lane that `part` takes away."""
        return int((1 - share) * (self.max_pages // self.num_lanes))

    def slack(self, asked: int | None) -> int:
        """Entries per lane to leave free for tokens to come: as asked, but at most half of what a lane
        can hold; or else an eighth, but at least a page."""
        wanted = max(self.page_size, self.per_lane // 8) if asked is None else asked
        return min(wanted, self.per_lane // 2)

    def pages(self, lengths: np.ndarray, room: int = 0) -> int:
        """Pages that lanes of these lengths take with `room` entries more in each."""
        return int((-(-(lengths + room) // self.page_size)).sum())

    def rows_that_fit(self, lengths: np.ndarray, wanted: int) -> int:
        """How many of `wanted` entries can be added to every lane."""
        if self.pages(lengths, wanted) <= self.max_pages:
            return wanted
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.pages(lengths, middle) <= self.max_pages else (low, middle - 1)
        return low

    def filled(self, counts: np.ndarray, lengths: np.ndarray, room: int) -> np.ndarray:
        """`counts` raised to what the same pages hold beside `room` entries, at most `lengths`."""
        held = -(-(counts + room) // self.page_size) * self.page_size - room
        return np.minimum(held, lengths)
