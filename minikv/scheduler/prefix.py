"""The prefix store: beginnings of prompts in the tiers below, found again by their content.

A prompt's first tokens are divided into blocks; the key of a block is a hash of its tokens and of the key
before it. Only whole blocks are kept, of keys and values before any compression, bit for bit; beside them is
what a policy had recorded of their tokens, see `minikv.cache.companion`.

    admitted --> found: records are copied to the lanes of a request
    computed --> published: what is missing of the next block is written
    last block published, or request ended --> given up: records are found again while nobody needs their room

The request owns all these records until then, so that no block makes room for the next of its own prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from minikv.cache.companion import Companion, Tape, Traces
from minikv.cache.entries import Stored
from minikv.cache.evidence import Recorder
from minikv.cache.lanes import LaneStore
from minikv.cache.stage import Stage
from minikv.cache.tiers.base import Handle
from minikv.cache.tiers.below import Below
from minikv.cache.tiers.span import Owner, Span, owner_key, raw_span
from minikv.cache.tiers.storage import Storage
from minikv.models.config import ModelConfig
from minikv.models.rope import Rope
from minikv.scheduler.course import Course
from minikv.scheduler.request import Request

_LOG = logging.getLogger(__name__)

# Tokens that a prompt must have in common with another one for anything to be found.
BLOCK_TOKENS = 128
_TOGETHER = 8  # blocks that are put into lanes at once


@dataclass(frozen=True)
class _Plan:
    """What the store can do for a prompt.

    keys: of all blocks that it can publish. traces: what goes with each, None for nothing; num_traced: blocks
    of which that is recorded. usable: blocks of which it may take anything over. most: tokens that it may
    take over, so that what is to be known of the others is computed.
    """

    keys: list[bytes]
    traces: Traces | None
    num_traced: int
    usable: int
    most: int


@dataclass
class _Publishing:
    """A prompt whose blocks are published as they are computed.

    done: its first blocks that need not be any more. rows_done: likewise, for those that ask for rows alone.
    held: spans that it owns.
    """

    plan: _Plan
    done: int
    rows_done: int
    held: list[Handle]


@dataclass
class _Waiting:
    """Spans of blocks, of each one for each layer, that are yet to be put into lanes."""

    blocks: list[Sequence[Span]] = field(default_factory=list)


@dataclass
class _Block:
    """A block that was found: a span for each layer, and what was recorded of it, if that is wanted."""

    handles: list[Handle] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    companion: Companion | None = None


class Prefixes:
    """Finds what prompts begin with, and publishes it. What it does with a request follows from its tokens
    and its cache configuration alone, never from batch mates.

    block: tokens of a block. most_together: most that `together` says. reuse_limit: longest prompt that may
    begin with rows of another one, None without a limit.
    """

    def __init__(
        self,
        storage: Storage,
        lanes: LaneStore,
        config: ModelConfig,
        reuse_limit: int | None = None,
    ) -> None:
        self._storage = storage
        self._lanes = lanes
        self._config = config
        self._reuse_limit = reuse_limit
        self.block = BLOCK_TOKENS
        # What is staged is below the pool as it was computed, but rows within an error are not everybody's.
        self._stages = storage.sparing.most_error <= 0 and BLOCK_TOKENS % lanes.pool.page_size == 0
        self.most_together = self.block if self._stages else 1
        self._plans: dict[Request, _Plan] = {}
        self._publishing: dict[Request, _Publishing] = {}

    # What the scheduler asks

    def serves(self, staged: bool, shares: bool) -> bool:
        """Whether a request can take blocks over and leave some; `shares` is asked of staged ones."""
        return not staged or (self._stages and shares)

    def waits(self, request: Request) -> bool:
        """Whether a running request is about to publish a block that this one, if served, takes over."""
        if not self._publishing or (plan := self._plan(request)) is None:
            return False
        return any(other is not request and _awaits(plan, ahead) for other, ahead in self._publishing.items())

    def begin(self, request: Request) -> None:
        """Put what is found of a request's prompt into its lanes, if they are empty. What it computes itself
        is published from here on."""
        plan = self._plan(request)
        if plan is None or not self.serves(request.staged, request.shares):
            return
        if request.staged:
            request.course.below = request.course.below or Below(self._storage, name=request.name)
        held: list[Handle] = []
        try:
            found = self._take_over(request, plan, held)
        except (MemoryError, RuntimeError):  # torch's way to say that memory is short
            _LOG.debug("a prefix could not be put back", exc_info=True)
            self._give_up(held)
            self._empty(request)
            return
        if found < len(plan.keys):
            rows = found if plan.traces is None else self._count_rows(plan, found, held)
            self._publishing[request] = _Publishing(plan, found, rows, held)
            request.tape = None if plan.traces is None else Tape()
        else:
            self._give_up(held)

    def rows_allowed(self, request: Request, wanted: int) -> int:
        """How many of `wanted` rows may be computed at once: of one block, where queries are recorded."""
        left = self.block - request.num_computed % self.block
        return wanted if request.tape is None else min(wanted, left)

    def together(self, request: Request) -> int:
        """Rows of a staged request that have to be in its lanes at once, for a block to be published."""
        return self.block if request in self._publishing else 1

    def publish(self, request: Request) -> None:
        """Publish the blocks that a request has computed, before any compression."""
        while (state := self._publishing.get(request)) is not None:
            if (state.done + 1) * self.block > request.num_computed:
                return
            try:
                published = self._publish_block(request, state)
            except (MemoryError, RuntimeError):
                _LOG.debug("a prefix could not be published", exc_info=True)
                published = False
            if not published:
                self._stop(request)
                return
            state.done += 1
            state.rows_done = max(state.rows_done, state.done)
            if state.done >= state.plan.num_traced:
                request.tape = None
            if state.done == len(state.plan.keys):
                self._stop(request)

    def leave(self, request: Request) -> None:
        """A request ends, or loses its lanes."""
        self._stop(request)
        self._plans.pop(request, None)

    # Plans

    def _plan(self, request: Request) -> _Plan | None:
        """None if the request does not begin with empty lanes, or too long a prompt to share rows."""
        too_long = self._reuse_limit is not None and request.num_prompt > self._reuse_limit
        if too_long or not _is_fresh(request):
            return None
        if request not in self._plans:
            self._plans[request] = self._make_plan(request)
        return self._plans[request]

    def _make_plan(self, request: Request) -> _Plan:
        course = request.course if request.course.turns else Course([request.turn(0)])
        turn, block = course.turns[0], self.block
        evidence, streaming = turn.retention.evidence, turn.retention.streaming
        traces = Traces.of(evidence, turn.content, streaming)
        # Rows after the first compression were computed on what that left.
        empty = np.zeros(self._lanes.lane_shape, dtype=np.int32)
        whole = course.rows_allowed(turn.num_prompt, 0, empty)
        num_traced = 0 if traces is None else min(whole, turn.content.stop) // block
        most = turn.num_prompt - 1  # the last row gives the logits
        if evidence.window and not streaming:
            most = min(most, turn.content.stop - evidence.window)
        usable = min(whole // block if traces is None else num_traced, -(-max(0, most) // block))
        return _Plan(self._keys(request.tokens[:whole]), traces, num_traced, usable, most)

    def _keys(self, tokens: Sequence[int]) -> list[bytes]:
        keys, key = [], b""
        for start in range(0, len(tokens) - self.block + 1, self.block):
            ids = np.array(tokens[start : start + self.block], dtype="<i8")
            key = owner_key("prefix", key, ids.tobytes())
            keys.append(key)
        return keys

    # Taking over

    def _take_over(self, request: Request, plan: _Plan, held: list[Handle]) -> int:
        """How many blocks were put into the lanes, in whole or in part."""
        recorder = request.course.recorder_at(0, self._config, self._rope)
        last: Companion | None = None
        found, rows = 0, _Waiting()
        while found < plan.usable:
            loaded = self._load(plan, found, held)
            if loaded is None:
                break
            end = (found + 1) * self.block
            taken = (
                self._share(request, loaded.handles, end)
                if request.staged
                else self._append(request, rows, loaded.spans)
            )
            if not taken:
                break
            if last is not None and recorder is not None:
                last.replay(recorder, last.end, request.num_prompt)
            last, found = loaded.companion, found + 1
        self._put(request, rows)
        if found:
            self._adopt(request, plan, found, last, recorder)
        return found

    def _adopt(
        self, request: Request, plan: _Plan, found: int, last: Companion | None, recorder: Recorder | None
    ) -> None:
        """Let a request go on behind the rows of its first `found` blocks."""
        assert request.seq is not None
        # How surprising the next token is follows from the last row.
        again = plan.traces is not None and plan.traces.surprisal
        hit = min(plan.most, found * self.block - again)
        if recorder is not None and last is not None:
            last.replay(recorder, hit, request.num_prompt)
        if request.staged:
            self._stage(request, hit)
        elif hit < found * self.block:
            self._lanes.truncate(request.seq, hit)
        request.num_computed = request.num_reused = hit
        if not request.retention.keeps_all:
            request.course.peak = max(request.course.peak, self._lanes.pages_of(request.seq))
        self._storage.prefixes.prefix_hits += 1
        self._storage.prefixes.prefix_tokens += hit

    def _empty(self, request: Request) -> None:
        """Let a request begin with empty lanes after all."""
        if request.seq is not None:
            self._lanes.close(request.seq)
        request.seq = self._lanes.open()
        request.num_computed = request.num_reused = 0
        request.course.restart()

    def _stage(self, request: Request, num_tokens: int) -> None:
        """Let a request with empty lanes go on behind tokens that are below the pool; RuntimeError if that
        cannot be."""
        assert request.seq is not None and request.course.below is not None
        self._lanes.close(request.seq)
        request.seq = Stage.open(self._lanes, request.course.below, num_tokens)
        if request.seq is None:
            raise RuntimeError("what is staged could not be had")

    def _share(self, request: Request, handles: Sequence[Handle], end: int) -> bool:
        """Make the block up to token `end` part of what a staged request has below the pool: spans, one for
        each layer, that have an owner. False if any is lost."""
        below, tiers = request.course.below, self._storage.tiers
        assert below is not None, "it was made when the request began"
        held = [handle for handle in handles if tiers.hold(handle)]
        if below.lost or len(held) < self._config.num_layers:
            self._give_up(held)
            return False
        below.adopt(end, held)
        return True

    def _load(self, plan: _Plan, index: int, held: list[Handle]) -> _Block | None:
        """Spans of all layers of a block and what goes with it; None if anything is missing or damaged."""
        block = _Block()
        of_layer = self._find(plan.keys[index], held)
        for layer in range(self._config.num_layers):
            handle, span = self._read(of_layer.get(layer, []))
            if handle is None or span is None or not self._fits(span, Owner(plan.keys[index], layer), index):
                return None
            block.handles.append(handle)
            block.spans.append(span)
        if plan.traces is not None:
            block.companion = self._load_companion(plan.keys[index], plan.traces, index, held)
            if block.companion is None:
                return None
        return block

    def _load_companion(self, key: bytes, traces: Traces, index: int, held: list[Handle]) -> Companion | None:
        found = self._find(_companion_key(key, traces), held)
        _, span = self._read(found.get(0, []))
        if span is None:
            return None
        start = index * self.block
        shape = (self._config.num_layers, self._config.num_query_heads, self._config.head_dim)
        try:
            return Companion.from_bytes(span.body, start, start + self.block, traces, shape)
        except ValueError:
            return None

    def _fits(self, span: Span, owner: Owner, index: int) -> bool:
        """Whether a span holds what the key promises."""
        header, pool = span.header, self._lanes.pool
        heads = self._config.num_kv_heads
        return (
            (header.owner, header.fingerprint) == (owner, self._storage.exact.fingerprint)
            and (header.key_form, header.value_form, header.dtype) == ("exact", "exact", pool.dtype)
            and (header.num_lanes, header.num_rows) == (heads, heads * self.block)
            and (header.head_dim, header.num_tokens) == (pool.head_dim, (index + 1) * self.block)
            and not (header.has_mass or header.has_counts or header.merged_end)
        )

    def _append(self, request: Request, rows: _Waiting, spans: Sequence[Span]) -> bool:
        """Put a block behind what the lanes hold, with others that wait; False if pages are short."""
        assert request.seq is not None
        if not self._lanes.reserve(request.seq, (len(rows.blocks) + 1) * self.block):
            return False
        rows.blocks.append(spans)
        if len(rows.blocks) == _TOGETHER:
            self._put(request, rows)
        return True

    def _put(self, request: Request, rows: _Waiting) -> None:
        """Put blocks that wait into the lanes, which have room for them: one layer of all at once, since many
        small writes take longer than the rows do."""
        if not rows.blocks:
            return
        assert request.seq is not None
        count = len(rows.blocks) * self.block
        slots = torch.from_numpy(self._lanes.next_slots(request.seq, count))
        for layer in range(self._config.num_layers):
            found = [self._storage.exact.decode(spans[layer]).rows for spans in rows.blocks]
            places = torch.cat([part.reshape(-1) for part in slots[layer].split(self.block, dim=1)])
            self._lanes.pool.put(places, Stored.joined(found))
        self._lanes.append(request.seq, count)
        rows.blocks.clear()

    # Publishing

    def _publish_block(self, request: Request, state: _Publishing) -> bool:
        """Write what is not there of the next block; False if there is no room."""
        assert request.seq is not None
        plan, index, held = state.plan, state.done, state.held
        key, end = plan.keys[index], (index + 1) * self.block
        aside = self._lanes.num_aside(request.seq)
        if end - self.block < aside:
            return False  # it went below before it could be published
        there = self._find(key, held)
        # The last of several: those before it were found to be damaged. More may be, if it was set back.
        found = (there.get(layer, []) for layer in range(self._config.num_layers))
        if request.was_set_back:
            handles = [self._read(each)[0] for each in found]
        else:
            handles = [each[-1] if each else None for each in found]
        missing = [layer for layer, handle in enumerate(handles) if handle is None]
        # As nothing is compressed yet, an entry's place in its lane follows from its position.
        place = torch.arange(end - aside)
        chosen = (place >= end - aside - self.block).expand(self._config.num_kv_heads, -1)
        written = bool(missing)
        for layer in missing:
            entries = self._lanes.take(request.seq, layer, chosen)
            if not all(bool(torch.isfinite(rows).all()) for rows in (entries.rows.keys, entries.rows.values)):
                return False  # the request is about to fail
            handles[layer] = self._write(self._storage.exact.encode(entries, Owner(key, layer), end), held)
            if handles[layer] is None:
                return False
        if plan.traces is not None and index < plan.num_traced:
            companion = self._companion(request, plan.traces, index)
            key = _companion_key(key, plan.traces)
            if companion is not None and not self._find(key, held):
                span = raw_span(Owner(key, 0), self._storage.exact.fingerprint, end, companion.to_bytes())
                if self._write(span, held) is None:
                    return False
                written = True
        self._storage.prefixes.prefix_blocks += written
        return not request.staged or self._share(request, [h for h in handles if h is not None], end)

    def _companion(self, request: Request, traces: Traces, index: int) -> Companion | None:
        recorder = request.course.turns[0].recorder
        if recorder is None or request.tape is None:
            return None
        start = index * self.block
        wanted = recorder.lasting_rows(start, self.block)
        return request.tape.cut(start, start + self.block, wanted, traces)

    def _count_rows(self, plan: _Plan, found: int, held: list[Handle]) -> int:
        """How many blocks are there as those that record nothing need them."""
        while found < len(plan.keys) and len(self._find(plan.keys[found], held)) == self._config.num_layers:
            found += 1
        return found

    def _stop(self, request: Request) -> None:
        state = self._publishing.pop(request, None)
        request.tape = None
        if state is not None:
            self._give_up(state.held)

    # Spans

    @property
    def _rope(self) -> Rope:
        rope = self._storage.exact.rope
        assert rope is not None, "the engine gives its rotation"
        return rope

    def _find(self, key: bytes, held: list[Handle]) -> dict[int, list[Handle]]:
        """Spans of a key by layer, owned from here on and noted in `held`."""
        found = self._storage.tiers.find(key, self._storage.exact.fingerprint)
        held += found
        of_layer: dict[int, list[Handle]] = {}
        for handle in found:
            of_layer.setdefault(handle.owner.layer, []).append(handle)
        return of_layer

    def _read(self, handles: Sequence[Handle]) -> tuple[Handle, Span] | tuple[None, None]:
        """The first that can be read; what was damaged and written again is there twice."""
        for handle in handles:
            if (span := self._storage.tiers.read(handle)) is not None:
                return handle, span
        return None, None

    def _write(self, span: Span, held: list[Handle]) -> Handle | None:
        handle = self._storage.tiers.write(span)
        if handle is not None:
            held.append(handle)
        return handle

    def _give_up(self, held: list[Handle]) -> None:
        """Release spans. The last blocks go first where room is needed: without those before them they are of
        no use."""
        for handle in reversed(held):
            self._storage.tiers.release(handle)


def _is_fresh(request: Request) -> bool:
    """Whether the request's own prompt is all that there is or will be in its lanes, none of it yet."""
    if request.num_computed or request.waits_below is not None:
        return False
    if turns := request.course.turns:
        return len(turns) == 1 and turns[0].start == 0
    lanes = request.lanes
    return lanes is None or not (lanes.token_ids or lanes.course.turns)


def _awaits(plan: _Plan, ahead: _Publishing) -> bool:
    """Whether the next block that another request publishes is of use to this one."""
    alike = plan.traces == ahead.plan.traces
    if not alike and plan.traces is not None:
        return False
    done = ahead.done if alike else ahead.rows_done
    # As keys are chained, prompts with a block in common have all those before it in common.
    end = min(plan.usable, ahead.plan.num_traced if plan.traces is not None else len(ahead.plan.keys))
    return done < end and plan.keys[done] == ahead.plan.keys[done]


def _companion_key(key: bytes, traces: Traces) -> bytes:
    return owner_key("companion", key, traces.name)
