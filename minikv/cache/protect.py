"""Entries that stay whatever a policy says: sinks, recent ones and pinned ranges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.cache.ceiling import Ceiling
from minikv.config import CacheConfig
from minikv.sizes import format_size

Ranges = Sequence[tuple[int, int]]


def protect(positions: Tensor, lengths: Tensor, cache: CacheConfig, pinned: Ranges, capacity: int) -> Tensor:
    """Entries that stay whatever their scores: [layers, kv_heads, n] bool, at most `capacity` per lane
    beside pinned ones; recent entries give way before sinks."""
    valid = positions >= 0
    place = torch.arange(positions.shape[-1])
    held = torch.zeros_like(valid)
    for start, end in pinned:
        held |= (positions >= start) & (positions < end)
    longest = positions.shape[-1]
    sinks, recent = min(cache.sinks, longest), min(cache.recent, longest)
    while True:
        ends = (place < sinks) | (place >= lengths[..., None] - recent)
        mask = (held | ends) & valid
        excess = int(mask.sum(dim=-1).max()) - capacity
        if excess <= 0 or not (recent or sinks):
            return mask
        if recent:
            recent = max(0, recent - excess)
        else:
            sinks = max(0, sinks - excess)


def pinned_too_much(count: int, ceiling: Ceiling) -> str:
    """That pinned entries alone pass a budget in bytes, and what would be enough."""
    least = -(-(count + 1) // ceiling.page_size) * ceiling.num_lanes * ceiling.page_bytes
    return (
        f"The {count} tokens that are pinned do not fit a budget of "
        f"{format_size(ceiling.max_pages * ceiling.page_bytes)}; it must be at least {format_size(least)}."
    )
