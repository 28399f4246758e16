"""How many pages of the pool requests need, and what would help where it has not so many."""

from __future__ import annotations

from enum import Enum

from minikv.cache.lanes import LaneStore
from minikv.config import format_size
from minikv.scheduler.request import Lanes, Request
from minikv.scheduler.swap import Swap


class Way(Enum):
    """How a request begins: with what its lanes hold, or with all that was demoted put back or staged."""

    AS_LEFT = "as left"
    WHOLE = "whole"
    STAGED = "staged"


class Room:
    """Pages that requests need of one pool. together: rows of a staged request that may have to wait for one
    another in its lanes."""

    def __init__(self, store: LaneStore, swap: Swap, together: int = 1) -> None:
        self._store = store
        self._swap = swap
        self._together = max(together, store.pool.page_size)

    def to_start(self, request: Request) -> int:
        """Pages that a request takes from the pool for what it goes on from, unless that is there already,
        and for the tokens that it has."""
        swapped, lanes = request.waits_below, request.lanes
        course = request.course if request.course.turns or lanes is None else lanes.course
        if lanes is not None and not request.course.turns and (way := self.way(request)) is not Way.AS_LEFT:
            held = 0 if lanes.seq is None else self._store.pages_of(lanes.seq)
            there = 0 if lanes.swapped is None else lanes.swapped.pages
            whole = self._store.pages_for(len(request.tokens))
            return max(there, (self._staged(request) if way is Way.STAGED else whole) - held)
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

    def way(self, request: Request) -> Way:
        """How a request that has not begun yet is to begin. Everything that was demoted is there while it is
        computed, so that it is judged by as the first prompt was; where the pool cannot hold that, one layer
        at a time. One that cannot even hold a layer goes on with what is there."""
        lanes = request.lanes or Lanes()
        if request.repeats or not _may_be_staged(request, lanes):
            return Way.AS_LEFT
        fits = self._store.pages_for(len(request.tokens)) <= self._store.pool.num_pages
        stages = not fits and self._staged(request) <= self._store.pool.num_pages
        below, known = lanes.course.below, lanes.holds
        if below is None or not lanes.token_ids:
            # Nothing was compressed yet: what the lanes hold is everything.
            everything = not lanes.token_ids or (known and not lanes.course.compressions)
            return Way.STAGED if stages and everything else Way.AS_LEFT
        if below.lost or not known:
            return Way.AS_LEFT
        if fits:
            return Way.WHOLE
        return Way.STAGED if stages and below.all_whole else Way.AS_LEFT

    def stages(self, request: Request) -> bool:
        """Whether a request is, or is going to be, computed against what is below the pool."""
        return request.staged or (not request.course.turns and self.way(request) is Way.STAGED)

    def shares(self, request: Request) -> bool:
        """Whether there is room for a staged request to leave its beginning to others, in whole blocks."""
        return self._stage_pages(request, self._together) <= self._store.pool.num_pages

    def _staged(self, request: Request) -> int:
        """Pages that a request takes while its prompt is computed against what is below the pool."""
        together = self._together if self.shares(request) else self._store.pool.page_size
        return self._stage_pages(request, together)

    def _stage_pages(self, request: Request, together: int) -> int:
        """A layer of everything, what will stay of it, and the rows of a chunk behind others that wait."""
        store, lanes, turns = self._store, request.lanes, request.course.turns
        start = turns[-1].start if turns else len(lanes.token_ids) if lanes is not None else 0
        chunk = min(request.retention.chunk + together, request.num_prompt - start + store.pool.page_size)
        layer = store.pages_for(request.num_prompt) // store.lane_shape[0]
        kept = request.retention.pages_kept(request.num_prompt, request.pinned)
        return layer + kept + store.pages_for(chunk)

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
        if self.stages(request):
            said = self._store.pages_for(len(request.tokens) - request.num_prompt) + self._store.num_lanes
            kept = request.retention.pages_kept(request.num_prompt, request.pinned)
            return max(course.peak, self._staged(request), kept + said)
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
        pool, retention = self._store.pool, request.retention
        fixes = ["raise --kv-hot"]
        if retention.keeps_all or retention.demotes:
            fixes.append("keep less of it with --kv-policy and --kv-budget")
        elif not retention.streaming:
            fixes.append("compress the prompt as it goes with --kv-prefill streaming")
            if not retention.zooms:
                fixes.append("keep the rest below the pool with --kv-evicted demote")
        if _may_be_staged(request, request.lanes or Lanes()):
            num_pages = min(num_pages, self._staged(request))
        fixes.append("shorten the text")
        return (
            f"The KV pool is full: {num_tokens} tokens need {format_size(num_pages * pool.page_bytes)} and "
            f"the pool has {format_size(pool.num_pages * pool.page_bytes)}; "
            f"{', '.join(fixes[:-1])} or {fixes[-1]}."
        )


def _may_be_staged(request: Request, lanes: Lanes) -> bool:
    """Whether a request that goes on from lanes is computed against everything that came before it. What
    zooms goes on from its lanes, and brings back by itself what is asked for."""
    retention = request.retention
    return retention.demotes or (retention.zooms and not retention.streaming and not lanes.token_ids)
