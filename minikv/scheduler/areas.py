"""Pages and rows for what requests zoom in, or have staged.

    compression, first row of a turn --> ask_area: pages that the next reservation takes
    rows of a step                   --> zooming: the sequences that route in it
                                     --> staged: those whose past is put into the pool layer by layer

All depend on the request alone, never on batch mates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minikv.cache.lanes import LaneStore
from minikv.cache.spans.zoom import Zoomed
from minikv.cache.stage import Stage
from minikv.scheduler.request import Request

if TYPE_CHECKING:
    from minikv.scheduler.scheduler import Scheduled


def ask_area(store: LaneStore, request: Request) -> None:
    """Have pages reserved for what a request zooms in, if it has spans, or has staged. Each turn begins with
    no span zoomed in, also when it is computed again."""
    course, seq = request.course, request.seq
    if seq is None:
        return
    turn = course.turn_at(request.num_computed)
    if turn.staged and request.num_computed < turn.num_prompt:
        if not store.has_area(seq):
            pages = -(-turn.num_prompt // store.pool.page_size)
            spare = turn.retention.pages_kept(turn.num_prompt, turn.pinned)
            store.ask_area(seq, pages, shared=True, spare=spare)
        return
    if store.areas.shared(seq) or any(other.start == request.num_computed for other in course.turns):
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
        area = None if request.seq is None else store.areas[request.seq]
        if request.seq is None or below is None or area is None or area.shared:
            continue
        turn = request.course.turn_at(request.num_computed)
        _, rows = turn.retention.zoomed(max(request.num_computed, turn.num_prompt))
        policy: Any = turn.retention.policy
        found.append(Zoomed(index, request.seq, below, replace(policy.zooming, rows=rows), policy.router))
    return found


def staged(store: LaneStore, plan: Sequence[Scheduled]) -> list[Stage]:
    """What is to be put into the pool layer by layer for the sequences of a step."""
    found = []
    for item in plan:
        assert item.request.seq is not None
        stage = Stage.of(store, item.request.seq, item.request.course.below)
        if stage is not None and stage.num_tokens:
            found.append(stage)
    return found


def rows_to_boundary(store: LaneStore, request: Request, wanted: int, unit: int) -> int:
    """How many of `wanted` rows of a staged request may be computed at once: they end with `unit` tokens,
    whole pages, where they can, and none is past such a place, so that entries lie as if all were there."""
    last = request.num_computed + wanted
    if request.seq is None or not store.areas.shared(request.seq) or last >= request.num_prompt:
        return wanted
    boundary = last - last % unit
    return boundary - request.num_computed if boundary > request.num_computed else wanted
