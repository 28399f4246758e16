"""Continuous batching: decode rows first, then prefill chunks, under one token budget.

Requests are served in order of arrival. When pages run short, idle conversations lose their lanes
first, then the latest arrival is preempted: its lanes are freed and it computes its tokens again
later. The oldest request is never preempted, so every step makes progress or ends a request.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minikv.cache.evidence import Recorder
from minikv.cache.lanes import LaneStore
from minikv.cache.tiers.storage import Storage
from minikv.config import format_size
from minikv.scheduler.course import Course
from minikv.scheduler.request import Lanes, Request, State


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
    ):
        self.store = store
        self.storage = storage
        self.max_batch_tokens = max_batch_tokens
        self.prefill_chunk = prefill_chunk
        self.reuse_limit = reuse_limit  # longest prompt that may go on from lanes kept earlier
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.idle: list[Lanes] = []  # least recently used first
        self.exhausted: list[tuple[Request, str]] = []
        self.overfull: list[Request] = []
        self.num_preemptions = 0
        self.num_restored = 0
        self.num_reclaimed = 0

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
        assert request.seq is not None
        allowed = request.course.rows_allowed(wanted, request.num_computed, self.store.lengths[request.seq])
        if not allowed:
            self.overfull.append(request)
        return allowed

    def finish(self, request: Request, keep_lanes: bool) -> None:
        """Take a request out of every queue. Its lanes go idle if a conversation holds them and
        `keep_lanes`, else their pages are freed."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.state = State.FINISHED
        lanes, seq = request.lanes, request.seq
        request.seq = None
        if lanes is not None:
            lanes.busy = False
            if seq is not None and keep_lanes:
                lanes.seq, lanes.token_ids = seq, request.tokens[: request.num_computed]
                lanes.course, lanes.pages = request.course, self.store.pages_of(seq)
                lanes.prompt_logits = request.prompt_logits
                lanes.course.stop(request.num_computed)
                self.idle.append(lanes)
                return
        request.course.forget_below()
        if seq is not None:
            self.store.close(seq)

    def release(self, lanes: Lanes) -> None:
        """Free idle lanes and forget how they came to be."""
        self._give_up(lanes)
        lanes.course.forget_below()
        _forget(lanes)

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
        while (seq := self.store.fork(leader.seq)) is None:
            if not self.idle:
                return False
            self._reclaim(self.idle[0])
        self.waiting.remove(sibling)
        sibling.seq, sibling.num_computed = seq, leader.num_computed
        sibling.num_reused = sibling.num_prompt
        sibling.started = leader.started
        sibling.course = leader.course.fork()
        self._run(sibling)
        return True

    # Admission

    def _admit(self) -> None:
        self._release_abandoned()
        for request in list(self.waiting):
            if request.waits_for_leader:
                continue
            if self._make_room(request):
                self.waiting.remove(request)
                self._start(request)
            elif self.running:
                # In order of arrival: a short request must not starve a long one.
                break
            else:
                message = self.shortage(request, len(request.tokens), self.most_pages(request))
                self.exhausted.append((request, message))

    def _release_abandoned(self) -> None:
        for lanes in [lanes for lanes in self.idle if lanes.abandoned]:
            self.release(lanes)

    def _start(self, request: Request) -> None:
        lanes = request.lanes
        if request.course.turns:  # preempted before: begins again with its own course
            if not (request.restored and self._put_back(request, request.course.turns[-1].start)):
                request.course.restart()
                request.seq = self.store.open()
        elif lanes is not None:
            self._start_on(request, lanes)
        else:
            request.seq = self.store.open()
            request.begin(0)
        self._run(request)

    def _start_on(self, request: Request, lanes: Lanes) -> None:
        """Go on from the lanes of a conversation, with what was demoted of them if that is asked for."""
        past, seq = len(lanes.token_ids), lanes.seq
        request.course, request.past_pages = lanes.course, lanes.pages
        restores = self._restores(request, lanes)
        if seq is not None:
            self.idle.remove(lanes)
            request.seq, lanes.seq = seq, None
            request.num_computed = request.num_reused = past
            if restores and request.course.below is not None:
                request.course.below.add(self.store, seq, past)
        restored = restores and self._put_back(request, past)
        if request.seq is None:
            request.course.restart()
            request.seq = self.store.open()
        if request.repeats:
            request.prompt_logits = lanes.prompt_logits
        else:
            request.begin(past, restored)
        _forget(lanes)

    def _restores(self, request: Request, lanes: Lanes) -> bool:
        """Whether everything that was demoted of the lanes is to be there while the request is computed: it
        then is judged by as the first prompt was. A pool that cannot hold that goes on with what is there."""
        below = lanes.course.below
        if below is None or below.lost or not request.retention.demotes or request.repeats:
            return False
        known = lanes.seq is not None or below.covers(len(lanes.token_ids))
        return known and self.store.pages_for(len(request.tokens)) <= self.store.pool.num_pages

    def _put_back(self, request: Request, num_tokens: int) -> bool:
        """Give a request a new sequence with all entries of its first `num_tokens` tokens, in the place of
        what it has; False, changing nothing, if they cannot be had."""
        below = request.course.below
        if below is None or not below.covers(num_tokens):
            return False
        spans = below.spans(num_tokens)
        if spans is None:
            return False
        if request.seq is not None:
            self.store.close(request.seq)
        request.seq = self.store.open()
        if not below.fill(self.store, request.seq, spans, num_tokens):
            raise AssertionError("the caller must make room for what is put back")
        request.num_computed = request.num_reused = num_tokens
        self.num_restored += 1
        return True

    def _run(self, request: Request) -> None:
        request.state = State.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.id)

    def _make_room(self, request: Request) -> bool:
        """Whether the whole of the request's tokens fit, idle lanes of others being reclaimed for it."""
        self._cut_to_common_prefix(request)
        own = request.lanes is not None and request.lanes.seq is not None
        return self._free_up(self._pages_to_start(request), own, request.lanes)

    def _free_up(self, pages: int, own: bool, spared: Lanes | None = None) -> bool:
        """Whether `pages` pages, what running prompts still need and a page per lane of each running
        sequence fit the pool, and there is a sequence for them, if they have not their `own`. Idle lanes
        other than those `spared` are reclaimed for it, but only if that is enough."""
        needed = pages + self.store.num_lanes * len(self.running)
        needed += sum(self._pages_ahead(r) for r in self.running if r.num_remaining > 1)
        others = [lanes for lanes in self.idle if lanes is not spared]
        reclaimable = sum(self.store.pages_of(lanes.seq) for lanes in others if lanes.seq is not None)
        if self.store.pool.num_free + reclaimable < needed:
            return False
        if not (own or self.store.num_free_seqs or others):
            return False
        for lanes in others:
            if self.store.pool.num_free >= needed and (own or self.store.num_free_seqs):
                break
            self._reclaim(lanes)
        return True

    def _pages_to_start(self, request: Request) -> int:
        lanes = request.lanes
        if lanes is not None and not request.course.turns and self._restores(request, lanes):
            held = 0 if lanes.seq is None else self.store.pages_of(lanes.seq)
            return max(0, self.store.pages_for(len(request.tokens)) - held)
        if lanes is None or lanes.seq is None:
            return self.most_pages(request)
        missing = self.store.pages_missing(lanes.seq, len(request.tokens) - len(lanes.token_ids))
        bound = request.retention.most_pages(request.num_prompt, request.pinned)
        return missing if bound is None else min(missing, max(0, bound - self.store.pages_of(lanes.seq)))

    def _pages_ahead(self, request: Request) -> int:
        """Pages that a running request will still take for the tokens it has."""
        assert request.seq is not None
        missing = self.store.pages_missing(request.seq, request.num_remaining)
        return min(missing, max(0, self.most_pages(request) - self.store.pages_of(request.seq)))

    def most_pages(self, request: Request) -> int:
        """Pages that a request will hold at most while its lanes are computed from the start, for the
        tokens that it has."""
        everything = self.store.pages_for(len(request.tokens))
        lanes, course = request.lanes, request.course
        past, start = request.past_pages, course.turns[-1].start if course.turns else 0
        if not course.turns and lanes is not None:
            past, start, course = lanes.pages, len(lanes.token_ids), lanes.course
        keeps_all = request.retention.keeps_all
        if (keeps_all and not course.compressions) or request.restored:
            return everything
        bound = self.store.pages_for((len(request.tokens) if keeps_all else request.num_prompt) - start)
        if past:
            bound += past + self.store.num_lanes
        streaming = request.retention.most_pages(request.num_prompt, request.pinned)
        if streaming is not None:
            bound = min(bound, streaming)
        return max(course.peak, min(bound, everything))

    def _cut_to_common_prefix(self, request: Request) -> None:
        """Cut a conversation's idle lanes back to the tokens that they share with the request. What was
        compressed for the sake of tokens that are gone is computed again."""
        lanes = request.lanes
        if lanes is None or not lanes.token_ids:
            return
        common = _common_prefix(lanes.token_ids, request.tokens)
        if self.reuse_limit is not None and request.num_prompt > self.reuse_limit:
            common = 0
        request.repeats = common == request.num_prompt and request.is_last_turn_of(lanes.course)
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
        del lanes.token_ids[common:]
        lanes.course.cut(common)

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
                    message = self.shortage(request, request.num_computed + count, needed)
                    self.exhausted.append((request, message))
                else:
                    self._preempt(request, planned)
                return False
            self._preempt(victim, planned)
        if not request.retention.keeps_all:
            course.peak = max(course.peak, self.store.pages_of(request.seq))
        return True

    def _reclaim(self, lanes: Lanes) -> None:
        """Take the pages of idle lanes. Compressed ones remember their course: a conversation may be
        longer than what the pool could hold of it at once."""
        below = lanes.course.below
        if below is not None and lanes.seq is not None:
            below.add(self.store, lanes.seq, len(lanes.token_ids))
        self._give_up(lanes)
        if below is not None and below.covers(len(lanes.token_ids)):
            pass  # to be put back by the next turn
        elif lanes.course.compressions:
            lanes.course.restart()
        else:
            _forget(lanes)
        self.num_reclaimed += 1

    def _give_up(self, lanes: Lanes) -> None:
        if lanes.seq is not None:
            self.idle.remove(lanes)
            self.store.close(lanes.seq)
            lanes.seq = None

    def _preempt(self, request: Request, planned: dict[int, Scheduled]) -> None:
        assert request.seq is not None
        planned.pop(request.id, None)
        self.running.remove(request)
        self.store.close(request.seq)
        request.seq, request.num_computed, request.num_reused = None, 0, 0
        if not request.course.rewind(request.course.turns[-1].start):
            request.course.restart()
        request.state = State.WAITING
        self.add(request)
        self.num_preemptions += 1

    def shortage(self, request: Request, num_tokens: int, num_pages: int) -> str:
        """That the pool cannot hold the pages which tokens of a request need, and what would help."""
        pool = self.store.pool
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


def _forget(lanes: Lanes) -> None:
    lanes.token_ids, lanes.course, lanes.pages, lanes.prompt_logits = [], Course(), 0, None


def _common_prefix(a: list[int], b: list[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
