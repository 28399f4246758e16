"""Keys of prototypes: means of keys as they were before they were rotated, rotated to where they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minikv.models.rope import Rope


def table(rope: Rope, num_tokens: int) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim] of all positions that entries may have, at the present length."""
    known = rope.table(num_tokens - 1)
    if known is not None:
        return known
    positions = torch.arange(num_tokens)
    return rope.cos_sin(positions, torch.full_like(positions, num_tokens))


def rotated(rope: Rope, rows: Tensor, positions: Tensor, num_tokens: int, back: bool = False) -> Tensor:
    """Rows [kv_heads, n, head_dim] turned to positions [kv_heads, n], or turned back from there.

    Dynamic RoPE is taken as it stands at the present length.
    """
    if bool((positions == positions[:1]).all()):
        positions = positions[:1]
    flat = positions.reshape(-1)
    cos, sin = rope.cos_sin(flat, torch.full_like(flat, num_tokens))
    half = rows.shape[-1] // 2
    cos, sin = (table[:, :half].view(*positions.shape, half) for table in (cos, sin))
    if back and rope.attention_factor != 1:  # cos and sin carry yarn's factor
        cos, sin = (table / rope.attention_factor**2 for table in (cos, sin))
    first, second = rows[..., :half], rows[..., half:]
    out = torch.empty_like(rows)
    sign = -1 if back else 1
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out


def unrotated(rope: Rope, keys: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Keys [kv_heads, n, head_dim] as they were before they were turned to positions [kv_heads, n]."""
    return rotated(rope, keys, positions.clamp(min=0), num_tokens, back=True)
