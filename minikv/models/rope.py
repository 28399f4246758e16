"""Rotary position embedding: positions to cos and sin, and the half-split rotation.

Frequencies follow transformers. Tables are float32; the angle is too, so that a token gets the
same bits whatever else is in its batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minikv.models.config import RopeConfig

# Positions whose tables are kept: at head_dim 128 they take 16 MB.
_TABLE_ROWS = 1 << 14


class Rope:
    """cos and sin of one model's rotary embedding, with the yarn attention factor folded in.

    Rows of positions below `_TABLE_ROWS` are kept in a table that grows with use; others, and all of
    the dynamic type, are computed on demand.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        assert head_dim % 2 == 0
        self.config = rope
        self.head_dim = head_dim
        self.inv_freq = inverse_frequencies(rope, head_dim)
        self.attention_factor = attention_factor(rope)
        self._table = self._rows(torch.zeros(0, dtype=torch.int64), self.inv_freq)

    def cos_sin(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tables for `positions` [T] int64: cos, sin [T, head_dim] float32.

        `lengths` [T] matters for the dynamic type only: the sequence length that each token's
        frequencies are computed for. None takes position + 1.
        """
        if self.config.kind == "dynamic":
            inv_freq = self._dynamic_frequencies(positions + 1 if lengths is None else lengths)
            return self._rows(positions, inv_freq)
        table = self.table(int(positions.max()) if positions.shape[0] else 0)
        if table is None:
            return self._rows(positions, self.inv_freq.to(positions.device))
        cos, sin = table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def table(self, last: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin [rows, head_dim] of all positions up to `last` at least; None where no table is
        kept: for far positions and for the dynamic type."""
        if last >= _TABLE_ROWS or self.config.kind == "dynamic":
            return None
        if last >= self._table[0].shape[0]:
            rows = torch.arange(max(1024, 1 << last.bit_length()))
            self._table = self._rows(rows, self.inv_freq)
        return self._table

    def _rows(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.to(torch.float32)[:, None] * inv_freq).double()
        # float64 here: the float32 routines differ in the last bit between vector lanes and tail.
        cos, sin = angles.cos().float(), angles.sin().float()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def _dynamic_frequencies(self, lengths: Tensor) -> Tensor:
        """[T, head_dim / 2]: the base grows with each row's length past the original context."""
        rope, dim = self.config, self.head_dim
        assert rope.original_context is not None
        stretch = lengths.double().clamp(min=rope.original_context) / rope.original_context
        base = rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (dim / (dim - 2))
        return (base[:, None] ** -_exponents(dim).to(lengths.device).double()).float()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotary pair: [head_dim / 2] float32 (dynamic: unstretched)."""
    plain = 1.0 / (rope.theta ** _exponents(head_dim))
    if rope.frequency_factors is not None:
        return plain / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(plain, rope)
    if rope.kind == "yarn":
        return _yarn_frequencies(plain, rope, head_dim)
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """The factor on cos and sin: 1 except for yarn, where it grows with the log of the scale."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim)
    return yarn_scale(rope.factor, 1.0)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3_frequencies(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    assert rope.original_context is not None
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    keep = ((rope.original_context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn_frequencies(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn fast over the original context are kept, slow ones interpolated."""
    assert rope.original_context is not None
    context, base = rope.original_context, math.log(rope.theta)

    def pair_with(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * base)

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def yarn_scale(factor: float, mscale: float) -> float:
    """The growth of attention with the context's scale that yarn compensates for."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
