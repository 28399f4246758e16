"""Ragged lanes for the tests of the Triton kernels.

They run in Triton's interpreter on the CPU, and those of test_gpu.py on the device.
"""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch

from minikv.cache.pool import PagePool
from minikv.kernels.batch import Batch
from minikv.kernels.reference import ReferenceBackend
from minikv.kernels.triton.probe import interpreted

pytest.importorskip("triton", reason="triton is not installed (pip install 'minikv[triton]')")
if not interpreted() and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET is off, and there is no CUDA device", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreted() else "cuda")
INTERPRETED_ONLY = pytest.mark.skipif(DEVICE.type == "cuda", reason="for Triton's interpreter")
HEAD_DIMS = (64, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
LAYERS = 2

# The interpreter cuts a float32 off where a device rounds it to bfloat16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.int8: 1e-5, torch.bfloat16: 2e-2}
if DEVICE.type == "cuda":
    # Exponentials are approximate there, and a rotated key may round to the neighbouring number.
    TOLERANCE = {torch.float32: 1e-3, torch.float16: 4e-3, torch.int8: 2e-2, torch.bfloat16: 2e-2}


def poison(pool: PagePool) -> None:
    """Make every number of the pool one that spoils what it touches."""
    for tensor in (pool.keys, pool.values, pool.key_scales, pool.value_scales, pool.log_mass):
        if tensor is not None:
            tensor.fill_(math.nan if tensor.is_floating_point() else 77)


def ragged_batch(
    rows: list[int],
    lengths: list[list[int]],
    *,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    masses: bool = True,
    seed: int = 0,
) -> Batch:
    """Sequences with `rows[s]` new rows over lanes of lengths[s][kv_head] entries; layer 1 has those of the
    other heads. Pages lie anywhere, and everything that nobody wrote is NaN, page 0 and the places of the
    new rows too."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.tensor(lengths)
    past = torch.stack((one, one.flip(1)), dim=1)
    needed = -(-(past + torch.tensor(rows)[:, None, None]) // page_size)
    total = int(needed.sum())
    pool = PagePool(total + 5, page_size, head_dim, dtype, device=DEVICE)
    poison(pool)
    held = torch.arange(int(needed.max())) < needed.unsqueeze(-1)
    pages = torch.zeros(held.shape, dtype=torch.int32)
    pages[held] = (1 + torch.randperm(total + 5, generator=generator)[:total]).to(torch.int32)
    starts = [0, *accumulate(rows)]
    positions = torch.arange(starts[-1])
    angles = torch.rand(starts[-1], head_dim // 2, generator=generator) * 6
    batch = Batch(
        pool,
        torch.zeros_like(positions),
        positions,
        positions,
        starts,
        positions[:0],
        pages,
        past,
        [masses and any(lanes) for lanes in lengths],
        torch.cat([angles.cos()] * 2, -1),
        torch.cat([angles.sin()] * 2, -1),
    )
    _fill(batch, masses, generator)
    pool.write_entries(batch.slots, positions)
    return batch


def _fill(batch: Batch, masses: bool, generator: torch.Generator) -> None:
    entry = torch.arange(int(batch.past_lengths.max()))
    slots = batch.lane_pages[..., entry // batch.pool.page_size].long() * batch.pool.page_size
    slots = (slots + entry % batch.pool.page_size)[entry < batch.past_lengths.unsqueeze(-1)]
    noise = torch.randn(2, len(slots), batch.pool.head_dim, generator=generator)
    batch.pool.write_rows(slots, noise[0], noise[1])
    mass = torch.rand(len(slots), generator=generator) * 4 if masses else 0.0
    batch.pool.write_entries(slots, torch.arange(len(slots)), mass)


def random_rows(batch: Batch, group: int, seed: int = 1) -> torch.Tensor:
    """Queries, keys and values [T, heads, head_dim] of a batch's new rows, not yet rotated."""
    heads = batch.lane_pages.shape[2] * (group + 2)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.num_rows, heads, batch.pool.head_dim, generator=generator)


def run(backend, batch: Batch, qkv: torch.Tensor, layer: int = 0):
    """Queries as rotated, outputs and log-sum-exps of one layer."""
    backend.plan(batch)
    cos, sin = batch.cos, batch.sin
    batch.cos, batch.sin = cos.to(backend.device), sin.to(backend.device)
    q, k, v = backend.rotate_and_write(qkv.to(backend.device), batch, layer)
    out, lse = backend.attend(q, k, v, batch, layer)
    return q.cpu(), out.cpu(), lse.cpu()


def check(backend, batch: Batch, group: int, layer: int = 1, qkv: torch.Tensor | None = None) -> None:
    """Fail unless a backend rotates, writes and attends as the reference does."""
    qkv = random_rows(batch, group) if qkv is None else qkv
    tolerance = TOLERANCE[batch.pool.dtype] if qkv.dtype == torch.float32 else 1e-2
    # First, as the reference writes the new rows to the same slots.
    result = run(backend, batch, qkv, layer)
    written = batch.pool.read_rows(batch.slots[layer])
    expected = run(ReferenceBackend(), batch, qkv.float(), layer)
    expected_rows = batch.pool.read_rows(batch.slots[layer])
    for got, wanted in zip((*result, *written), (*expected, *expected_rows), strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance, rtol=tolerance)


def check_small(backend) -> None:
    """Some of every kind: one row, few and many, several splits, masses, scales, odd lengths and groups."""
    lengths = [[0, 17], [300, 31], [5, 64], [40, 0]]
    check(backend, ragged_batch([1, 1, 9, 23], lengths), 3)
    check(backend, ragged_batch([1, 1, 9, 66], lengths, dtype=torch.int8, head_dim=96), 3)
