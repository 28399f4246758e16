"""How a request comes to the sequence that it runs on.

a new prompt                  --> empty lanes
a turn of a conversation      --> what its lanes hold, or all that was demoted of it: put back, or staged
a request that was set back   --> what it had, from below the pool, or empty lanes and its own course
"""

from __future__ import annotations

import logging

from minikv.cache.lanes import LaneStore
from minikv.cache.stage import Stage
from minikv.cache.tiers.below import Below
from minikv.cache.tiers.storage import Storage
from minikv.once import Once
from minikv.scheduler.request import Lanes, Request
from minikv.scheduler.room import Room, Way
from minikv.scheduler.swap import Swap

_LOG = logging.getLogger(__name__)


class Starting:
    """Gives requests their sequences; the scheduler has made room for them.

    idle: lanes of conversations that are in the pool, least recently used first. num_restored, num_staged:
    turns that began with everything that had been demoted put back, and prompts that were computed against
    what is below the pool.
    """

    def __init__(self, store: LaneStore, storage: Storage | None, swap: Swap, room: Room, once: Once) -> None:
        self.idle: list[Lanes] = []
        self.num_restored = self.num_staged = 0
        self._store, self._storage, self._swap, self._room, self._once = store, storage, swap, room, once

    def start(self, request: Request) -> bool:
        """Give a request a sequence; False, with none given, if what was swapped of it is lost: it is then to
        begin again, which takes other room."""
        if request.course.turns:
            return self._resume(request)
        way = self._room.way(request)
        if way is Way.STAGED:
            request.shares = self._room.shares(request)
            self._say_staged()
        if request.lanes is not None:
            return self._start_on(request, request.lanes, way)
        request.seq = self._store.open()
        request.begin(0, staged=way is Way.STAGED)
        return True

    def _say_staged(self) -> None:
        self.num_staged += 1
        self._once.say(
            _LOG,
            logging.INFO,
            "The KV pool cannot hold a whole prompt: its entries go below, and come back layer by layer.",
        )

    def _resume(self, request: Request) -> bool:
        """Let a request that was set back go on, or begin again with its own course; see `start`."""
        swapped, request.swapped = request.swapped, None
        if swapped is not None:
            request.seq = self._swap.restore(swapped)
            if request.seq is None:
                request.restart()
                return False
        elif not (request.restored and self._go_back(request, request.course.turns[-1].start)):
            request.course.restart()
            request.seq = self._store.open()
        return True

    def _go_back(self, request: Request, start: int) -> bool:
        return self._stage(request, start) if request.staged else self._put_back(request, start)

    def _start_on(self, request: Request, lanes: Lanes, way: Way) -> bool:
        """Go on from the lanes of a conversation, with what was demoted of them if that is asked for; see
        `start`."""
        demoted = lanes.swapped is not None
        seq = self._sequence_of(lanes)
        if demoted and seq is None:
            return False
        past = len(lanes.token_ids)
        course, staged = lanes.course, way is Way.STAGED
        request.course, request.past_pages = course, lanes.pages
        if seq is not None:
            request.seq, request.num_computed, request.num_reused = seq, past, past
            if staged and past and course.below is None and self._storage is not None:
                course.below = Below(self._storage, name=request.name)
            if way is not Way.AS_LEFT and course.below is not None:
                course.below.add(self._store, seq, past)
        restored = way is Way.WHOLE and self._put_back(request, past)
        if staged and past:
            restored = staged = self._stage(request, past)
        if request.seq is None:
            course.restart()
            request.seq = self._store.open()
        if request.repeats:
            request.prompt_logits = lanes.prompt_logits
        else:
            request.begin(past, restored, staged)
        lanes.forget()
        return True

    def _sequence_of(self, lanes: Lanes) -> int | None:
        """The sequence of lanes, which have none any more, back from below the pool if it was there."""
        if lanes.seq is None:
            return self._swap.restore_lanes(lanes)
        self.idle.remove(lanes)
        seq, lanes.seq = lanes.seq, None
        return seq

    def _put_back(self, request: Request, num_tokens: int) -> bool:
        """Give a request a new sequence with all entries of its first `num_tokens` tokens, in the place of
        what it has. False if they cannot be had: it then has what it had, or no sequence."""
        below = request.course.below
        spans = None if below is None else below.spans(num_tokens)
        if below is None or spans is None:
            return False
        self._close(request)
        request.seq = below.restore(self._store, spans, num_tokens)
        return self._begun(request, num_tokens)

    def _stage(self, request: Request, num_tokens: int) -> bool:
        """As `_put_back`, but for what is to be staged."""
        below = request.course.below
        if below is None or not below.covers(num_tokens) or not below.all_whole:
            return False
        self._close(request)
        request.seq = Stage.open(self._store, below, num_tokens)
        return self._begun(request, num_tokens)

    def _close(self, request: Request) -> None:
        if request.seq is not None:
            self._store.close(request.seq)
            request.seq = None
        request.num_computed = request.num_reused = 0

    def _begun(self, request: Request, num_tokens: int) -> bool:
        if request.seq is None:
            return False
        request.num_computed = request.num_reused = num_tokens
        self.num_restored += 1
        return True
