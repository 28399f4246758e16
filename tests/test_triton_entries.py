"""Entries moved and rewritten by Triton kernels, interpreted, as the pool does it in torch."""

from __future__ import annotations

import pytest
import torch
from triton_tools import HEAD_DIMS, INTERPRETED_ONLY, ragged_batch

from minikv.cache.pool import PagePool
from minikv.kernels.triton.entries import TritonEntries

pytestmark = INTERPRETED_ONLY

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


def twins(dtype, head_dim=64):
    """Two pools with the same random entries, one of which has the kernels, and slots that are filled."""
    pools = []
    for kernels in (None, TritonEntries()):
        batch = ragged_batch([1, 1], [[40, 0], [30, 35]], dtype=dtype, head_dim=head_dim)
        batch.pool.write_rows(batch.slots[:], *torch.zeros(2, *batch.slots.shape, head_dim))
        batch.pool.positions.copy_(torch.arange(batch.pool.positions.numel()).view_as(batch.pool.positions))
        batch.pool.kernels = kernels
        pools.append(batch.pool)
    filled = torch.nonzero(~torch.isnan(pools[0].log_mass.view(-1)))[:, 0]
    return pools[0], pools[1], filled


def same_bits(one: PagePool, other: PagePool) -> None:
    for name in ("keys", "values", "key_scales", "value_scales", "log_mass", "positions"):
        a, b = getattr(one, name), getattr(other, name)
        if a is not None:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 60])
def test_entries_move_bit_for_bit(dtype, head_dim, count):
    plain, ours, filled = twins(dtype, head_dim)
    order = torch.randperm(len(filled), generator=torch.Generator().manual_seed(count))
    source = filled[order[:count]].sort().values
    target = filled[:count]  # overlaps the sources, as when a lane is compacted in place
    for pool in (plain, ours):
        pool.move_rows(source, target)
    same_bits(plain, ours)


@pytest.mark.parametrize("dtype", DTYPES)
def test_targets_may_be_sources_in_any_order(dtype):
    plain, ours, filled = twins(dtype)
    for pool in (plain, ours):
        pool.move_rows(filled, filled.flip(0))
    same_bits(plain, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_replaced_rows_are_rounded_and_equal_ones_keep_their_bits(dtype, head_dim):
    plain, ours, filled = twins(dtype, head_dim)
    source = filled[3:40]
    target = filled[: len(source)]
    keys, values = plain.read_rows(source)
    keys, values = keys.float(), values.float()
    noise = torch.randn(2, len(source), head_dim, generator=torch.Generator().manual_seed(0))
    keys[::3] = noise[0][::3]
    values[1::3] = noise[1][1::3]
    values[4] = 0.0
    for pool in (plain, ours):
        pool.replace_rows(target, keys, values, source)
    same_bits(plain, ours)


def test_bfloat16_rows_that_stay_keep_their_bits():
    """Others are cut off by the interpreter where a device rounds them."""
    plain, ours, filled = twins(torch.bfloat16)
    keys, values = plain.read_rows(filled[3:40])
    for pool in (plain, ours):
        pool.replace_rows(filled[:37], keys.float(), values.float(), filled[3:40])
    same_bits(plain, ours)


def test_nothing_to_move_or_replace_is_no_launch():
    plain, ours, _ = twins(torch.int8)
    none, rows = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 64)
    ours.move_rows(none, none)
    ours.replace_rows(none, rows, rows, none)
    same_bits(plain, ours)
