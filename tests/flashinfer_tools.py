"""FlashInfer on the CPU: its documented semantics in torch, and its own front end over the same kernels.

The kernels here are written from the documentation and the sources of 0.7.4, in float64. That the backend is
right on them shows that it calls FlashInfer rightly, and nothing about FlashInfer's own kernels.
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from triton_tools import ragged_batch

if not torch.cuda.is_available():
    # It wants to know when it is imported what to compile for, although here nothing is compiled.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")

HALVES = (torch.float16, torch.bfloat16)
# Of other groups there are only kernels with tensor cores.
PLAIN_GROUPS = (1, 2, 3, 4, 6, 8, 16)


def batch_with(rows, lengths, masses=(), **options):
    """A ragged batch in float16. masses: {sequence: how many entries of each lane have one, the first}."""
    options = {"dtype": torch.float16, **options}
    batch = ragged_batch(rows, lengths, masses=False, **options)
    ends = torch.zeros_like(batch.past_lengths)
    generator = torch.Generator().manual_seed(7)
    for s, count in dict(masses).items():
        ends[s] = batch.past_lengths[s].clamp(max=count)
        for layer, head in np.ndindex(*ends.shape[1:]):
            entry = torch.arange(int(ends[s, layer, head]))
            page_size = batch.pool.page_size
            slots = (
                batch.lane_pages[s, layer, head, entry // page_size].long() * page_size + entry % page_size
            )
            mass = torch.rand(len(entry), generator=generator) * 6 - 2
            batch.pool.log_mass.view(-1)[slots.to(batch.pool.device)] = mass.to(batch.pool.device)
    batch.mass_ends, batch.has_mass = ends, ends.flatten(1).any(1).tolist()
    return batch


def check_requests(indptr, indices, last, num_pages, page_size):
    """Fail for what a kernel would read past, or not as it is meant."""
    for numbers in (indptr, indices, last):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous()
    pages = indptr.diff()
    assert int(indptr[0]) == 0 and (pages >= 0).all() and int(indptr[-1]) <= len(indices)
    assert ((last >= 1) & (last <= page_size))[pages > 0].all(), "1 <= last_page_len <= page_size"
    used = indices[: int(indptr[-1])]
    assert ((used >= 0) & (used < num_pages)).all()


def attend(q, keys, values, qo_indptr, indptr, indices, last, out, lse, scale, causal):
    """Paged attention of requests into out [rows, query heads, D] and lse (base 2); NHD pages.

    A request without entries gives 0 and -inf. With more rows than entries the masks of 0.7.4 are wrong, as
    it subtracts the ones from the others without a sign.
    """
    page_size = keys.shape[1]
    assert keys.shape == values.shape and keys.stride() == values.stride() and keys.stride(-1) == 1
    check_requests(indptr, indices, last, len(keys), page_size)
    for r in range(len(last)):
        rows = slice(int(qo_indptr[r]), int(qo_indptr[r + 1]))
        pages = indices[int(indptr[r]) : int(indptr[r + 1])].long()
        if not len(pages):
            out[rows], lse[rows] = 0, -math.inf
            continue
        count = (len(pages) - 1) * page_size + int(last[r])
        k, v = (t[pages].flatten(0, 1)[:count].double() for t in (keys, values))
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("thd,nhd->thn", q[rows].double(), k) * scale
        if causal:
            number = rows.stop - rows.start
            # The last row is that of the last entry.
            assert number <= count, "more rows than entries"
            seen = torch.arange(count) <= count - number + torch.arange(number)[:, None]
            scores = scores.masked_fill(~seen[:, None], -math.inf)
        found = torch.logsumexp(scores, -1)
        out[rows] = torch.einsum("thn,nhd->thd", torch.exp(scores - found[..., None]), v).to(out.dtype)
        lse[rows] = (found / math.log(2)).float()


class _Wrapper:
    """What the two wrappers of the documentation have in common."""

    def _open(self, workspace, layout, graph, backend, indptr, indices, last):
        assert workspace.dtype == torch.uint8 and layout == "NHD" and backend == "fa2"
        assert graph, "without buffers of one's own a plan is for one page table"
        assert len(indptr) == len(last) + 1
        self.indptr, self.indices, self.last = indptr, indices, last

    def _take(self, indptr, indices, last, heads, page_size, dtypes, scale):
        assert all(t.device.type == "cpu" for t in (indptr, indices, last)), "it would wait for the device"
        assert len(last) == len(self.last), "the number of requests is fixed"
        assert len(indices) <= len(self.indices), "more pages than there is room for"
        assert dtypes[0] == dtypes[1] and dtypes[0] in HALVES
        check_requests(indptr, indices, last, 1 << 30, page_size)
        self.indptr.copy_(indptr)
        self.indices[: len(indices)].copy_(indices)
        self.last.copy_(last)
        self.planned = indptr.clone()
        self.heads, self.page_size, self.dtype, self.scale = heads, page_size, dtypes[0], scale

    def _attend(self, q, cache, qo_indptr, causal, return_lse):
        keys, values = cache
        assert torch.equal(self.indptr, self.planned), "pages were added since the plan"
        assert q.dtype == keys.dtype == values.dtype == self.dtype
        assert q.shape[1] == self.heads[0] and keys.shape[1:3] == (self.page_size, self.heads[1])
        assert len(q) == int(qo_indptr[-1]) and q.stride(-1) == 1
        out, lse = torch.full(q.shape, math.nan, dtype=q.dtype), torch.full(q.shape[:2], math.nan)
        scale = self.scale or 1 / math.sqrt(q.shape[-1])
        attend(q, keys, values, qo_indptr, self.indptr, self.indices, self.last, out, lse, scale, causal)
        return (out, lse) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One row for each request."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):  # fmt: skip
        self.tensor_cores = use_tensor_cores
        self._open(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend,
            paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer,
        )  # fmt: skip

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        if not self.tensor_cores and num_qo_heads // num_kv_heads not in PLAIN_GROUPS:
            raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
        heads, types = (num_qo_heads, num_kv_heads), (q_data_type, kv_data_type)
        self._take(indptr, indices, last_page_len, heads, page_size, types, sm_scale)

    def run(self, q, paged_kv_cache, *, return_lse=False):
        return self._attend(q, paged_kv_cache, torch.arange(len(self.last) + 1), False, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of rows for each request."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
        backend="auto", max_total_num_rows=None,
    ):  # fmt: skip
        self.qo_indptr, self.most_rows = qo_indptr_buf, max_total_num_rows
        self._open(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend,
            paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf,
        )  # fmt: skip

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, *, causal=False, sm_scale=None, q_data_type="float16",
        kv_data_type=None, disable_split_kv=False,
    ):  # fmt: skip
        assert int(qo_indptr[-1]) <= self.most_rows, "more rows than there is room for"
        self.qo_indptr.copy_(qo_indptr)
        self.causal = causal
        heads, types = (num_qo_heads, num_kv_heads), (q_data_type, kv_data_type)
        self._take(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads, page_size, types, sm_scale
        )

    def run(self, q, paged_kv_cache, *, return_lse=False):
        return self._attend(q, paged_kv_cache, self.qo_indptr, self.causal, return_lse)


def documented():
    """The two wrappers as they are documented, in the place of the module."""
    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    )


class Kernels:
    """In the place of a compiled module: what the installed package's wrappers call."""

    planned: ClassVar[list] = []

    def plan(self, *given):
        """Of the plan only the row and page counts that it is for are kept."""
        self.planned.append((given[3].clone(), given[4].clone()))
        return [len(self.planned) - 1]

    def paged_run(self, *given):
        info, q, keys, values = given[2:6]
        qo_indptr, indptr, indices, last, out, lse, mask_mode, layout = given[6:14]
        rows, pages = self.planned[info[0]]
        assert torch.equal(qo_indptr, rows.int()) and torch.equal(indptr, pages)
        assert layout == 0 and mask_mode in (0, 1), "NHD, causal or not"
        assert q.dtype == keys.dtype and q.stride(-1) == 1
        attend(q, keys, values, qo_indptr, indptr, indices, last, out, lse, given[25], mask_mode == 1)

    ragged_run = paged_run


def installed(monkeypatch):
    """The installed package with `Kernels` for what it would compile; skips where it is not installed."""
    pytest.importorskip("flashinfer", reason="flashinfer is not installed (pip install 'minikv[flashinfer]')")
    import flashinfer
    from flashinfer.jit import core

    monkeypatch.setattr(core.JitSpec, "build_and_load", lambda self, *_, **__: Kernels())
    monkeypatch.setattr(Kernels, "planned", [])
    empty = torch.empty

    def pageable(*sizes, **options):
        options.pop("pin_memory", None)
        return empty(*sizes, **options)

    # Memory is not pinned where there is no device.
    monkeypatch.setattr(torch, "empty", pageable)
    flashinfer.prefill.get_batch_prefill_module.cache_clear()
    return flashinfer


class Recording:
    """A module of wrappers whose calls are listed: (class, method, arguments, named arguments).

    faults: {method: (number, error)}, what the call of a method with that number raises, the first being 0.
    """

    def __init__(self, library, faults=()):
        self.library, self.calls, self.faults = library, [], dict(faults)

    def __getattr__(self, name):
        def construct(*given, **named):
            self.calls.append((name, "__init__", given, named))
            return _Recorded(self, name, getattr(self.library, name)(*given, **named))

        return construct

    def count(self, method):
        """How often a method was called, of whatever wrapper."""
        return sum(called == method for _, called, _, _ in self.calls)


class _Recorded:
    def __init__(self, recording, name, wrapper):
        self.recording, self.name, self.wrapper = recording, name, wrapper

    def __getattr__(self, method):
        def call(*given, **named):
            number = self.recording.count(method)
            self.recording.calls.append((self.name, method, given, named))
            failing, error = self.recording.faults.get(method, (None, None))
            if number == failing:
                raise error
            return getattr(self.wrapper, method)(*given, **named)

        return call
