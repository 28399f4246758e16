"""The engine: token ids in, events out. It knows no text.

`add` queues a request, `step` computes one batch and returns what happened, `abort` ends a
request. Every request ends in exactly one FinishEvent, whatever happens to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from minikv.cache.compress import Compressor, Ranges
from minikv.cache.copies import copies_for
from minikv.cache.spans.zoom import Counters, zoom_in
from minikv.cache.stage import NotThere, Stage
from minikv.cache.tiers.below import Below
from minikv.cache.tiers.storage import Storage
from minikv.config import CacheConfig, EngineConfig, check_ranges
from minikv.errors import ConfigError, MinikvError
from minikv.failures import NO_ROOM_BELOW, describe, fault_of
from minikv.kernels.backend import CPU, EntryKernels
from minikv.kernels.batch import Batch
from minikv.memory import make_store, resolve_context
from minikv.models.config import ModelConfig
from minikv.results import FinishReason
from minikv.sampling import Sample, Sampler, SamplingParams, sample_batch
from minikv.scheduler.areas import ask_area, staged, zooming
from minikv.scheduler.batching import build_batch
from minikv.scheduler.prefix import Prefixes
from minikv.scheduler.recording import record_queries, record_surprisal
from minikv.scheduler.request import Event, FinishEvent, Lanes, Order, Request, State, TokenEvent
from minikv.scheduler.retention import FindProfile, FindRouter, Retention, Retentions
from minikv.scheduler.scheduler import Scheduled, Scheduler

_LOG = logging.getLogger(__name__)


class Model(Protocol):
    """What the engine needs of a decoder. With policies or tiers it also needs `rope`, with policies
    `output_weight` and, for surprisal, `hidden_states`, `logits` and `some_logits`."""

    config: ModelConfig

    def forward(self, batch: Batch) -> Tensor:
        """Logits [len(batch.logit_rows), vocab] float32, having written keys and values of all rows."""
        ...


class Engine:
    """One model, one page pool, any number of requests. `config.cache` is what requests get that bring
    no cache configuration of their own. `fingerprint` says which model this is and how it computes: what is
    in a cold file is of use to the same alone."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype = torch.float32,
        page_size: int = 32,
        eos_token_ids: Sequence[int] = (),
        keys_transposed: bool = False,
        find_profile: FindProfile | None = None,
        fingerprint: str = "",
        entry_kernels: EntryKernels | None = None,
        device: torch.device = CPU,
        find_router: FindRouter | None = None,
    ):
        shape = model.config
        self.model: Any = model
        self.config = config
        self.max_context = resolve_context(config.max_context, shape.max_context)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.store = make_store(
            config, shape, self.max_context, kv_dtype, page_size, keys_transposed, entry_kernels, device
        )
        self.storage: Storage | None = None
        if config.tiers.below:
            copies = copies_for(device, config.tiers.warm_bytes) if config.tiers.async_copies else None
            self.store.pool.copies = copies
            taken = 0 if copies is None else copies.nbytes
            self.storage = Storage.of(config.tiers, fingerprint, shape, self.model.rope, kv_dtype, taken)
        # Dynamic RoPE rotates a token for the length of its whole prompt once that is past the
        # original context; lanes of a shorter turn are then not what a fresh prompt would give.
        reuse_limit = shape.rope.original_context if shape.rope.kind == "dynamic" else None
        self._prefixes: Prefixes | None = None
        if self.storage is not None and config.tiers.prefixes:
            self._prefixes = Prefixes(self.storage, self.store, shape, reuse_limit)
        self.scheduler = Scheduler(
            self.store, config.batch_tokens, config.prefill_chunk, reuse_limit, self.storage, self._prefixes
        )
        self._requests: dict[int, Request] = {}
        self._events: list[Event] = []
        self._next_id = 0
        self._in_use = threading.Lock()
        self._compressor = Compressor(self.store, self.model)
        self._retentions = Retentions(self.store, config, model, find_profile, find_router)
        self._retentions.get(config.cache)
        self.zoomed = Counters()

    @property
    def has_work(self) -> bool:
        """Whether a further `step` will return events or compute."""
        return bool(self._events) or self.scheduler.has_work

    def add(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        lanes: Lanes | None = None,
        cache: CacheConfig | None = None,
        content_end: int | None = None,
        pinned: Ranges = (),
    ) -> list[int]:
        """Queue a prompt; returns one request id per completion asked for (`params.n`).

        `lanes` are kept when the request ends and reused by the next one that brings them, as far
        as the token ids agree; they serve one request at a time. A prompt that can never run ends
        with an error event at the next step instead of raising.

        cache: which entries stay, for this request; None takes the engine's. content_end: how many of the
        tokens are content, before those that a chat template puts behind the user's text. pinned: token
        ranges [start, end) that stay, besides those of `cache`. Raises ConfigError for a cache
        configuration that this engine cannot serve.
        """
        params = params or SamplingParams()
        with self._one_thread():
            if lanes is not None and lanes.busy:
                raise ConfigError("The lanes of a conversation serve one request at a time.")
            if lanes is not None and params.n > 1:
                raise ConfigError("The lanes of a conversation cannot be shared by n > 1 completions.")
            retention = self._retentions.get(cache or self.config.cache)
            order = Order(token_ids, params, retention, content_end, check_ranges("pinned", pinned), lanes)
            return self._add(order)

    def _add(self, order: Order) -> list[int]:
        fault = fault_of(order.token_ids, self.model.config.vocab_size, self.max_context)
        leader: Request | None = None
        ids = []
        for index in range(order.params.n):
            request, problem = self._make_request(order, index, leader, fault)
            leader = leader or request
            ids.append(request.id)
            shortage = None if problem else self._shortage(request)
            if problem or shortage:
                request.state = State.FINISHED
                # A conversation that grew past the pool has come to its end; nothing is wrong with it.
                grown = shortage and order.lanes is not None and order.lanes.token_ids
                self._events.append(
                    FinishEvent(request, "context" if grown else "error", problem or shortage)
                )
                continue
            if order.lanes is not None:
                order.lanes.busy = True
            self._requests[request.id] = request
            self.scheduler.add(request)
        return ids

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """End a request in whatever state it is; its terminal event comes with the next step.

        A request that has already ended, or was never there, is left alone.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def release(self, lanes: Lanes) -> None:
        """Free the pages of lanes that no request is using."""
        if lanes.busy:
            raise ConfigError("The lanes of a conversation cannot be freed while a request uses them.")
        self.scheduler.release(lanes)

    def retention(self, cache: CacheConfig) -> Retention:
        """What a cache configuration means here. ConfigError if this engine cannot serve it."""
        return self._retentions.get(cache)

    def restore(self, lanes: Lanes, num_pages: int, fill: Callable[[int], None]) -> bool:
        """Give empty lanes a sequence, into which `fill` puts entries on `num_pages` pages; False if the
        pool has not so many, not even if idle lanes of others make way."""
        with self._one_thread():
            return self.scheduler.restore(lanes, num_pages, fill)

    def adopt(self, lanes: Lanes) -> None:
        """Count lanes that have no sequence, but something below the pool, among the idle."""
        self.scheduler.swap.keep_or_drop(lanes)

    def bring_back(self, lanes: Lanes) -> bool:
        """See that lanes which were demoted are in the pool, as far as they are not lost; False if there is
        no room, not even if idle lanes of others make way."""
        with self._one_thread():
            return self.scheduler.bring_back(lanes)

    @property
    def tier_stats(self) -> dict[str, int] | None:
        """Bytes and spans of the tiers below the pool, and counters of what moved, by name; None without
        tiers."""
        if self.storage is None:
            return None
        scheduler, copies = self.scheduler, self.store.pool.copies
        beside = {} if copies is None else copies.report()
        return (
            self.storage.report()
            | beside
            | {
                "turns_restored": scheduler.num_restored,
                "prompts_staged": scheduler.starting.num_staged,
                "preemptions": scheduler.num_preemptions,
                "reclaimed": scheduler.num_reclaimed,
                "zoomed_rows": self.zoomed.rows,
                "zoomed_bytes": self.zoomed.bytes,
            }
        )

    def close(self) -> None:
        """Close the tiers below the pool. Nothing may be asked of the engine after that."""
        if self.storage is not None:
            self.storage.close()
            self.storage = None

    def step(self) -> list[Event]:
        """Compute one batch. Returns the events since the last step, oldest first."""
        with self._one_thread():
            return self._step()

    def _step(self) -> list[Event]:
        plan = self.scheduler.plan()
        for request, message in self.scheduler.exhausted:
            self._finish(request, "context", message)
        self.scheduler.exhausted.clear()
        # These got no rows: their lanes are over a limit that is lower than that of the turn before.
        for request in self.scheduler.overfull:
            if request.state is State.RUNNING:
                self._compress_if_due(request)
        self.scheduler.overfull.clear()
        for request in self.scheduler.answerable:
            assert request.prompt_logits is not None
            request.started = request.started or time.perf_counter()
            self._sample([request], request.prompt_logits.unsqueeze(0).clone(), None)
        if plan:
            self._compute(plan)
        if self.store.pool.copies is not None:
            self.store.pool.copies.sweep()
        if self.config.debug_checks:
            self.store.check()
            for area in self.store.areas:
                if area is not None and area.state is not None:
                    area.state.check()
            if self.storage is not None:
                self.storage.tiers.check()
        events, self._events = self._events, []
        return events

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise ConfigError("This engine is in use by another thread; use it from one thread at a time.")
        try:
            yield
        finally:
            self._in_use.release()

    # Inside a step

    def _compute(self, plan: list[Scheduled]) -> None:
        now = time.perf_counter()
        for item in plan:
            item.request.started = item.request.started or now
        try:
            plan = [self._with_capture(item) for item in plan]
            logits, likeliest, failed = self._forward(plan)
        except Exception as error:
            _LOG.debug("a step failed", exc_info=True)
            # Lane lengths are unchanged, so only the requests of this step are lost.
            for item in plan:
                self._finish(item.request, "error", describe(error, self.store.pool.device))
            return
        finished_prompts, rows, row = [], [], 0
        for item in plan:
            request = item.request
            assert request.seq is not None
            self.store.append(request.seq, item.count)
            request.num_computed += item.count
            wants_logits = request.num_remaining == 0
            row += wants_logits
            if request.seq in failed:
                self._set_back(request)
                continue
            if self._prefixes is not None:
                self._prefixes.publish(request)
            if self._compress_if_due(request) and self._set_aside(request) and wants_logits:
                finished_prompts.append(request)
                rows.append(row - 1)
        if len(rows) < len(logits):
            logits = logits[rows]
            likeliest = None if likeliest is None else likeliest[rows]
        self._sample(finished_prompts, logits, likeliest)

    def _with_capture(self, item: Scheduled) -> Scheduled:
        """The scheduled rows with those whose queries the request's policy wants."""
        request = item.request
        if request.course.turn_at(request.num_computed).retention.keeps_all:
            return item
        recorder = request.course.recorder_at(request.num_computed, self.model.config, self.model.rope)
        if recorder is None:
            return item
        return replace(
            item, capture=recorder.wanted_rows(request.num_computed, item.count), recorder=recorder
        )

    def _forward(self, plan: list[Scheduled]) -> tuple[Tensor, Tensor | None, set[int]]:
        """Logits of a step, the likeliest tokens where the decoder finds them on the way, and the sequences
        of which something that was staged could not be had; its recorders get what they wanted."""
        batch = build_batch(self.store, plan)
        batch.stages = staged(self.store, plan)
        zoom_in(self.store, batch, zooming(self.store, plan), self.zoomed)
        if not any(item.recorder is not None and item.recorder.wants_surprisal for item in plan):
            logits = self.model.forward(batch)
        else:
            hidden = self.model.hidden_states(batch)
            logits = self.model.logits(hidden, batch.logit_rows)
            logits_of = partial(self.model.some_logits, hidden)
            record_surprisal(plan, batch, logits_of, self.model.config.vocab_size)
        record_queries(plan, batch)
        return logits, batch.likeliest, {stage.seq for stage in batch.stages if stage.failed}

    def _compress_if_due(self, request: Request) -> bool:
        """Compress a request's lanes as often as its course asks for; False if that ended the request."""
        course, seq = request.course, request.seq
        assert seq is not None
        while (due := course.due(request.num_computed, self.store.lengths[seq])) is not None:
            turn = due.turn
            assert turn.retention.policy is not None
            try:
                self._demote(request, turn.retention)
                if self._lost(request):
                    return False
                report = self._compressor.compress(
                    seq,
                    turn.retention.policy,
                    turn.retention.cache,
                    request.num_computed,
                    course.recorded(due),
                    turn.pinned,
                    due.room,
                    max(request.num_computed, turn.num_prompt),
                    None if course.below is None else course.below.basis,
                    Stage.of(self.store, seq, course.below),
                )
            except NotThere:
                self._set_back(request)
                return False
            except BaseException as error:  # after an interrupt lanes may be half rewritten as well
                _LOG.debug("a compression failed", exc_info=True)
                self._finish(request, "error", describe(error, self.store.pool.device))
                if not isinstance(error, Exception):
                    raise
                return False
            request.compress_s += report.seconds
            if not (turn.retention.demotes or turn.retention.zooms) and report.dropped:
                course.forget_below()  # what this turn dropped is missing there
            if course.below is not None:
                course.below.basis = report.basis
            course.take(due)
            ask_area(self.store, request)
        return True

    def _set_aside(self, request: Request) -> bool:
        """Put what a staged request has computed below the pool, at the end of a page or of a block that it
        shares; False if it ended or was set back for want of room."""
        seq, course = request.seq, request.course
        assert seq is not None
        if not self.store.areas.shared(seq) or request.num_computed % self.scheduler.unit_of(request):
            return True
        self._demote(request, course.turn_at(request.num_computed - 1).retention)
        if self._lost(request):
            return False
        self.store.set_aside(seq, request.num_computed)
        return True

    def _lost(self, request: Request) -> bool:
        """Whether the tiers had no room for what a staged request has computed. A turn of a conversation then
        begins again without that, once; others end."""
        seq, below = request.seq, request.course.below
        assert seq is not None
        if not self.store.areas.shared(seq) or (below is not None and not below.lost):
            return False
        if request.restored and not request.was_set_back:
            self._set_back(request)
        else:
            self._finish(request, "context", NO_ROOM_BELOW)
        return True

    def _set_back(self, request: Request) -> None:
        """Let a request begin again of which something below the pool could not be had; once."""
        if request.was_set_back:
            self._finish(request, "error", str(NotThere()))
        else:
            request.was_set_back = True
            self.scheduler.set_back(request)

    def _demote(self, request: Request, retention: Retention) -> None:
        """Keep what the lanes hold below the pool, before a compression, if it can be asked for again."""
        course = request.course
        assert request.seq is not None
        asked = request.lanes is not None or self.store.areas.shared(request.seq)
        if self.storage is None or not retention.keeps_below(asked):
            return
        if course.below is None:
            course.below = Below(self.storage, name=request.name)
        course.below.add(self.store, request.seq, request.num_computed)

    def _sample(self, requests: list[Request], logits: Tensor, likeliest: Tensor | None) -> None:
        """Sample for the requests of the logit rows, and for siblings that waited for their prompt."""
        rows = list(range(len(requests)))
        everyone = list(requests)
        for row, leader in enumerate(requests):
            if leader.num_output:
                continue
            if leader.lanes is not None and leader.course.compressions:
                leader.prompt_logits = logits[row].clone()
            if leader.params.n > 1:
                started = self.scheduler.fork_siblings(leader)
                everyone += started
                rows += [row] * len(started)
        if len(everyone) > len(requests):
            logits = logits[rows]
            likeliest = None if likeliest is None else likeliest[rows]
        samples = sample_batch(logits, [request.sampler for request in everyone], likeliest)
        for request, sample in zip(everyone, samples, strict=True):
            if isinstance(sample, Sample):
                self._accept(request, sample)
            else:
                self._finish(request, "error", str(sample))

    def _accept(self, request: Request, sample: Sample) -> None:
        request.tokens.append(sample.token_id)
        request.first_token = request.first_token or time.perf_counter()
        stop = sample.token_id in request.stop_ids
        self._events.append(TokenEvent(request.id, sample.token_id, stop, sample.logprob))
        limit = request.params.max_tokens
        if stop:
            self._finish(request, "stop")
        elif limit is not None and request.num_output >= limit:
            self._finish(request, "length")
        elif len(request.tokens) > self.max_context:
            self._finish(request, "context", f"The context of {self.max_context} tokens is full.")

    def _finish(self, request: Request, reason: FinishReason, message: str | None = None) -> None:
        del self._requests[request.id]
        request.ended = time.perf_counter()
        if request.seq is not None:
            request.kv_bytes = self.store.bytes_of(request.seq)
            request.full_kv_bytes = self.store.pages_for(request.num_computed) * self.store.pool.page_bytes
        # What a failed request wrote may be what made it fail; nobody goes on from that.
        self.scheduler.finish(request, keep_lanes=reason != "error")
        self._events.append(FinishEvent(request, reason, message))

    # Admission checks

    def _make_request(
        self, order: Order, index: int, leader: Request | None, problem: str | None
    ) -> tuple[Request, str | None]:
        vocab, params = self.model.config.vocab_size, order.params
        sampler = Sampler(SamplingParams(), (), vocab)
        if problem is None:
            try:
                sampler = Sampler(params, order.token_ids, vocab, index)
            except MinikvError as error:
                problem = str(error)
        stops = frozenset(params.stop_token_ids)
        request = Request(
            id=self._next_id,
            tokens=list(order.token_ids),
            params=params,
            sampler=sampler,
            stop_ids=stops if params.ignore_eos else stops | self.eos_token_ids,
            retention=order.retention,
            content_end=order.content_end,
            pinned=order.pinned,
            lanes=order.lanes,
            leader=leader,
        )
        self._next_id += 1
        return request, problem

    def _shortage(self, request: Request) -> str | None:
        """Why the pool can never hold a request's prompt, or None."""
        needed = self.scheduler.room.most(request)
        if needed <= self.store.pool.num_pages:
            return None
        return self.scheduler.room.shortage(request, request.num_prompt, needed)
