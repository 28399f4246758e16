"""Continuous batching: decode rows first, then prefill chunks, under one token budget.

Requests are served in order of arrival. When pages run short, idle conversations lose their lanes
first, then the latest arrival is preempted: its lanes are freed and it computes its tokens again
later. The oldest request is never preempted, so every step makes progress or ends a request.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from minikv.cache.lanes import LaneStore
from minikv.config import format_size
from minikv.scheduler.request import Lanes, Request, State


@dataclass(frozen=True)
class Scheduled:
    """`count` rows of a request in this step, reserved in its lanes."""

    request: Request
    count: int


class Scheduler:
    """Decides; the engine computes. Holds every request that is not finished."""

    def __init__(
        self, store: LaneStore, max_batch_tokens: int, prefill_chunk: int, reuse_limit: int | None = None
    ):
        self.store = store
        self.max_batch_tokens = max_batch_tokens
        self.prefill_chunk = prefill_chunk
        self.reuse_limit = reuse_limit  # longest prompt that may go on from lanes kept earlier
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.idle: list[Lanes] = []  # least recently used first
        self.exhausted: list[tuple[Request, str]] = []
        self.num_preemptions = 0
        self.num_reclaimed = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; its prompt must fit the pool alone."""
        bisect.insort(self.waiting, request, key=lambda r: r.id)

    def plan(self) -> list[Scheduled]:
        """Choose the rows of the next step and reserve their pages.

        Requests that can never get the pages they need are left in `exhausted`, with the reason.
        """
        self._admit()
        budget = self.max_batch_tokens
        planned: dict[int, Scheduled] = {}
        # Both passes run in order of arrival; a decode row never waits behind a prompt.
        for decoding in (True, False):
            for request in list(self.running):
                if request.state is not State.RUNNING or (request.num_remaining == 1) is not decoding:
                    continue
                count = min(request.num_remaining, self.prefill_chunk, budget)
                if count and self._reserve(request, count, planned):
                    planned[request.id] = Scheduled(request, count)
                    budget -= count
        return list(planned.values())

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
                self.idle.append(lanes)
                return
        if seq is not None:
            self.store.close(seq)

    def release(self, lanes: Lanes) -> None:
        """Free idle lanes; the conversation computes its tokens again if it goes on."""
        lanes.token_ids = []
        if lanes.seq is not None:
            self.idle.remove(lanes)
            self.store.close(lanes.seq)
            lanes.seq = None

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
        self._run(sibling)
        return True

    # Admission

    def _admit(self) -> None:
        for lanes in [lanes for lanes in self.idle if lanes.abandoned]:
            self.release(lanes)
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
                count = len(request.tokens)
                needed = self.store.pages_for(count) * self.store.pool.page_bytes
                self.exhausted.append((request, self._shortage(count, needed)))

    def _start(self, request: Request) -> None:
        lanes = request.lanes
        if lanes is not None and lanes.seq is not None:
            self.idle.remove(lanes)
            request.seq, lanes.seq = lanes.seq, None
            request.num_computed = request.num_reused = len(lanes.token_ids)
            lanes.token_ids = []
        else:
            request.seq = self.store.open()
        self._run(request)

    def _run(self, request: Request) -> None:
        request.state = State.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.id)

    def _make_room(self, request: Request) -> bool:
        """Whether the whole of the request's tokens, what running prompts still need and a page per
        lane of each running sequence fit the pool. Idle lanes of others are reclaimed for it, but
        only if that is enough."""
        self._cut_to_common_prefix(request)
        needed = self._pages_to_start(request) + self.store.num_lanes * len(self.running)
        needed += sum(
            self.store.pages_missing(r.seq, r.num_remaining)
            for r in self.running
            if r.seq is not None and r.num_remaining > 1
        )
        own = request.lanes is not None and request.lanes.seq is not None
        others = [lanes for lanes in self.idle if lanes is not request.lanes]
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
        if lanes is None or lanes.seq is None:
            return self.store.pages_for(len(request.tokens))
        return self.store.pages_missing(lanes.seq, len(request.tokens) - len(lanes.token_ids))

    def _cut_to_common_prefix(self, request: Request) -> None:
        """Cut a conversation's idle lanes back to the tokens that they share with the request."""
        lanes = request.lanes
        if lanes is None or lanes.seq is None:
            return
        # The last token is always computed: its logits are wanted.
        common = _common_prefix(lanes.token_ids, request.tokens[:-1])
        if self.reuse_limit is not None and request.num_prompt > self.reuse_limit:
            common = 0
        if common < len(lanes.token_ids):
            self.store.truncate(lanes.seq, common)
            del lanes.token_ids[common:]

    # Running short

    def _reserve(self, request: Request, count: int, planned: dict[int, Scheduled]) -> bool:
        """Reserve pages for a request, taking them from idle lanes and later arrivals."""
        assert request.seq is not None
        while not self.store.reserve(request.seq, count):
            if self.idle:
                self._reclaim(self.idle[0])
                continue
            victim = self.running[-1]
            if victim is request:
                if len(self.running) == 1:
                    held = self.store.bytes_of(request.seq)
                    missing = self.store.pages_missing(request.seq, count) * self.store.pool.page_bytes
                    message = self._shortage(request.num_computed + count, held + missing)
                    self.exhausted.append((request, message))
                else:
                    self._preempt(request, planned)
                return False
            self._preempt(victim, planned)
        return True

    def _reclaim(self, lanes: Lanes) -> None:
        self.release(lanes)
        self.num_reclaimed += 1

    def _preempt(self, request: Request, planned: dict[int, Scheduled]) -> None:
        assert request.seq is not None
        planned.pop(request.id, None)
        self.running.remove(request)
        self.store.close(request.seq)
        request.seq, request.num_computed, request.num_reused = None, 0, 0
        request.state = State.WAITING
        self.add(request)
        self.num_preemptions += 1

    def _shortage(self, num_tokens: int, needed: int) -> str:
        pool = self.store.pool
        return (
            f"The KV pool is full: {num_tokens} tokens need {format_size(needed)} and the pool has "
            f"{format_size(pool.num_pages * pool.page_bytes)}; raise --kv-hot or shorten the text."
        )


def _common_prefix(a: list[int], b: list[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
