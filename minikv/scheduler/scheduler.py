"""Continuous batching: decode rows first, then prefill chunks, under one token budget.

Requests are served in order of arrival. When pages run short, idle conversations lose their lanes
first, then the latest arrival is preempted. Where there are tiers below the pool, lanes go there and come
back as they were (see swap.py); otherwise their tokens are computed again later. The oldest request is
never preempted, so every step makes progress or ends a request.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minikv.cache.evidence import Recorder
from minikv.cache.lanes import LaneStore
from minikv.cache.tiers.storage import Storage
from minikv.once import Once
from minikv.scheduler.areas import ask_area, rows_to_boundary
from minikv.scheduler.prefix import Prefixes
from minikv.scheduler.request import Lanes, Request, State
from minikv.scheduler.room import Room
from minikv.scheduler.starting import Starting
from minikv.scheduler.swap import Swap, Swapped

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scheduled:
    """`count` rows of a request in this step, reserved in its lanes; `capture` [R] int64 are those of
    them whose queries the recorder wants."""

    request: Request
    count: int
    capture: Tensor | None = None
    recorder: Recorder | None = None


class Scheduler:
    """Decides; the engine computes. Holds every request that is not finished."""

    def __init__(
        self,
        store: LaneStore,
        max_batch_tokens: int,
        prefill_chunk: int,
        reuse_limit: int | None = None,
        storage: Storage | None = None,
        prefixes: Prefixes | None = None,
    ):
        self.store = store
        self.storage = storage
        self.once = Once()
        self.swap = Swap(store, storage, self.once)
        self.swap.give_way = self._give_way
        self.room = Room(store, self.swap, 1 if prefixes is None else prefixes.most_together)
        self.starting = Starting(store, storage, self.swap, self.room, self.once)
        self.prefixes = prefixes
        self.max_batch_tokens = max_batch_tokens
        self.prefill_chunk = prefill_chunk
        self.reuse_limit = reuse_limit  # longest prompt that may go on from lanes kept earlier
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.exhausted: list[tuple[Request, str]] = []
        self.overfull: list[Request] = []
        self.num_preemptions = 0
        self.num_reclaimed = 0

    @property
    def idle(self) -> list[Lanes]:
        """Lanes of conversations that are in the pool while no request uses them, least recently used
        first."""
        return self.starting.idle

    @property
    def num_restored(self) -> int:
        """Turns that began with everything that had been demoted there."""
        return self.starting.num_restored

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def answerable(self) -> list[Request]:
        """Running requests whose next token needs no row: its logits are known."""
        return [request for request in self.running if not request.num_remaining]

    def add(self, request: Request) -> None:
        """Queue a request; its prompt must fit the pool alone."""
        bisect.insort(self.waiting, request, key=lambda r: r.id)

    def plan(self) -> list[Scheduled]:
        """Choose the rows of the next step and reserve their pages.

        Requests that can never get the pages they need are left in `exhausted`, with the reason; those
        that have to be compressed before they may go on, in `overfull`.
        """
        self._admit()
        budget = self.max_batch_tokens
        planned: dict[int, Scheduled] = {}
        # Both passes run in order of arrival; a decode row never waits behind a prompt.
        for decoding in (True, False):
            for request in list(self.running):
                if request.state is not State.RUNNING or (request.num_remaining == 1) is not decoding:
                    continue
                count = self._rows_for(request, budget)
                if count and self._reserve(request, count, planned):
                    planned[request.id] = Scheduled(request, count)
                    budget -= count
        return list(planned.values())

    def _rows_for(self, request: Request, budget: int) -> int:
        wanted = min(request.num_remaining, self.prefill_chunk, budget)
        if not wanted:
            return 0
        if self.prefixes is not None:
            wanted = self.prefixes.rows_allowed(request, wanted)
        assert request.seq is not None
        lengths = self.store.lengths[request.seq]
        if request.num_computed == request.course.turn_at(request.num_computed).start:
            ask_area(self.store, request)
        wanted = rows_to_boundary(self.store, request, wanted, self.unit_of(request))
        together = request.course.rows_together(request.num_computed, lengths)
        if min(together, request.num_remaining) > wanted:
            return 0  # these rows wait for one another
        allowed = request.course.rows_allowed(wanted, request.num_computed, lengths)
        if not allowed:
            self.overfull.append(request)
        return allowed

    def unit_of(self, request: Request) -> int:
        """Tokens of a staged request that go below the pool together."""
        together = 1 if self.prefixes is None else self.prefixes.together(request)
        return max(self.store.pool.page_size, together)

    def finish(self, request: Request, keep_lanes: bool) -> None:
        """Take a request out of every queue. Its lanes go idle if a conversation holds them and
        `keep_lanes`, else their pages are freed."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.state = State.FINISHED
        self._leave_prefixes(request)
        lanes, seq, swapped = request.lanes, request.seq, request.swapped
        request.seq = request.swapped = None
        if lanes is not None:
            lanes.busy = False
            if keep_lanes and (seq is not None or swapped is not None or request.restored):
                if self._leave_below(request, lanes):
                    self._close(seq, swapped)
                    return
                # A first prompt that is staged is read from its start again: another is judged as a whole.
                if swapped is not None or (seq is not None and not self.store.areas.shared(seq)):
                    self._leave(request, lanes, seq, swapped)
                    return
        self._close(seq, swapped)
        request.course.forget_below()

    def _close(self, seq: int | None, swapped: Swapped | None) -> None:
        if seq is not None:
            self.store.close(seq)
        elif swapped is not None:
            self.swap.forget(swapped)

    def release(self, lanes: Lanes) -> None:
        """Free idle lanes and forget how they came to be."""
        self._give_up(lanes)
        lanes.course.forget_below()
        lanes.forget()

    def _leave(self, request: Request, lanes: Lanes, seq: int | None, swapped: Swapped | None) -> None:
        """Leave to lanes what a request that ends has, for another to go on from."""
        if swapped is not None:
            self.swap.hand_over(swapped, lanes)
            lanes.pages = swapped.pages
        elif seq is not None:
            self.store.release_area(seq)
            lanes.seq, lanes.pages = seq, self.store.pages_of(seq)
            self.idle.append(lanes)
        lanes.token_ids, lanes.course = request.tokens[: request.num_computed], request.course
        lanes.prompt_logits = request.prompt_logits
        lanes.course.stop(request.num_computed)

    def _leave_below(self, request: Request, lanes: Lanes) -> bool:
        """Leave to lanes what is below the pool of a request that ends before anything was compressed of what
        was put back or staged for it; False, changing nothing, for others. The pool could seldom hold all of
        that and another question, and never has to."""
        if not request.restored:
            return False
        course, turn = request.course, request.course.turns[-1]
        start = turn.start
        if any(c.turn is turn for c in course.compressions[: course.done]) or not course.rewind(start):
            return False
        lanes.token_ids, lanes.course, lanes.pages = request.tokens[:start], course, request.past_pages
        lanes.prompt_logits = None
        course.cut(start, held=False)
        self.swap.hand_over(None, lanes)
        return True

    def bring_back(self, lanes: Lanes) -> bool:
        """Put lanes that were demoted whole back into the pool, among the idle; False, with nothing lost of
        them, if there is no room even if those of others make way. Lanes that turn out to be lost are as if
        reclaimed."""
        self._release_abandoned()
        if lanes.swapped is None:
            return True
        lanes.busy = True  # what is demoted to make room must not push them out
        try:
            fits = self._free_up(lanes.swapped.pages, own=False)
        finally:
            lanes.busy = False
        if fits and (seq := self.swap.restore_lanes(lanes)) is not None:
            lanes.seq = seq
            self.idle.append(lanes)
        return fits

    def restore(self, lanes: Lanes, num_pages: int, fill: Callable[[int], None]) -> bool:
        """Give empty lanes a sequence, into which `fill` puts entries on `num_pages` pages, and count them
        among the idle; idle lanes of others are reclaimed for it. False, changing nothing, if that is not
        enough; if `fill` raises, its pages are free again."""
        self._release_abandoned()
        if not self._free_up(num_pages, own=False):
            return False
        seq = self.store.open()
        try:
            fill(seq)
        except BaseException:
            self.store.close(seq)
            raise
        lanes.seq, lanes.pages = seq, self.store.pages_of(seq)
        self.idle.append(lanes)
        return True

    def fork_siblings(self, leader: Request) -> list[Request]:
        """Start the waiting siblings (n > 1) of a request whose prompt is computed on copies of its
        lanes, as far as there is room; of the others the first leads the rest."""
        started = []
        siblings = [r for r in self.waiting if r.leader is leader]
        for place, sibling in enumerate(siblings):
            if not self._fork(leader, sibling):
                for follower in siblings[place + 1 :]:
                    follower.leader = sibling
                break
            started.append(sibling)
        return started

    def _fork(self, leader: Request, sibling: Request) -> bool:
        assert leader.seq is not None
        try:
            while (seq := self.store.fork(leader.seq)) is None:
                if not self.idle:
                    return False
                self._reclaim(self.idle[0])
        except (MemoryError, RuntimeError):  # torch's way to say that memory is short
            _LOG.debug("a sequence could not be copied", exc_info=True)
            return False
        self.waiting.remove(sibling)
        sibling.seq, sibling.num_computed = seq, leader.num_computed
        sibling.num_reused = sibling.num_prompt
        sibling.started = leader.started
        sibling.course = leader.course.fork()
        ask_area(self.store, sibling)
        self._run(sibling)
        return True

    # Admission

    def _admit(self) -> None:
        self._release_abandoned()
        for request in list(self.waiting):
            if request.waits_for_leader or self._waits_for_prefix(request):
                continue
            if self._let_run(request):
                self.waiting.remove(request)
            elif self.running:
                # In order of arrival: a short request must not starve a long one.
                if request.waits_below is not None:
                    self.swap.fetch(request.waits_below)
                break
            else:
                message = self.room.shortage(request, len(request.tokens), self.room.most(request))
                self.exhausted.append((request, message))

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a request is to take over what a running one is about to publish."""
        prefixes = self.prefixes
        if prefixes is None or not prefixes.waits(request):
            return False
        staged = self.room.stages(request)
        return prefixes.serves(staged, staged and self.room.shares(request))

    def _let_run(self, request: Request) -> bool:
        """Start a waiting request if there is room."""
        while self._make_room(request):
            if self._start(request):
                return True
            # What is lost on the way up is computed again, which takes other room.
        return False

    def _release_abandoned(self) -> None:
        for lanes in [lanes for lanes in (*self.idle, *self.swap.demoted) if lanes.abandoned]:
            self.release(lanes)

    def _start(self, request: Request) -> bool:
        """Start a request for which there is room; False if what it was to go on from is lost."""
        if not self.starting.start(request):
            return False
        if self.prefixes is not None:
            self.prefixes.begin(request)
        ask_area(self.store, request)
        self._run(request)
        return True

    def _leave_prefixes(self, request: Request) -> None:
        if self.prefixes is not None:
            self.prefixes.leave(request)

    def _run(self, request: Request) -> None:
        request.state = State.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.id)

    def _make_room(self, request: Request) -> bool:
        """Whether the whole of the request's tokens fit, idle lanes of others being reclaimed for it."""
        self._cut_to_common_prefix(request)
        own = request.lanes is not None and request.lanes.seq is not None
        return self._free_up(self.room.to_start(request), own, request.lanes)

    def _free_up(self, pages: int, own: bool, spared: Lanes | None = None) -> bool:
        """Whether `pages` pages, what running prompts still need and a page per lane of each running
        sequence fit the pool, and there is a sequence for them, if they have not their `own`. Idle lanes
        other than those `spared` are reclaimed for it, but only if that is enough."""
        needed = pages + self.store.num_lanes * len(self.running)
        needed += sum(self.room.ahead(r) for r in self.running if r.num_remaining > 1)
        others = [lanes for lanes in self.idle if lanes is not spared]
        reclaimable = sum(self.store.pages_of(lanes.seq) for lanes in others if lanes.seq is not None)
        if self.store.pool.num_free + reclaimable < needed:
            return False
        if not (own or self.store.num_free_seqs or others):
            return False
        for lanes in others:
            if self.store.pool.num_free >= needed and (own or self.store.num_free_seqs):
                break
            if lanes.seq is not None:  # those before may have made it give way
                self._reclaim(lanes)
        return True

    def _cut_to_common_prefix(self, request: Request) -> None:
        """Cut a conversation's idle lanes back to the tokens that they share with the request. What was
        compressed for the sake of tokens that are gone is computed again."""
        lanes = request.lanes
        if lanes is None or not lanes.token_ids:
            return
        common = _common_prefix(lanes.token_ids, request.tokens)
        if self.reuse_limit is not None and request.num_prompt > self.reuse_limit:
            common = 0
        # Where all of them is below, the last turn is begun again instead.
        there = lanes.seq is not None or lanes.swapped is not None or lanes.course.below is None
        request.repeats = there and common == request.num_prompt and request.is_last_turn_of(lanes.course)
        if not request.repeats:
            # The last token is always computed: its logits are wanted.
            common = lanes.course.start_of_question(min(common, request.num_prompt - 1))
        if common == len(lanes.token_ids):
            return
        if lanes.course.knows_more_than(common):
            self._give_up(lanes)
            if not (request.retention.demotes and lanes.course.rewind(common)):
                lanes.course.restart()
        elif lanes.seq is not None:
            self.store.truncate(lanes.seq, common)
        elif lanes.swapped is not None:
            lanes.swapped.end = common
        del lanes.token_ids[common:]
        lanes.course.cut(common, held=lanes.seq is not None or lanes.swapped is not None)
        if lanes.seq is None:
            self.swap.keep_or_drop(lanes)

    # Running short

    def _reserve(self, request: Request, count: int, planned: dict[int, Scheduled]) -> bool:
        """Reserve pages for a request, taking them from idle lanes and later arrivals."""
        assert request.seq is not None
        course = request.course
        while not self.store.reserve(request.seq, count):
            if self.idle:
                self._reclaim(self.idle[0])
                continue
            victim = self.running[-1]
            if victim is request:
                if len(self.running) == 1:
                    needed = self.store.pages_of(request.seq) + self.store.pages_missing(request.seq, count)
                    message = self.room.shortage(request, request.num_computed + count, needed)
                    self.exhausted.append((request, message))
                else:
                    self._preempt(request, planned)
                return False
            self._preempt(victim, planned)
        if not request.retention.keeps_all:
            course.peak = max(course.peak, self.store.pages_of(request.seq))
        return True

    def _reclaim(self, lanes: Lanes) -> None:
        """Take the pages of idle lanes. What a conversation demotes anyway is enough for its next turn;
        others go below the pool whole, also beside what they zoom in."""
        assert lanes.seq is not None
        below, num_tokens = lanes.course.below, len(lanes.token_ids)
        covered, was_busy, lanes.busy = False, lanes.busy, True  # it must not give way to itself
        if below is not None and not lanes.course.zooms:
            below.add(self.store, lanes.seq, num_tokens)
            covered = below.covers(num_tokens)
        swapped = None if covered else self.swap.demote(lanes.seq)
        lanes.busy = was_busy
        self._give_up(lanes)
        if swapped is not None or covered:
            self.swap.hand_over(swapped, lanes)
        else:
            lanes.lose()
        self.num_reclaimed += 1

    def _give_way(self) -> bool:
        """Give up the idle lanes used least recently that have anything below the pool; False if none has.
        They are computed again along their course: without what is below they would answer otherwise."""
        for lanes in self.idle:
            below = lanes.course.below
            if not lanes.busy and below is not None and below.nbytes:
                self._give_up(lanes)
                lanes.lose()
                return True
        return False

    def _give_up(self, lanes: Lanes) -> None:
        if lanes.seq is not None:
            self.idle.remove(lanes)
            self.store.close(lanes.seq)
            lanes.seq = None
        self.swap.drop(lanes)

    def _preempt(self, request: Request, planned: dict[int, Scheduled]) -> None:
        assert request.seq is not None
        self.once.say(
            _LOG,
            logging.WARNING,
            "The KV pool is full: preempting requests (raise --kv-hot or lower --max-seqs).",
        )
        planned.pop(request.id, None)
        request.swapped = self.swap.demote(request.seq)
        self.set_back(request)
        self.num_preemptions += 1

    def set_back(self, request: Request) -> None:
        """Let a running request wait to go on from what is swapped of it, or to begin again."""
        assert request.seq is not None
        self.running.remove(request)
        self.store.close(request.seq)
        request.seq = None
        if request.swapped is None:
            request.restart()
        self._leave_prefixes(request)
        request.state = State.WAITING
        self.add(request)


def _common_prefix(a: list[int], b: list[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
