"""Attention over lanes in plain torch: pages are gathered once per layer, then one fused
scaled-dot-product call serves all decoding sequences of a group.

The query heads of a KV head are folded into the query length, so keys and values are read once
per KV head. A prefill chunk is split into its past (no mask needed) and its causal part, merged
by log-sum-exp: that halves the work of one masked call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minikv.kernels.backend import merge
from minikv.kernels.batch import Batch
from minikv.kernels.sdpa import sdpa_with_lse


@dataclass
class _Group:
    """Sequences attended together: padding to the longest lane wastes at most half."""

    rows: Tensor  # [n] int64
    pages: Tensor  # [layers, n, kv_heads, P] int32
    lengths: Tensor  # [n, layers, kv_heads] int64, the new row included
    uniform_length: int | None  # set when no lane needs padding or masses


@dataclass
class _Chunk:
    """One sequence's prefill chunk."""

    sequence: int
    rows: slice
    num_pages: int
    max_past: int
    uniform: bool  # all lanes equally long, no masses


@dataclass
class _Plan:
    groups: list[_Group]
    chunks: list[_Chunk]
    rooms: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def room(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory [2, size] for keys and values, the same for all calls of a pass: the system would map
        and unmap fresh memory every time, which takes longer than filling it."""
        if dtype not in self.rooms or self.rooms[dtype].shape[1] < size:
            self.rooms[dtype] = torch.empty(2, size, dtype=dtype)
        return self.rooms[dtype][:, :size]


class TorchBackend:
    """Plain torch operators on the CPU; computes in the type of the queries, whatever the KV dtype is.

    threads: that layers are compressed by; how many torch has is not seen to here.
    """

    name = "torch"
    page_size = 32
    keys_transposed = False
    slots = None
    entries = None
    device = torch.device("cpu")

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def plan(self, batch: Batch) -> None:
        """Sort the batch into decode groups of similar length and prefill chunks."""
        longest = batch.past_lengths.amax(dim=(1, 2)).tolist()
        shortest = batch.past_lengths.amin(dim=(1, 2)).tolist()
        page = batch.pool.page_size
        decoding: list[int] = []
        chunks = []
        for s in range(batch.num_sequences):
            start, stop = batch.row_starts[s], batch.row_starts[s + 1]
            if stop - start == 1:
                decoding.append(s)
                continue
            uniform = longest[s] == shortest[s] and not batch.has_mass[s]
            chunks.append(_Chunk(s, slice(start, stop), -(-longest[s] // page), longest[s], uniform))
        decoding.sort(key=lambda s: longest[s])
        groups = []
        while decoding:
            # From the longest down: a group ends where a lane would be mostly padding.
            limit = longest[decoding[-1]] // 2
            members = sorted(s for s in decoding if longest[s] >= limit)
            decoding = [s for s in decoding if longest[s] < limit]
            groups.append(_make_group(batch, members))
        batch.plan = _Plan(groups, chunks)

    def rotate_and_write(self, qkv: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionBackend.rotate_and_write`."""
        kv_heads = batch.slots.shape[1]
        head_dim = qkv.shape[-1]
        plain = qkv[:, : qkv.shape[1] - kv_heads]
        rotated = torch.addcmul(
            plain * batch.cos.unsqueeze(1), plain.roll(head_dim // 2, -1), batch.signed_sin.unsqueeze(1)
        )
        q, k = rotated[:, :-kv_heads], rotated[:, -kv_heads:]
        v = qkv[:, -kv_heads:]
        batch.pool.write_rows(batch.slots[layer], k.transpose(0, 1), v.transpose(0, 1))
        return q, batch.pool.rounded(k), batch.pool.rounded(v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attend`."""
        plan: _Plan = batch.plan
        if len(plan.groups) == 1 and not plan.chunks:
            return _decode(q, batch, layer, plan.groups[0])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=q.dtype)
        for group in plan.groups:
            out[group.rows], lse[group.rows] = _decode(q[group.rows], batch, layer, group)
        for chunk in plan.chunks:
            rows = chunk.rows
            new_keys, new_values = k[rows].to(q.dtype), v[rows].to(q.dtype)
            out[rows], lse[rows] = _prefill(q[rows], new_keys, new_values, batch, layer, chunk)
        return out, lse


def _make_group(batch: Batch, members: list[int]) -> _Group:
    sequences = torch.tensor(members)
    lengths = batch.past_lengths[sequences] + 1
    longest, shortest = int(lengths.max()), int(lengths.min())
    uniform = longest == shortest and not any(batch.has_mass[s] for s in members)
    rows = torch.tensor([batch.row_starts[s] for s in members])
    # Chosen here for all layers at once: an indexing step costs as much as a small product.
    num_pages = -(-longest // batch.pool.page_size)
    pages = batch.lane_pages[sequences, :, :, :num_pages].transpose(0, 1).contiguous()
    return _Group(rows, pages, lengths, longest if uniform else None)


def _decode(q: Tensor, batch: Batch, layer: int, group: _Group) -> tuple[Tensor, Tensor]:
    """One query row per sequence. q: [n, query_heads, head_dim]; every lane has an entry."""
    count, query_heads, head_dim = q.shape
    pages = group.pages[layer]
    keys, values = _gather(batch, pages, q.dtype)
    bias = None
    if group.uniform_length is not None:
        keys, values = keys[:, :, : group.uniform_length], values[:, :, : group.uniform_length]
    else:
        bias = _bias(batch, pages, group.lengths[:, layer])
    folded = q.reshape(count, keys.shape[1], -1, head_dim)
    out, lse = sdpa_with_lse(folded, keys, values, bias)
    return out.reshape(count, query_heads, head_dim), lse.reshape(count, query_heads)


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: int, chunk: _Chunk
) -> tuple[Tensor, Tensor]:
    """Rows of one sequence. q: [n, query_heads, head_dim], k, v: [n, kv_heads, head_dim]."""
    rows, query_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = query_heads // kv_heads
    by_head = q.transpose(0, 1)
    repeated = [x.transpose(0, 1).repeat_interleave(group, dim=0).unsqueeze(0) for x in (k, v)]
    out, lse = sdpa_with_lse(by_head.unsqueeze(0).contiguous(), *repeated, causal=True)
    out, lse = out[0], lse[0]
    if chunk.max_past:
        pages = batch.lane_pages[chunk.sequence, layer, :, : chunk.num_pages].unsqueeze(0)
        keys, values = _gather(batch, pages, q.dtype)
        past = batch.past_lengths[chunk.sequence, layer]
        bias = None
        if chunk.uniform:
            keys, values = keys[:, :, : chunk.max_past], values[:, :, : chunk.max_past]
        else:
            bias = _bias(batch, pages, past.unsqueeze(0))
        folded = by_head.reshape(1, kv_heads, group * rows, head_dim)
        past_out, past_lse = sdpa_with_lse(folded, keys, values, bias)
        past_lse = past_lse.masked_fill((past == 0)[None, :, None], -math.inf)
        out, lse = merge(
            out, lse, past_out.reshape(query_heads, rows, head_dim), past_lse.reshape(query_heads, rows)
        )
    return out.transpose(0, 1), lse.transpose(0, 1)


def _gather(batch: Batch, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [n, kv_heads, entries, head_dim] of the pages [n, kv_heads, P], valid until the
    next call of the pass."""
    pool, plan = batch.pool, batch.plan
    shape = (*pages.shape[:2], pages.shape[2] * pool.page_size, pool.head_dim)
    size = math.prod(shape)
    keys, values = pool.read_pages(pages.reshape(-1), plan.room(size, pool.dtype))
    keys, values = keys.view(shape), values.view(shape)
    if keys.dtype == dtype:
        return keys, values
    room = plan.room(size, dtype).view(2, *shape)
    return room[0].copy_(keys), room[1].copy_(values)


def _bias(batch: Batch, pages: Tensor, lengths: Tensor) -> Tensor:
    """Log masses [n, kv_heads, 1, entries] of the pages [n, kv_heads, P], -inf past each lane's end."""
    mass = batch.pool.log_mass.index_select(0, pages.reshape(-1)).view(*pages.shape[:2], -1)
    beyond = torch.arange(mass.shape[-1]) >= lengths.unsqueeze(-1)
    return mass.masked_fill(beyond, -math.inf).unsqueeze(2)
