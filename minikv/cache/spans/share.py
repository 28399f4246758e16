"""How a budget is divided between what the lanes hold and what is zoomed in."""

from __future__ import annotations

from typing import Any

from minikv.cache.budget import Budget
from minikv.cache.ceiling import Ceiling
from minikv.cache.lanes import LaneStore
from minikv.cache.spans.codes import basis_entries, cells_of

_BESIDE = 32  # entries of a lane for sinks, recent tokens and some anchors
_SPARE = 1.1  # spans for each that is needed, since anchors cut them short
_LEAST = 0.5  # of the most that lanes get, however few spans there are


def lanes_part(policy: Any, limit: Budget, store: LaneStore, num_tokens: int) -> float:
    """The part of a budget that the lanes get, of a sequence of so many tokens under a policy: all of it, or
    for one that zooms what its spans need so that every token has a code of its own, up to `resident`."""
    most: float = getattr(policy, "resident", 1.0)
    if limit.kind == "bytes" or not getattr(policy, "zooms", False):
        return most
    whole = limit.entries(num_tokens, store.num_lanes) / store.num_lanes
    needed = _BESIDE + _SPARE * num_tokens / cells_of(store.pool.dtype)
    return most * min(1.0, max(_LEAST, needed / (whole * most)))


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
