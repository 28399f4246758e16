"""The Triton backend: attention straight from pages, on a CUDA device or interpreted on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minikv.kernels.backend import CPU
from minikv.kernels.batch import Batch
from minikv.kernels.triton import shapes
from minikv.kernels.triton.attend import attend_lanes, merge_splits
from minikv.kernels.triton.entries import TritonEntries, pool_tensors
from minikv.kernels.triton.language import tl
from minikv.kernels.triton.probe import interpreted
from minikv.kernels.triton.rows import rotate_and_write

_DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass
class Members:
    """Sequences whose new rows are attended alike. The tensors are int32."""

    sequences: Tensor  # [n]
    starts: Tensor  # [n], the first row of each
    counts: Tensor  # [n], and how many it has
    parts: Tensor  # [n], rows of those before it
    max_count: int
    max_length: int  # entries that are read of the longest lane, new ones included
    limited: bool  # whether no more is read of a lane than the plan's limits say
    has_mass: bool
    split: int  # entries that a program takes; 0: all
    row_sequences: Tensor  # [rows], whose each row is,
    rows: Tensor  # [rows], where in the batch,
    ordinals: Tensor  # [rows], and which of its sequence

    @property
    def max_splits(self) -> int:
        return -(-self.max_length // self.split) if self.split else 1


@dataclass
class Plan:
    """What the kernels read of a batch, and whose rows are attended here."""

    tables: Tensor  # [S, layers, kv_heads, P] int32
    past_lengths: Tensor  # [S, layers, kv_heads] int32
    limits: Tensor  # [S, layers, kv_heads] int32, how many of a lane's first entries are read
    slots: Tensor  # [layers, kv_heads, T] int64
    members: list[Members]

    @property
    def kv_heads(self) -> int:
        return self.tables.shape[2]


class TritonBackend:
    """Kernels in Triton. Sums are taken in float32, products of queries and keys in the KV dtype if that has
    16 bits and the queries have no more."""

    name = "triton"
    page_size = 16
    keys_transposed = False
    slots = None

    def __init__(self, device: torch.device = CPU, threads: int = 1) -> None:
        self.device = device
        self.threads = threads
        self.entries = TritonEntries()

    def plan(self, batch: Batch) -> None:
        """Tables and ranges of rows where the kernels can read them."""
        batch.plan = self.plan_of(batch, np.arange(batch.num_sequences))

    def plan_of(
        self,
        batch: Batch,
        sequences: np.ndarray,
        begun: np.ndarray | None = None,
        limits: Tensor | None = None,
    ) -> Plan:
        """Tables of the whole batch, to attend the rows of `sequences` [n], and those of `begun` [m] over the
        first `limits` [S, layers, kv_heads] entries of their lanes."""

        def there(numbers: Tensor) -> Tensor:
            return numbers.to(self.device, torch.int32).contiguous()

        past, members = there(batch.past_lengths), self._kinds(batch, sequences, None)
        if begun is not None:
            members += self._kinds(batch, begun, limits)
        bounds = past if limits is None else there(limits)
        return Plan(there(batch.lane_pages), past, bounds, batch.slots.to(self.device), members)

    def _kinds(self, batch: Batch, sequences: np.ndarray, limits: Tensor | None) -> list[Members]:
        counts = np.diff(batch.row_starts)[sequences]
        kinds = [
            (counts == 1, shapes.SPLIT),
            ((counts > 1) & (counts <= shapes.FEW_ROWS), shapes.CHUNK_SPLIT),
            (counts > shapes.FEW_ROWS, 0),
        ]
        return [
            self._members(batch, sequences[which], split, limits) for which, split in kinds if which.any()
        ]

    def _members(self, batch: Batch, sequences: np.ndarray, split: int, limits: Tensor | None) -> Members:
        starts = np.array(batch.row_starts)
        starts, counts = starts[sequences], np.diff(starts)[sequences]
        parts = np.cumsum(counts) - counts
        ordinals = np.arange(counts.sum()) - np.repeat(parts, counts)
        read = batch.past_lengths.numpy()[sequences] + counts[:, None, None]
        if limits is not None:
            read = np.minimum(read, limits.numpy()[sequences])

        def there(numbers: np.ndarray) -> Tensor:
            return torch.from_numpy(numbers.astype(np.int32)).to(self.device)

        return Members(
            *map(there, (sequences, starts, counts, parts)),
            max_count=int(counts.max()),
            max_length=int(read.max()),
            limited=limits is not None,
            has_mass=any(batch.has_mass[s] for s in sequences),
            split=split,
            row_sequences=there(np.repeat(sequences, counts)),
            rows=there(np.repeat(starts, counts) + ordinals),
            ordinals=there(ordinals),
        )

    def rotate_and_write(self, qkv: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionBackend.rotate_and_write`."""
        plan: Plan = batch.plan
        qkv = qkv.contiguous()
        num_rows, heads, head_dim = qkv.shape
        kv_heads = plan.kv_heads
        query_heads = heads - 2 * kv_heads
        out = torch.empty_like(qkv)
        rotate_and_write[(-(-num_rows // shapes.ROWS), heads)](
            qkv, batch.cos, batch.sin, plan.slots[layer], out, *pool_tensors(batch.pool)[:4], num_rows,
            QUERY_HEADS=query_heads, KV_HEADS=kv_heads, D=head_dim, PADDED_HALF=shapes.padded(head_dim // 2),
            ROWS=shapes.ROWS, INT8=batch.pool.dtype == torch.int8,
        )  # fmt: skip
        q, k, v = out.split([query_heads, kv_heads, kv_heads], dim=1)
        return q, k, v

    def refill(self, plan: Any, batch: Batch) -> None:
        """Put tables, lengths and slots of a batch in the place of a plan's, in the plan's memory; see
        `minikv.models.graphs.Refilling`. What was in wider tables stays, past the end of every lane."""
        plan.tables[..., : batch.lane_pages.shape[-1]].copy_(batch.lane_pages)
        plan.past_lengths.copy_(batch.past_lengths)
        plan.slots.copy_(batch.slots)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attend`; keys and values are read from the pool, where they are rounded."""
        plan: Plan = batch.plan
        if q.stride()[1:] != (q.shape[2], 1):
            q = q.contiguous()
        out = q.new_empty(q.shape)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for members in plan.members:
            if members.split:
                self._attend_split(q, batch, layer, members, out, lse)
            else:
                self._attend_lanes(q, batch, layer, members, out, lse)
        return out, lse

    def _attend_split(
        self, q: Tensor, batch: Batch, layer: int, members: Members, out: Tensor, lse: Tensor
    ) -> None:
        plan, (query_heads, head_dim) = batch.plan, q.shape[1:]
        parts = (len(members.rows), query_heads, members.max_splits)
        split_out = torch.empty(*parts, head_dim, dtype=torch.float32, device=q.device)
        split_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
        self._attend_lanes(q, batch, layer, members, split_out, split_lse)
        merge_splits[(len(members.rows), query_heads)](
            split_out, split_lse, plan.past_lengths, plan.limits,
            members.row_sequences, members.rows, members.ordinals,
            out, lse, layer, plan.tables.shape[1], members.max_splits,
            KV_HEADS=plan.kv_heads, GROUP=query_heads // plan.kv_heads, D=head_dim,
            PADDED_D=shapes.padded(head_dim), SPLIT=members.split, LIMITED=members.limited,
            AT_ONCE=shapes.MERGED,
        )  # fmt: skip

    def _attend_lanes(
        self, q: Tensor, batch: Batch, layer: int, members: Members, out: Tensor, lse: Tensor
    ) -> None:
        plan, (query_heads, head_dim) = batch.plan, q.shape[1:]
        group, int8 = query_heads // plan.kv_heads, batch.pool.dtype == torch.int8
        shape = shapes.chunk_shape(head_dim, int8)
        if _dot_dtype(q.dtype, batch.pool.dtype) == torch.float32 and not interpreted():
            shape = shapes.float32_shape(group)
        elif members.max_count == 1:
            shape = shapes.decode_shape(head_dim, group, int8)
        tiles = -(-members.max_count * group // shape.rows)
        attend_lanes[(tiles, len(members.sequences) * plan.kv_heads, members.max_splits)](
            q, *pool_tensors(batch.pool)[:5], plan.tables, plan.past_lengths, plan.limits,
            members.sequences, members.starts, members.counts, members.parts, out, lse,
            _scale(head_dim), layer, *plan.tables.shape[1::2], members.max_splits, q.stride(0),
            KV_HEADS=plan.kv_heads, GROUP=group, ROWS=shape.rows,
            D=head_dim, PADDED_D=shapes.padded(head_dim), PAGE=batch.pool.page_size, ENTRIES=shape.entries,
            SPLIT=members.split, LIMITED=members.limited, HAS_MASS=members.has_mass,
            INT8=int8, DOT=_DOT_TYPES[_dot_dtype(q.dtype, batch.pool.dtype)],
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip


def _scale(head_dim: int) -> float:
    """What makes a product of a query and a key a score in base 2."""
    return 1 / (math.log(2) * math.sqrt(head_dim))


def _dot_dtype(queries: torch.dtype, pool: torch.dtype) -> torch.dtype:
    """The type that numbers are multiplied in; sums are float32."""
    dtype = pool if queries.itemsize == pool.itemsize == 2 else queries
    # The interpreter holds a bfloat16 as a 16-bit integer, and would multiply those.
    return torch.float32 if dtype == torch.bfloat16 and interpreted() else dtype
