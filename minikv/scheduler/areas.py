"""Pages and rows for what requests zoom in.

    compression, first row of a turn --> ask_area: pages that the next reservation takes
    rows of a step                   --> zooming: the sequences that route in it

Both depend on the request alone, never on batch mates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minikv.cache.lanes import LaneStore
from minikv.cache.spans.zoom import Zoomed
from minikv.scheduler.request import Request

if TYPE_CHECKING:
    from minikv.scheduler.scheduler import Scheduled


def ask_area(store: LaneStore, request: Request) -> None:
    """Have pages reserved for what a request zooms in, if it has spans. Each turn begins with none of them
    zoomed in, also when it is computed again."""
    course, seq = request.course, request.seq
    if seq is None:
        return
    turn = course.turn_at(request.num_computed)
    if any(other.start == request.num_computed for other in course.turns):
        store.release_area(seq)
    if not turn.retention.zooms or not store.num_merged(seq):
        return
    below, pages = course.below, 0
    if below is not None and not below.lost and below.whole:
        pages, _ = turn.retention.zoomed(max(request.num_computed, turn.num_prompt))
    store.ask_area(seq, pages)


def zooming(store: LaneStore, plan: Sequence[Scheduled]) -> list[Zoomed]:
    """The sequences of a step that may have spans to zoom in."""
    found = []
    for index, item in enumerate(plan):
        request, below = item.request, item.request.course.below
        if request.seq is None or below is None or store.areas[request.seq] is None:
            continue
        turn = request.course.turn_at(request.num_computed)
        _, rows = turn.retention.zoomed(max(request.num_computed, turn.num_prompt))
        policy: Any = turn.retention.policy
        found.append(Zoomed(index, request.seq, below, replace(policy.zooming, rows=rows), policy.router))
    return found
