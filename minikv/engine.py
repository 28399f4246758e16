"""The engine: token ids in, events out. It knows no text.

`add` queues a request, `step` computes one batch and returns what happened, `abort` ends a
request. Every request ends in exactly one FinishEvent, whatever happens to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool, page_bytes
from minikv.config import EngineConfig, format_size
from minikv.errors import ConfigError, MinikvError
from minikv.kernels.batch import Batch
from minikv.memory import pool_pages
from minikv.models.config import ModelConfig
from minikv.results import FinishReason
from minikv.sampling import Sample, Sampler, SamplingParams, sample_batch
from minikv.scheduler.batching import build_batch
from minikv.scheduler.request import Event, FinishEvent, Lanes, Request, State, TokenEvent
from minikv.scheduler.scheduler import Scheduled, Scheduler

_LOG = logging.getLogger(__name__)


class Model(Protocol):
    """What the engine needs of a decoder."""

    config: ModelConfig

    def forward(self, batch: Batch) -> Tensor:
        """Logits [len(batch.logit_rows), vocab] float32, having written keys and values of all rows."""
        ...


class Engine:
    """One model, one page pool, any number of requests."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype = torch.float32,
        page_size: int = 32,
        eos_token_ids: Sequence[int] = (),
        keys_transposed: bool = False,
    ):
        shape = model.config
        self.model = model
        self.config = config
        self.max_context = resolve_context(config.max_context, shape.max_context)
        self.eos_token_ids = frozenset(eos_token_ids)
        num_lanes = shape.num_layers * shape.num_kv_heads
        size = page_bytes(page_size, shape.head_dim, kv_dtype)
        num_pages = pool_pages(config, self.max_context, num_lanes, page_size, size)
        pool = PagePool(num_pages, page_size, shape.head_dim, kv_dtype, config.debug_checks, keys_transposed)
        self.store = LaneStore(pool, config.max_seqs, shape.num_layers, shape.num_kv_heads, self.max_context)
        # Dynamic RoPE rotates a token for the length of its whole prompt once that is past the
        # original context; lanes of a shorter turn are then not what a fresh prompt would give.
        reuse_limit = shape.rope.original_context if shape.rope.kind == "dynamic" else None
        self.scheduler = Scheduler(self.store, config.batch_tokens, config.prefill_chunk, reuse_limit)
        self._requests: dict[int, Request] = {}
        self._events: list[Event] = []
        self._next_id = 0
        self._in_use = threading.Lock()

    @property
    def has_work(self) -> bool:
        """Whether a further `step` will return events or compute."""
        return bool(self._events) or self.scheduler.has_work

    def add(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, lanes: Lanes | None = None
    ) -> list[int]:
        """Queue a prompt; returns one request id per completion asked for (`params.n`).

        `lanes` are kept when the request ends and reused by the next one that brings them, as far
        as the token ids agree; they serve one request at a time. A prompt that can never run ends
        with an error event at the next step instead of raising.
        """
        params = params or SamplingParams()
        with self._one_thread():
            return self._add(token_ids, params, lanes)

    def _add(self, token_ids: Sequence[int], params: SamplingParams, lanes: Lanes | None) -> list[int]:
        if lanes is not None and (lanes.busy or params.n > 1):
            what = "serve one request at a time" if lanes.busy else "cannot be shared by n > 1 completions"
            raise ConfigError(f"The lanes of a conversation {what}.")
        fault = self._fault(token_ids)
        leader: Request | None = None
        ids = []
        for index in range(params.n):
            request, problem = self._make_request(token_ids, params, index, lanes, leader, fault)
            leader = leader or request
            ids.append(request.id)
            if problem:
                request.state = State.FINISHED
                self._events.append(FinishEvent(request, "error", problem))
                continue
            if lanes is not None:
                lanes.busy = True
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

    def step(self) -> list[Event]:
        """Compute one batch. Returns the events since the last step, oldest first."""
        with self._one_thread():
            return self._step()

    def _step(self) -> list[Event]:
        plan = self.scheduler.plan()
        for request, message in self.scheduler.exhausted:
            self._finish(request, "context", message)
        self.scheduler.exhausted.clear()
        if plan:
            self._compute(plan)
        if self.config.debug_checks:
            self.store.check()
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
            batch = build_batch(self.store, plan)
            logits = self.model.forward(batch)
        except Exception as error:
            _LOG.debug("a step failed", exc_info=True)
            # Lane lengths are unchanged, so only the requests of this step are lost.
            for item in plan:
                self._finish(item.request, "error", _describe(error))
            return
        finished_prompts = []
        for item in plan:
            assert item.request.seq is not None
            self.store.append(item.request.seq, item.count)
            item.request.num_computed += item.count
            if item.request.num_remaining == 0:
                finished_prompts.append(item.request)
        self._sample(finished_prompts, logits, batch.likeliest)

    def _sample(self, requests: list[Request], logits: Tensor, likeliest: Tensor | None) -> None:
        """Sample for the requests of the logit rows, and for siblings that waited for their prompt."""
        rows = list(range(len(requests)))
        everyone = list(requests)
        for row, leader in enumerate(requests):
            if leader.num_output == 0 and leader.params.n > 1:
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
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        index: int,
        lanes: Lanes | None,
        leader: Request | None,
        problem: str | None,
    ) -> tuple[Request, str | None]:
        vocab = self.model.config.vocab_size
        sampler = Sampler(SamplingParams(), (), vocab)
        if problem is None:
            try:
                sampler = Sampler(params, token_ids, vocab, index)
            except MinikvError as error:
                problem = str(error)
        stops = frozenset(params.stop_token_ids)
        request = Request(
            id=self._next_id,
            tokens=list(token_ids),
            params=params,
            sampler=sampler,
            stop_ids=stops if params.ignore_eos else stops | self.eos_token_ids,
            lanes=lanes,
            leader=leader,
        )
        self._next_id += 1
        return request, problem

    def _fault(self, token_ids: Sequence[int]) -> str | None:
        """Why a prompt can never run, or None."""
        count = len(token_ids)
        if not count:
            return "The prompt is empty; give it at least one token."
        vocab = self.model.config.vocab_size
        bad = next((t for t in token_ids if not 0 <= t < vocab), None)
        if bad is not None:
            return f"Token id {bad} is outside the model's vocabulary of {vocab}."
        if count > self.max_context:
            return (
                f"The prompt has {count} tokens and the context is {self.max_context}; "
                "shorten the prompt or raise max_context if the model allows."
            )
        pool = self.store.pool
        needed = self.store.pages_for(count)
        if needed > pool.num_pages:
            need, have = format_size(needed * pool.page_bytes), format_size(pool.num_pages * pool.page_bytes)
            return (
                f"The prompt's {count} tokens need {need} of KV cache and the pool has {have}; "
                "raise kv_hot or shorten the prompt."
            )
        return None


def resolve_context(asked: int | None, model_limit: int) -> int:
    """The context in tokens: the model's own unless less is asked for."""
    if asked is None:
        return model_limit
    if asked > model_limit:
        raise ConfigError(f"max_context {asked} is more than this model's context of {model_limit} tokens.")
    return asked


def _describe(error: Exception) -> str:
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "The machine ran out of memory in a step; lower kv_hot, max_seqs or prefill_chunk."
    detail = (str(error).splitlines() or ["no message"])[0]
    return f"The step failed: {type(error).__name__}: {detail}"
