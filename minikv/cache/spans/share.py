"""How a budget is divided between what the lanes hold and what is zoomed in."""

from __future__ import annotations

from minikv.cache.budget import Budget
from minikv.cache.ceiling import Ceiling
from minikv.cache.lanes import LaneStore
from minikv.cache.spans.codes import basis_entries


def area_of(limit: Budget, resident: float, store: LaneStore, num_tokens: int) -> tuple[int, int]:
    """Pages per lane for what is zoomed in of a sequence of so many tokens, and rows that they have room for,
    beside the basis of the lanes' codes; both may be 0. resident: the lanes' part of the budget."""
    size, basis = store.pool.page_size, basis_entries(store.pool.head_dim)
    if limit.kind == "bytes":
        pages = Ceiling.of(limit, store).pages_beside(resident)
    else:
        whole = limit.entries(num_tokens, store.num_lanes) // store.num_lanes
        # Lanes and area together take the pages that lanes with all of the budget would.
        pages = -(-whole // size) - -(-int(resident * whole) // size)
    rows = pages * size - basis
    return (pages, rows) if rows > 0 else (0, 0)
