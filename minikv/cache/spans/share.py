"""How a budget is divided between what the lanes hold and what is zoomed in."""

from __future__ import annotations

from minikv.cache.budget import Budget
from minikv.cache.ceiling import Ceiling
from minikv.cache.lanes import LaneStore


def area_of(limit: Budget, resident: float, store: LaneStore, num_tokens: int) -> tuple[int, int]:
    """Pages per lane for what is zoomed in of a sequence of so many tokens, and how many rows of them may be
    used. resident: the lanes' part of the budget."""
    if limit.kind == "bytes":
        pages = Ceiling.of(limit, store).pages_beside(resident)
        return pages, pages * store.pool.page_size
    whole = limit.entries(num_tokens, store.num_lanes) // store.num_lanes
    part, size = int(resident * whole), store.pool.page_size
    # Lanes and area together take the pages that lanes with all of the budget would.
    pages = max(1, -(-whole // size) - -(-part // size))
    return pages, min(whole - part, pages * size)
