"""The compiled backend: attention straight from pages, and whole decoder layers in one call."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minikv.errors import ConfigError
from minikv.kernels.batch import Batch
from minikv.kernels.cpu.library import (
    BatchStruct,
    LayerStruct,
    LibraryMissing,
    LooksStruct,
    ModelStruct,
    PoolStruct,
    SlotsStruct,
    instruction_sets,
    load_library,
)
from minikv.kernels.cpu.pack import PackedMatrix
from minikv.kernels.cpu.slots import CompiledSlots
from minikv.kernels.cpu.stage import CompiledStaging
from minikv.kernels.cpu.zoom import CompiledRouting

if TYPE_CHECKING:
    from minikv.cache.pool import PagePool

PAGE_SIZE = 32
LARGEST_HEAD_DIM = 256
_KV_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


def why_unusable(head_dim: int, page_size: int | None) -> str | None:
    """Why the compiled kernels cannot serve a model, as a clause; None if they can."""
    try:
        load_library()
    except LibraryMissing as error:
        return str(error)
    if head_dim % 16 or head_dim > LARGEST_HEAD_DIM:
        return f"their head_dim is a multiple of 16 up to {LARGEST_HEAD_DIM}, not {head_dim}"
    if page_size not in (None, PAGE_SIZE):
        return f"their pages have {PAGE_SIZE} entries, not {page_size}"
    return None


@dataclass
class _Plan:
    """The batch as the library sees it, and the tensors its pointers lead to."""

    batch: BatchStruct
    pool: PoolStruct
    kept: list[Tensor]


class CpuBackend:
    """Kernels compiled from C++, chosen for this processor at load.

    threads: size of the thread team. isa: an instruction set by name, None for the best one.
    A backend serves one engine at a time. Raises LibraryMissing when the library was not built,
    ConfigError when the system refuses so many threads.
    """

    name = "cpu"
    page_size = PAGE_SIZE
    keys_transposed = True
    entries = None
    device = torch.device("cpu")

    def __init__(self, threads: int, isa: str | None = None):
        self.library = load_library()
        known = instruction_sets(self.library)
        self.isa = isa or known[0]
        if self.isa not in known:
            raise ValueError(f"this processor has no {self.isa}")
        self.threads = threads
        self._pool: tuple[PagePool, PoolStruct] | None = None
        self.context = self.library.mkv_create(threads, self.isa.encode())
        if not self.context:
            raise ConfigError(f"The system could not start {threads} threads; ask for fewer.")
        self._finalizer = weakref.finalize(self, self.library.mkv_destroy, self.context)
        # At the end of the process another thread may still be inside a call; the system cleans up.
        self._finalizer.atexit = False

    def plan(self, batch: Batch) -> None:
        """Point the library's structures at the batch's tensors."""
        # By way of numpy: torch.tensor takes ten times as long for a list of a few numbers.
        starts = torch.from_numpy(np.array(batch.row_starts))
        pages = batch.lane_pages.to(torch.int32).contiguous()
        positions = batch.positions.contiguous()
        masses = torch.from_numpy(np.array(batch.has_mass, dtype=np.uint8))
        kept = [starts, pages, batch.past_lengths, masses, positions, batch.cos, batch.sin]
        pointers: list[int | None] = [t.data_ptr() for t in kept]
        pointers.append(positions.data_ptr() if batch.angles_by_position else None)
        captures = 0
        if batch.capture_rows is not None:
            assert batch.captured is not None and batch.captured_norms is not None
            captures = len(batch.capture_rows)
            place = torch.full((batch.num_rows,), -1, dtype=torch.int32)
            place[batch.capture_rows] = torch.arange(captures, dtype=torch.int32)
            into = [place, batch.captured, batch.captured_norms]
            kept += into
            pointers += [t.data_ptr() for t in into]
        else:
            pointers += [None] * 3
        struct = BatchStruct(batch.num_rows, batch.num_sequences, pages.shape[-1], captures, *pointers)
        batch.plan = _Plan(struct, self._pool_struct(batch.pool), kept)

    def rotate_and_write(self, qkv: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionBackend.rotate_and_write`; rotates `qkv` in place."""
        kv_heads = batch.lane_pages.shape[2]
        qkv = qkv.contiguous()
        model = self._heads(qkv, batch)
        plan: _Plan = batch.plan
        _check(self.library.mkv_write(self.context, model, plan.pool, plan.batch, qkv.data_ptr(), layer))
        queries = qkv.shape[1] - 2 * kv_heads
        q, k, v = qkv.split([queries, kv_heads, kv_heads], dim=1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attend`; keys and values are read from the pool, where they are rounded."""
        qkv = torch.cat((q, k, v), dim=1)
        model = self._heads(qkv, batch)
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2])
        plan: _Plan = batch.plan
        status = self.library.mkv_attend(
            self.context, model, plan.pool, plan.batch, qkv.data_ptr(), out.data_ptr(), lse.data_ptr(), layer
        )
        _check(status)
        return out, lse

    def linear(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """x [rows, inputs] times the packed matrix: [rows, outputs] float32."""
        x = x.contiguous()
        y = x.new_empty(len(x), matrix.outputs)
        _check(self.library.mkv_linear(self.context, matrix.struct, x.data_ptr(), len(x), y.data_ptr()))
        return y

    def logits(
        self, head: PackedMatrix, hidden: Tensor, rows: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Rows [n] int64 of hidden [T, hidden], normalised and times the head: [n, vocab] float32; and
        the likeliest token of each, [n] int32, -1 where a logit is not finite."""
        count = rows.shape[0]
        out = torch.empty(count, head.outputs)
        likeliest = torch.empty(count, dtype=torch.int32)
        _check(
            self.library.mkv_logits(
                self.context,
                head.struct,
                hidden.data_ptr(),
                rows.data_ptr(),
                count,
                norm.data_ptr(),
                eps,
                out.data_ptr(),
                likeliest.data_ptr(),
            )
        )
        return out, likeliest

    def layers(self, model: ModelStruct, batch: Batch, hidden: Tensor, first: int, last: int) -> None:
        """Run the decoder layers [first, last) over hidden [T, hidden] float32, in place."""
        plan: _Plan = batch.plan
        set_up: list[CompiledRouting | CompiledStaging] = []
        if batch.route is not None:
            set_up.append(CompiledRouting(batch.route, plan.batch))
        if batch.stages:
            set_up.append(CompiledStaging(batch.stages, plan.batch))
        status = self.library.mkv_layers(
            self.context, model, plan.pool, plan.batch, hidden.data_ptr(), first, last
        )
        _check(status)
        for part in set_up:
            part.finish()

    def zoom(self, q: Tensor, batch: Batch, layer: int) -> None:
        """Zoom in and out as `layers` does between writing and attending, for rotated queries
        [T, query_heads, head_dim] float32."""
        assert batch.route is not None
        width = batch.lane_pages.shape[2]
        qkv = torch.cat((q, q.new_zeros(len(q), 2 * width, q.shape[2])), dim=1)
        plan: _Plan = batch.plan
        routing = CompiledRouting(batch.route, plan.batch)
        model = self._heads(qkv, batch)
        _check(self.library.mkv_zoom(self.context, model, plan.pool, plan.batch, qkv.data_ptr(), layer))
        routing.fetch(layer)
        routing.finish()

    @property
    def slots(self) -> CompiledSlots:
        """See `AttentionBackend.slots`."""
        return CompiledSlots(self)

    def run_slots(self, what: SlotsStruct | LooksStruct, single: bool = False) -> None:
        """Fill in what the structure's last pointers lead to; single: on the calling thread, whatever else
        the backend is used for at the time."""
        run = self.library.mkv_slots if isinstance(what, SlotsStruct) else self.library.mkv_look
        if not single:
            _check(run(self.context, what))
            return
        context = self.library.mkv_create(1, self.isa.encode())
        _check(0 if context else 1)
        try:
            _check(run(context, what))
        finally:
            self.library.mkv_destroy(context)

    def _pool_struct(self, pool: PagePool) -> PoolStruct:
        # A pool's tensors stay where they are, and an engine has one pool.
        if self._pool is None or self._pool[0] is not pool:
            self._pool = (pool, pool_struct(pool))
        return self._pool[1]

    def _heads(self, qkv: Tensor, batch: Batch) -> ModelStruct:
        layers, kv_heads = batch.lane_pages.shape[1:3]
        none = ctypes.POINTER(LayerStruct)()
        return ModelStruct(0, 0, qkv.shape[1] - 2 * kv_heads, kv_heads, qkv.shape[2], layers, 0.0, none)


def _check(status: int) -> None:
    """`Status` in api.cpp."""
    if status:
        raise MemoryError("the compiled kernels found no memory for their buffers")


def pool_struct(pool: PagePool) -> PoolStruct:
    """The page pool as the library sees it."""
    scales = [t.data_ptr() if t is not None else None for t in (pool.key_scales, pool.value_scales)]
    return PoolStruct(
        _KV_KINDS[pool.dtype],
        pool.keys.data_ptr(),
        pool.values.data_ptr(),
        *scales,
        pool.log_mass.data_ptr(),
        pool.positions.data_ptr(),
    )
