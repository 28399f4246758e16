"""Decode steps that are captured once as CUDA graphs and replayed, so that a step costs one launch.

    a step --padded--> rows and entries of a bucket --copied to--> memory of the graph --replayed--> hidden

A graph reads and writes the same memory each time it is replayed: rows, angles, lane tables, lengths and
slots are copied there before. What it computes may depend on nothing else: neither grids nor branches on what
a step holds. So its rows are those of a bucket, and its splits those of the longest lane that the bucket
allows; how a lane is split is still a matter of the lane alone, and programs past its end do nothing. Rows
that no sequence has are zero, and write to the pool's scratch page.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from minikv.kernels.batch import Batch

_LOG = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a graph. A step with more is not replayed."""

LEAST_ENTRIES = 1024
"""Entries that the longest lane of a graph may have, or twice that, and so on."""

MOST_GRAPHS = 48
"""Graphs that are kept; the one that was not used for longest makes way."""

MOST_TABLE_BYTES = 512 << 20
"""Bytes that the lane tables of all graphs have together: those that were not used for longest make way, and
a step whose graph alone would have more is computed without."""

Run = Callable[[Tensor, Batch], Tensor]
"""Hidden states [T, width] of all rows from the embedded ones, which it may overwrite, and a batch with its
angles and its plan."""


class Graph(Protocol):
    """What a device has recorded."""

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Record what `run` does on the device, having run it before if need be; gives its result, which
        has its numbers after the next replay."""
        ...

    def replay(self) -> None:
        """Do it again, on what is in the same memory by now."""
        ...


class Refilling(Protocol):
    """An attention backend whose plans can be used again."""

    def plan(self, batch: Batch) -> None:
        """See `AttentionBackend.plan`."""
        ...

    def refill(self, plan: Any, batch: Batch) -> None:
        """Put tables, lengths and slots of a batch in the place of those of a plan, in the plan's memory. The
        batch has as many sequences, with as many rows, and no longer lanes than the plan was made for."""
        ...


@dataclass(frozen=True)
class Bucket:
    """What steps of one graph have in common: rows, most entries of a lane, whether any has log masses."""

    rows: int
    entries: int
    has_mass: bool

    def tables_of(self, batch: Batch) -> tuple[int, ...]:
        """The shape of its lane tables [rows, layers, kv_heads, P] int32 for lanes as those of a batch."""
        return (self.rows, *batch.lane_pages.shape[1:3], -(-self.entries // batch.pool.page_size))


def bucket_of(batch: Batch) -> Bucket | None:
    """The least bucket that a step fits; None unless each sequence has one row, none is to be captured and
    nothing is to be done between writing and attending."""
    rows = batch.num_sequences
    if rows != batch.num_rows or not 1 <= rows <= ROWS[-1]:
        return None
    if batch.route is not None or batch.stages:
        return None  # both work on the host between the parts of a layer
    if batch.capture_rows is not None or batch.pool.scratch is None:
        return None
    longest, entries = int(batch.past_lengths.max()) + 1, LEAST_ENTRIES
    while entries < longest:
        entries *= 2
    return Bucket(next(size for size in ROWS if size >= rows), entries, any(batch.has_mass))


def padded(batch: Batch, rows: int) -> Batch:
    """Tables and lengths of a step of `rows` sequences with one row each: those of a batch, and empty ones
    that write to the scratch page. It has no tokens."""
    missing, scratch = rows - batch.num_sequences, batch.pool.scratch
    assert scratch is not None, "the pool has no scratch page"
    tables = batch.lane_pages.new_zeros(missing, *batch.lane_pages.shape[1:])
    tables[..., 0] = scratch
    lengths = batch.past_lengths.new_zeros(missing, *batch.past_lengths.shape[1:])
    wider = _tables_of(
        batch, torch.cat((batch.lane_pages, tables)), torch.cat((batch.past_lengths, lengths)), batch.has_mass
    )
    slots = batch.slots.new_full((*batch.slots.shape[:2], missing), scratch * batch.pool.page_size)
    wider.slots = torch.cat((batch.slots, slots), dim=-1)
    return wider


def _tables_of(batch: Batch, lane_pages: Tensor, past_lengths: Tensor, has_mass: Sequence[bool]) -> Batch:
    rows, none = len(lane_pages), torch.empty(0, dtype=torch.int64)
    return Batch(
        pool=batch.pool,
        token_ids=none,
        positions=none,
        rope_lengths=none,
        row_starts=[0, *accumulate([1] * rows)],
        logit_rows=none,
        lane_pages=lane_pages,
        past_lengths=past_lengths,
        has_mass=[*has_mass, *[False] * (rows - len(has_mass))],
    )


class _Step:
    """A graph and the memory that it reads."""

    def __init__(self, bucket: Bucket, hidden: Tensor, batch: Batch, backend: Refilling) -> None:
        tables = torch.zeros(bucket.tables_of(batch), dtype=torch.int32)
        # As long as any of the bucket: as many splits follow from it.
        lengths = torch.full(tables.shape[:-1], bucket.entries - 1, dtype=torch.int64)
        self.batch = _tables_of(batch, tables, lengths, [bucket.has_mass])
        self.hidden = hidden.new_zeros(bucket.rows, hidden.shape[1])
        self.batch.cos = batch.cos.new_zeros(bucket.rows, batch.cos.shape[1])
        self.batch.sin = torch.zeros_like(self.batch.cos)
        self._backend, self._rows = backend, bucket.rows
        backend.plan(self.batch)
        self.graph: Graph | None = None
        self.output = self.hidden

    def fill(self, hidden: Tensor, batch: Batch) -> None:
        """Copy a step to where the graph reads it."""
        count = batch.num_sequences
        for mine, given in ((self.hidden, hidden), (self.batch.cos, batch.cos), (self.batch.sin, batch.sin)):
            mine[:count].copy_(given)
            mine[count:].zero_()
        wider = padded(batch, self._rows)
        # With areas, tables may be wider than the longest lane: an area of one, and a lane of another.
        wider.lane_pages = wider.lane_pages[..., : self.batch.lane_pages.shape[-1]]
        self._backend.refill(self.batch.plan, wider)


class DecodeGraphs:
    """The graphs of one decoder.

    run: what is captured. make: makes a graph that nothing was captured in. num_replayed: steps that were
    replayed.
    """

    def __init__(self, run: Run, backend: Refilling, make: Callable[[], Graph]) -> None:
        self._run, self._backend, self._make = run, backend, make
        self._steps: dict[Bucket, _Step] = {}  # the least recently used first
        self._pool: list[Tensor | None] = []
        self._failed = False
        self.num_replayed = 0

    @property
    def table_bytes(self) -> int:
        """Bytes of the lane tables of all graphs that are kept."""
        return sum(step.batch.lane_pages.nbytes for step in self._steps.values())

    def replay(self, hidden: Tensor, batch: Batch) -> Tensor | None:
        """Hidden states [T, width] of a step, from its embedded rows [T, width], which stay as they are; they
        are the graph's own, until the next step. None if the step is none for a graph, or its tables are too
        large, or where none can be captured: it is then to be computed without."""
        bucket = None if self._failed else bucket_of(batch)
        if bucket is None:
            return None
        self._forget_if_moved(batch)
        step = self._steps.pop(bucket, None)
        if step is None and (step := self._captured(bucket, hidden, batch)) is None:
            return None
        self._steps[bucket] = step
        step.fill(hidden, batch)
        assert step.graph is not None
        step.graph.replay()
        self.num_replayed += 1
        return step.output[: batch.num_rows]

    def _captured(self, bucket: Bucket, hidden: Tensor, batch: Batch) -> _Step | None:
        if not self._make_way(4 * math.prod(bucket.tables_of(batch))):
            return None
        try:
            step = _Step(bucket, hidden, batch, self._backend)
            step.fill(hidden, batch)
            graph = self._make()
            step.output = graph.capture(lambda: self._run(step.hidden, step.batch))
        except RuntimeError as error:
            self._failed = True
            self._steps.clear()
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            _LOG.warning("Decode steps are computed without CUDA graphs from here on: %s.", reason)
            return None
        step.graph = graph
        return step

    def _make_way(self, needed: int) -> bool:
        """See that there is room for a graph with so many bytes of tables; False if there can be none."""
        if needed > MOST_TABLE_BYTES:
            return False
        while len(self._steps) >= MOST_GRAPHS or self.table_bytes + needed > MOST_TABLE_BYTES:
            del self._steps[next(iter(self._steps))]
        return True

    def _forget_if_moved(self, batch: Batch) -> None:
        """Graphs know the pool by its addresses. Lanes that are rewritten change tables and lengths alone."""
        pool = batch.pool
        now = [pool.keys, pool.values, pool.key_scales, pool.value_scales, pool.log_mass, pool.positions]
        if len(self._pool) != len(now) or any(a is not b for a, b in zip(self._pool, now, strict=True)):
            self._steps.clear()
            self._pool = now


class CudaGraphs:
    """Makes graphs of the current CUDA device that share their memory: of one alone is in use at a time."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._aside: Any = None
        self._made: weakref.WeakSet[_CudaGraph] = weakref.WeakSet()

    def __call__(self) -> Graph:
        """A graph that nothing was captured in."""
        if self._aside is None:  # one for all, since matrix products keep a buffer for each stream
            self._aside = torch.cuda.Stream()
        if not self._made:  # torch refuses memory whose graphs are all gone
            self._memory = torch.cuda.graph_pool_handle()
        graph = _CudaGraph(self._memory, self._aside)
        self._made.add(graph)
        return graph


class _CudaGraph:
    def __init__(self, memory: Any, aside: Any) -> None:
        self._graph, self._memory, self._aside = torch.cuda.CUDAGraph(), memory, aside

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        # Once before, on the stream aside: kernels are compiled and libraries make their buffers then.
        current = torch.cuda.current_stream()
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            run()
        current.wait_stream(self._aside)
        # The thread of a cold tier may be waiting for an event meanwhile.
        capturing = torch.cuda.graph(
            self._graph, pool=self._memory, stream=self._aside, capture_error_mode="thread_local"
        )
        try:
            with capturing:
                return run()
        finally:
            torch.cuda.set_stream(current)  # torch leaves the other one current where a capture fails

    def replay(self) -> None:
        self._graph.replay()
