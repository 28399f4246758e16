"""The oracle: attention over lanes written as plainly as possible, in float64.

Loops over sequences and KV heads; every other backend must agree with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minikv.kernels.batch import Batch


class ReferenceBackend:
    """Slow and exact. Usable as an engine backend, to tell a kernel's fault from a model's."""

    name = "reference"
    page_size = 32
    keys_transposed = False
    slots = None
    threads = 1
    entries = None
    device = torch.device("cpu")

    def plan(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def rotate_and_write(self, qkv: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionBackend.rotate_and_write`."""
        kv_heads = batch.slots.shape[1]
        rotated = rotate(qkv[:, : qkv.shape[1] - kv_heads], batch.cos, batch.sin)
        q, k = rotated[:, :-kv_heads], rotated[:, -kv_heads:]
        v = qkv[:, -kv_heads:]
        batch.pool.write_rows(batch.slots[layer], k.transpose(0, 1), v.transpose(0, 1))
        return q, batch.pool.rounded(k), batch.pool.rounded(v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attend`."""
        out = torch.zeros(q.shape, dtype=torch.float64)
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
        group = q.shape[1] // k.shape[1]
        for s in range(batch.num_sequences):
            rows = slice(batch.row_starts[s], batch.row_starts[s + 1])
            for head in range(k.shape[1]):
                heads = slice(head * group, (head + 1) * group)
                keys, values, mass = _lane(batch, s, layer, head)
                keys = torch.cat((keys, k[rows, head].double()))
                values = torch.cat((values, v[rows, head].double()))
                count = k[rows].shape[0]
                mass = torch.cat((mass, torch.zeros(count, dtype=torch.float64)))
                scores = torch.einsum("tgd,nd->tgn", q[rows, heads].double(), keys) / math.sqrt(q.shape[-1])
                seen = torch.ones(count, len(keys), dtype=torch.bool).tril(len(keys) - count)
                scores = (scores + mass).masked_fill(~seen[:, None], -math.inf)
                out[rows, heads] = torch.softmax(scores, dim=-1) @ values
                lse[rows, heads] = torch.logsumexp(scores, dim=-1)
        return out.to(q.dtype), lse.to(q.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by cos, sin [T, head_dim]; pair i is (i, i + head_dim / 2)."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half].to(x.dtype), sin[:, None, :half].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _lane(batch: Batch, sequence: int, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [n, head_dim], values [n, head_dim] and log masses [n] of a lane before the pass."""
    length = int(batch.past_lengths[sequence, layer, head])
    entry = torch.arange(length)
    page_size = batch.pool.page_size
    slots = batch.lane_pages[sequence, layer, head, entry // page_size] * page_size + entry % page_size
    keys, values = batch.pool.read_rows(slots)
    log_mass, _ = batch.pool.masses_and_positions(slots)
    return keys.double(), values.double(), log_mass.double()
