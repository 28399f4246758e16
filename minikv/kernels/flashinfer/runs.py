"""FlashInfer's wrappers, planned for requests and used again for as long as the plan holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minikv.kernels.flashinfer.shares import Requests

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for the parts of lanes that it splits. All wrappers use the same, one by one."""

LEAST_PAGES = 4096
"""Pages that a wrapper has room for at least, so that growing lanes seldom want another one."""

MOST_RUNS = 16
"""Wrappers that are kept. Each has 8 MiB on the device and 8 MiB of pinned memory."""


@dataclass(frozen=True)
class Kind:
    """What a wrapper is made for and is always planned with.

    group: query heads of a request, which has one KV head. dtype: of queries, entries and outputs alike.
    """

    decodes: bool
    split: bool
    num_requests: int
    group: int
    head_dim: int
    page_size: int
    dtype: torch.dtype


class Run:
    """One wrapper with the buffers that it reads, in FlashInfer's form for CUDA graphs: what stands in the
    buffers may change without a plan, as long as no request has more or fewer pages or rows."""

    def __init__(self, library: Any, workspace: Tensor, kind: Kind, num_rows: int, num_pages: int):
        self.kind = kind
        self.num_rows, self.num_pages = room_for(num_rows), room_for(max(num_pages, LEAST_PAGES))
        device = workspace.device

        def buffer(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._indices, self._last = buffer(self.num_pages), buffer(kind.num_requests)
        indptr = buffer(kind.num_requests + 1)
        if kind.decodes:
            # Groups of 5 or 7 heads have a kernel only with tensor cores. It is that of chunks as well, and
            # so the only one that has to be compiled.
            self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True,
                paged_kv_indptr_buffer=indptr, paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=self._last, backend="fa2",
            )  # fmt: skip
        else:
            self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=True, qo_indptr_buf=buffer(kind.num_requests + 1),
                paged_kv_indptr_buf=indptr, paged_kv_indices_buf=self._indices,
                paged_kv_last_page_len_buf=self._last, backend="fa2", max_total_num_rows=self.num_rows,
            )  # fmt: skip
        self._key = b""
        self._copied: Any = None
        self._places = torch.empty(0, dtype=torch.int64)

    def holds(self, requests: Requests) -> bool:
        """Whether the plan is for just these numbers of rows and pages."""
        return self._key == _key(requests)

    def prepare(self, requests: Requests, tables: np.ndarray) -> None:
        """Plan for requests unless that is done, and take in where they end. tables: those of the batch,
        [S, kv_heads, P], of a layer that they are of."""
        last = torch.from_numpy(requests.last.astype(np.int32))
        if not self.holds(requests):
            self._plan(requests, tables, last)
        self._last.copy_(last)

    def _plan(self, requests: Requests, tables: np.ndarray, last: Tensor) -> None:
        self._key = b""
        if self._copied is not None:
            # The plan before was copied to the device from memory that is now written again.
            self._copied.synchronize()
        kind, indptr = self.kind, torch.from_numpy(requests.page_starts)
        indices = torch.from_numpy(tables.reshape(-1)[requests.places].astype(np.int32))
        types = {"q_data_type": kind.dtype, "kv_data_type": kind.dtype}
        scale = 1 / math.sqrt(kind.head_dim)
        if kind.decodes:
            self._wrapper.plan(
                indptr, indices, last, kind.group, 1, kind.head_dim, kind.page_size, sm_scale=scale, **types
            )
        else:
            self._wrapper.plan(
                torch.from_numpy(requests.row_starts), indptr, indices, last, kind.group, 1, kind.head_dim,
                kind.page_size, causal=True, sm_scale=scale, disable_split_kv=not kind.split, **types,
            )  # fmt: skip
        device = self._indices.device
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._places = torch.from_numpy(requests.places).to(device)
        self._key = _key(requests)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and natural log-sum-exps of the rows q [n, group, head_dim] of all requests, in order.

        keys, values: [pages, page_size, head_dim]. table: [S * kv_heads * P] int32, the layer's page ids.
        """
        torch.index_select(table, 0, self._places, out=self._indices[: len(self._places)])
        out, lse = self._wrapper.run(q, (keys.unsqueeze(2), values.unsqueeze(2)), return_lse=True)
        return out, lse * math.log(2)


class Runs:
    """The wrappers of one backend, for as many kinds of requests as come."""

    def __init__(self, library: Any, device: torch.device):
        self._library = library
        # To be zero at first, whatever the kernels make of it then.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._runs: list[Run] = []  # the one that was used last at the end

    def take(self, kind: Kind, requests: Requests, busy: list[Run]) -> Run:
        """A run for requests, none of `busy`: if there is one, that is planned for them or has room for them.

        A wrapper serves one set of requests in a step: planned again, it would forget the one before."""
        rows, pages = len(requests.rows), len(requests.places)
        fitting = [
            run
            for run in self._runs
            if run.kind == kind and run.num_rows >= rows and run.num_pages >= pages and run not in busy
        ]
        planned = [run for run in fitting if run.holds(requests)]
        if planned or fitting:
            run = (planned or fitting)[0]
            self._runs.remove(run)
        else:
            idle = [run for run in self._runs if run not in busy]
            for old in idle[: max(0, len(self._runs) + 1 - MOST_RUNS)]:
                self._runs.remove(old)
            run = Run(self._library, self._workspace, kind, rows, pages)
        self._runs.append(run)
        return run


def may_split(num_rows: int, num_requests: int, group: int, head_dim: int) -> bool:
    """Whether the workspace has room for the parts of a chunk's lanes, if FlashInfer splits them: float32
    outputs of its tiles, of 128 query rows at most, of which each request has one that is not full. It has
    no less than fill a device."""
    tiles = max(320, room_for(num_rows) * group // 128 + num_requests)
    return tiles * 128 * (head_dim + 1) * 4 <= WORKSPACE_BYTES


def room_for(count: int) -> int:
    """The least power of two that is no less than `count`."""
    return 1 << max(0, count - 1).bit_length()


def _key(requests: Requests) -> bytes:
    return b"".join(part.tobytes() for part in (requests.counts, requests.pages, requests.places))
