"""The FlashInfer backend: its kernels where lanes have no log masses, and Triton's for everything else."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minikv.kernels.backend import CPU, merge
from minikv.kernels.batch import Batch
from minikv.kernels.flashinfer.probe import HEAD_DIMS
from minikv.kernels.flashinfer.runs import Kind, Run, Runs, may_split
from minikv.kernels.flashinfer.shares import Share, divide
from minikv.kernels.triton.backend import Plan, TritonBackend

if TYPE_CHECKING:
    from minikv.cache.pool import PagePool

DTYPES = (torch.float16, torch.bfloat16)

_SHORTAGES = (MemoryError, torch.OutOfMemoryError)
"""Errors that say nothing about FlashInfer: the step is lost, and the next may have room."""

_LOG = logging.getLogger(__name__)


@dataclass
class _Part:
    """A share of a batch, planned; of each layer. rows: a range of [T * kv_heads], or a list of them."""

    share: Share
    runs: list[Run]
    rows: list[slice | Tensor]


@dataclass
class _Plan(Plan):
    """`members` are Triton's part. FlashInfer's `parts` are planned when the first queries are there."""

    by_layer: Tensor  # [layers, S * kv_heads * P] int32, the tables
    shares: list[Share]
    parts: list[_Part] | None = None


class FlashInferBackend(TritonBackend):
    """FlashInfer's attention, in the 16 bits of the KV dtype.

    Triton's kernels write rows, move entries, and attend whatever FlashInfer does not take. library: the
    module flashinfer.
    """

    name = "flashinfer"

    def __init__(self, library: Any, device: torch.device = CPU, threads: int = 1):
        super().__init__(device, threads)
        self._runs = Runs(library, device)
        self._said: set[str] = set()
        self._broken = False

    def plan(self, batch: Batch) -> None:
        """Divide the lanes between FlashInfer and Triton."""
        why = _why_not(batch.pool)
        if self._broken or why is not None:
            self._leave_to_triton(batch, why)
            return
        division = divide(batch)
        if not division.shares:
            super().plan(batch)
            return
        limits = torch.from_numpy(division.limits)
        plan = self.plan_of(batch, division.triton, division.begun, limits)
        by_layer = plan.tables.transpose(0, 1).reshape(plan.tables.shape[1], -1)
        batch.plan = _Plan(**vars(plan), by_layer=by_layer, shares=division.shares)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attend`; keys and values are read from the pool, where they are rounded."""
        if isinstance(batch.plan, _Plan) and batch.plan.parts is None:
            self._plan_parts(batch, q)
        out, lse = super().attend(q, k, v, batch, layer)
        if not isinstance(batch.plan, _Plan):
            return out, lse
        try:
            for part in batch.plan.parts or ():
                _attend_part(part, q, out, lse, batch, layer)
        except _SHORTAGES:
            raise
        except Exception as error:
            # Some rows have Triton's results of the beginnings of lanes alone: all are attended again.
            self._give_up(batch, "run", error)
            return super().attend(q, k, v, batch, layer)
        return out, lse

    def _plan_parts(self, batch: Batch, q: Tensor) -> None:
        """Plan FlashInfer's part of a batch for such queries, or leave all of the batch to Triton."""
        if q.dtype not in DTYPES:
            self._leave_to_triton(batch, f"it takes queries in float16 or bfloat16, not {_named(q.dtype)}")
            return
        plan: _Plan = batch.plan
        busy: list[Run] = []
        try:
            plan.parts = [self._part(batch, share, q, busy) for share in plan.shares]
        except _SHORTAGES:
            raise
        except Exception as error:
            # Kernels are compiled here the first time, of which many things can come.
            self._give_up(batch, "plan", error)

    def _part(self, batch: Batch, share: Share, q: Tensor, busy: list[Run]) -> _Part:
        pool, tables, runs = batch.pool, batch.lane_pages.numpy(), []
        group, num_requests = q.shape[1] // tables.shape[2], len(share.requests[0].pages)
        most_rows = max(len(requests.rows) for requests in share.requests)
        split = share.split and may_split(most_rows, num_requests, group, pool.head_dim)
        kind = Kind(share.decodes, split, num_requests, group, pool.head_dim, pool.page_size, pool.dtype)
        for index, requests in enumerate(share.requests):
            run = self._runs.take(kind, requests, busy)
            busy.append(run)
            run.prepare(requests, tables[:, share.by_layer.index(index)])
            runs.append(run)
        rows = [self._rows(requests.rows) for requests in share.requests]
        return _Part(
            share, [runs[index] for index in share.by_layer], [rows[index] for index in share.by_layer]
        )

    def _rows(self, rows: np.ndarray) -> slice | Tensor:
        first = int(rows[0])
        if np.array_equal(rows, np.arange(first, first + len(rows))):
            return slice(first, first + len(rows))
        return torch.from_numpy(rows).to(self.device)

    def _give_up(self, batch: Batch, failed: str, error: Exception) -> None:
        """Leave the rest of a batch, and all that come, to Triton."""
        self._broken = True
        first = (str(error).splitlines() or ["no message"])[0]
        self._leave_to_triton(batch, f"it cannot {failed} ({type(error).__name__}: {first})")

    def _leave_to_triton(self, batch: Batch, why: str | None) -> None:
        if why is not None and why not in self._said:
            self._said.add(why)
            _LOG.warning("FlashInfer is not used, because %s; Triton's kernels are.", why)
        super().plan(batch)


def _why_not(pool: PagePool) -> str | None:
    """Why no lane of a pool can be FlashInfer's, or None."""
    if pool.dtype not in DTYPES:
        return f"it reads a KV cache in float16 or bfloat16, not {_named(pool.dtype)}"
    if pool.head_dim not in HEAD_DIMS:
        return f"its head sizes are {', '.join(map(str, HEAD_DIMS))}, not {pool.head_dim}"
    return None


def _attend_part(part: _Part, q: Tensor, out: Tensor, lse: Tensor, batch: Batch, layer: int) -> None:
    """Fill in the rows of one part of out and lse, which have Triton's results of lanes that both read."""
    plan, pool = batch.plan, batch.pool
    shape = (len(q) * plan.kv_heads, q.shape[1] // plan.kv_heads, q.shape[2])
    rows = part.rows[layer]
    queries = q.to(pool.dtype).reshape(shape)[rows]
    got, got_lse = part.runs[layer].attend(queries, pool.keys, pool.values, plan.by_layer[layer])
    outs, lses = out.view(shape), lse.view(shape[:2])
    if part.share.joined:
        got, got_lse = merge(outs[rows].float(), lses[rows], got.float(), got_lse)
    outs[rows] = got.to(out.dtype)
    lses[rows] = got_lse


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
