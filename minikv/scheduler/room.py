"""How many pages of the pool requests need, and what would help where it has not so many."""

from __future__ import annotations

from minikv.cache.lanes import LaneStore
from minikv.config import format_size
from minikv.scheduler.request import Lanes, Request
from minikv.scheduler.swap import Swap


class Room:
    """Pages that requests need of one pool."""

    def __init__(self, store: LaneStore, swap: Swap) -> None:
        self._store = store
        self._swap = swap

    def to_start(self, request: Request) -> int:
        """Pages that a request takes from the pool for what it goes on from, unless that is there already,
        and for the tokens that it has."""
        swapped, lanes = request.waits_below, request.lanes
        course = request.course if request.course.turns or lanes is None else lanes.course
        if lanes is not None and not request.course.turns and self.restores(request, lanes):
            held = 0 if lanes.seq is None else self._store.pages_of(lanes.seq)
            return max(0, self._store.pages_for(len(request.tokens)) - held)
        known = request.num_computed or (0 if lanes is None else len(lanes.token_ids))
        count = len(request.tokens) - known
        if swapped is not None:
            taken = held = swapped.pages
            missing = self._swap.pages_missing(swapped, count)
        elif lanes is not None and lanes.seq is not None:
            taken, held = 0, self._store.pages_of(lanes.seq)
            missing = self._store.pages_missing(lanes.seq, count)
        else:
            return self.most(request)
        if course.below is not None:
            missing += self._for_zooming(request)
        bound = request.retention.most_pages(request.num_prompt, request.pinned)
        if request.swapped is not None:
            bound = self.most(request)
        return taken + (missing if bound is None else min(missing, max(0, bound - held)))

    def restores(self, request: Request, lanes: Lanes) -> bool:
        """Whether everything that was demoted of the lanes is to be there while the request is computed: it
        then is judged by as the first prompt was. A pool that cannot hold that goes on with what is there."""
        below = lanes.course.below
        if below is None or below.lost or not request.retention.demotes or request.repeats:
            return False
        known = lanes.seq is not None or lanes.swapped is not None or lanes.are_below
        return known and self._store.pages_for(len(request.tokens)) <= self._store.pool.num_pages

    def ahead(self, request: Request) -> int:
        """Pages that a running request will still take for the tokens it has."""
        assert request.seq is not None
        missing = self._store.pages_missing(request.seq, request.num_remaining)
        return min(missing, max(0, self.most(request) - self._store.pages_of(request.seq)))

    def most(self, request: Request) -> int:
        """Pages that a request will hold at most while its lanes are computed from the start, for the
        tokens that it has."""
        everything = self._store.pages_for(len(request.tokens))
        lanes, course = request.lanes, request.course
        past, start = request.past_pages, course.turns[-1].start if course.turns else 0
        if not course.turns and lanes is not None:
            past, start, course = lanes.pages, len(lanes.token_ids), lanes.course
        keeps_all = request.retention.keeps_all
        if keeps_all and not course.compressions:
            return everything
        if request.restored:
            # What it says comes after the compression, as in any other turn.
            return max(course.peak, min(everything, self._store.pages_for(request.num_prompt)))
        bound = self._store.pages_for((len(request.tokens) if keeps_all else request.num_prompt) - start)
        if past:
            bound += past + self._store.num_lanes + self._for_zooming(request)
        streaming = request.retention.most_pages(request.num_prompt, request.pinned)
        if streaming is not None:
            bound = min(bound, streaming)
        return max(course.peak, min(bound, everything))

    def _for_zooming(self, request: Request) -> int:
        """Pages that a request takes for what it zooms in of lanes that it goes on from."""
        if not request.retention.zooms:
            return 0
        pages, _ = request.retention.zoomed(len(request.tokens))
        return pages * self._store.num_lanes

    def shortage(self, request: Request, num_tokens: int, num_pages: int) -> str:
        """That the pool cannot hold the pages which tokens of a request need, and what would help."""
        pool = self._store.pool
        fixes = ["raise --kv-hot"]
        if request.retention.keeps_all:
            fixes.append("keep less of it with --kv-policy and --kv-budget")
        elif not request.retention.streaming:
            fixes.append("compress the prompt as it goes with --prefill streaming")
        fixes.append("shorten the text")
        return (
            f"The KV pool is full: {num_tokens} tokens need {format_size(num_pages * pool.page_bytes)} and "
            f"the pool has {format_size(pool.num_pages * pool.page_bytes)}; "
            f"{', '.join(fixes[:-1])} or {fixes[-1]}."
        )
