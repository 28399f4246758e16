"""The pool's entries moved and rewritten by Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.kernels.triton import shapes
from minikv.kernels.triton.moves import copy_entries, put_rounded

if TYPE_CHECKING:
    from minikv.cache.pool import PagePool


def pool_tensors(pool: PagePool) -> list[Tensor]:
    """Keys, values, their scales, log masses and positions. Where there are no scales the log masses stand in
    for them: a kernel wants a pointer even where it reads nothing."""
    key_scales = pool.log_mass if pool.key_scales is None else pool.key_scales
    value_scales = pool.log_mass if pool.value_scales is None else pool.value_scales
    return [pool.keys, pool.values, key_scales, value_scales, pool.log_mass, pool.positions]


class TritonEntries:
    """See `EntryKernels`."""

    def move(self, pool: PagePool, source: Tensor, target: Tensor) -> None:
        """See `EntryKernels.move`. Taken out whole before any is put back, as a target may be a source."""
        aside = _aside(pool, len(source))
        source, target = source.to(pool.device), target.to(pool.device)
        _copy(pool, pool_tensors(pool), aside, source, None)
        _copy(pool, aside, pool_tensors(pool), None, target)

    def replace(self, pool: PagePool, target: Tensor, keys: Tensor, values: Tensor, source: Tensor) -> None:
        """See `EntryKernels.replace`."""
        if not len(target):
            return
        target, keys, values, source = (t.to(pool.device) for t in (target, keys, values, source))
        old = pool_tensors(pool)
        if pool.dtype == torch.int8:
            old = _aside(pool, len(source))
            _copy(pool, pool_tensors(pool), old, source, None)
        put_rounded[(-(-len(target) // shapes.ROWS),)](
            keys.contiguous(), values.contiguous(), *pool_tensors(pool)[:4], *old[:4], target, len(target),
            D=pool.head_dim, PADDED_D=shapes.padded(pool.head_dim), ROWS=shapes.ROWS,
            INT8=pool.dtype == torch.int8,
        )  # fmt: skip


def _aside(pool: PagePool, count: int) -> list[Tensor]:
    """Memory for entries outside the pool."""
    whole = pool_tensors(pool)
    rows = [t.new_empty(count, pool.head_dim) for t in whole[:2]]
    return rows + [t.new_empty(count) for t in whole[2:]]


def _copy(
    pool: PagePool, given: list[Tensor], to: list[Tensor], source: Tensor | None, target: Tensor | None
) -> None:
    index = source if source is not None else target
    assert index is not None
    if not len(index):
        return
    copy_entries[(-(-len(index) // shapes.ROWS),)](
        *given, *to, index, index, len(index),
        D=pool.head_dim, PADDED_D=shapes.padded(pool.head_dim), ROWS=shapes.ROWS,
        BY_SOURCE=source is not None, BY_TARGET=target is not None, INT8=pool.dtype == torch.int8,
    )  # fmt: skip
