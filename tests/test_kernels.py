"""Each backend against the reference on random ragged lanes."""

from __future__ import annotations

import math

import pytest
import torch

from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool
from minikv.kernels.backend import merge
from minikv.kernels.batch import Batch
from minikv.kernels.reference import ReferenceBackend
from minikv.kernels.sdpa import plain_sdpa_with_lse, sdpa_with_lse
from minikv.kernels.torch_cpu import TorchBackend


def random_batch(
    rows,
    lengths,
    *,
    kv_heads,
    head_dim=16,
    masses=True,
    dtype=torch.float32,
    page_size=4,
    seed=0,
    keys_transposed=False,
):
    """A batch of len(rows) sequences with `rows[s]` new rows over lanes of up to `lengths[s]` entries,
    every KV head of another length when there are masses."""
    generator = torch.Generator().manual_seed(seed)
    pool = PagePool(4000, page_size, head_dim, dtype, True, keys_transposed)
    store = LaneStore(pool, len(rows), 1, kv_heads, 600)
    seqs = []
    for s, length in enumerate(lengths):
        seq = store.open()
        assert store.reserve(seq, length)
        if length:
            filled = torch.from_numpy(store.next_slots(seq, length))
            noise = torch.randn(2, *filled[0].shape, head_dim, generator=generator)
            pool.write_rows(filled[0], noise[0], noise[1])
            mass = torch.rand(filled.shape, generator=generator) * 3 if masses else 0.0
            pool.write_entries(filled, torch.arange(length), mass)
            store.append(seq, length)
        if masses and length:
            keep = torch.arange(length) < torch.randint(0, length + 1, (1, kv_heads, 1), generator=generator)
            store.rewrite(seq, keep)
            store.has_mass[seq] = True
        assert store.reserve(seq, rows[s])
        seqs.append(seq)
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    positions = torch.arange(starts[-1])
    angles = torch.rand(starts[-1], head_dim // 2, generator=generator) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    pages = torch.from_numpy(store.pages[seqs].astype("int64"))
    lanes = torch.from_numpy(store.lengths[seqs].astype("int64"))
    batch = Batch(
        pool, torch.zeros_like(positions), positions, positions, starts, positions[:0],
        pages, lanes, store.has_mass[seqs].tolist(), cos, sin,
    )  # fmt: skip
    pool.write_entries(batch.slots, positions)
    return batch


def run(backend, batch, qkv):
    backend.plan(batch)
    q, k, v = backend.rotate_and_write(qkv, batch, 0)
    return backend.attend(q, k, v, batch, 0)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("masses", [False, True])
def test_torch_backend_equals_reference_on_ragged_lanes(group, masses):
    rows, lengths = [1, 1, 7, 1, 2, 40, 1], [33, 0, 50, 300, 0, 9, 8]
    batch = random_batch(rows, lengths, kv_heads=3, masses=masses, seed=group)
    qkv = torch.randn(sum(rows), 3 * group + 6, 16, generator=torch.Generator().manual_seed(1))
    expected, expected_lse = run(ReferenceBackend(), batch, qkv)
    out, lse = run(TorchBackend(), batch, qkv)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("masses", [False, True])
def test_queries_in_float64_are_attended_to_in_float64(masses, dtype):
    rows, lengths = [1, 1, 7, 1, 2, 40, 1], [33, 0, 50, 300, 0, 9, 8]
    batch = random_batch(rows, lengths, kv_heads=3, masses=masses, dtype=dtype)
    backend = TorchBackend()
    backend.plan(batch)
    q, k, v = (x.double() for x in backend.rotate_and_write(torch.randn(sum(rows), 12, 16), batch, 0))
    torch.testing.assert_close(
        backend.attend(q, k, v, batch, 0),
        ReferenceBackend().attend(q, k, v, batch, 0),
        atol=1e-13,
        rtol=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_sixteen_bit_pools_give_what_their_rounded_rows_give(dtype, head_dim):
    rows, lengths = [1, 1, 6], [20, 70, 33]
    batch = random_batch(rows, lengths, kv_heads=2, head_dim=head_dim, dtype=dtype)
    qkv = torch.randn(sum(rows), 8, head_dim)
    expected, expected_lse = run(ReferenceBackend(), batch, qkv)
    out, lse = run(TorchBackend(), batch, qkv)
    # The rotation sums in another order, so that a key may round to the neighbouring number.
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance)


def test_a_chunk_row_sees_the_past_and_the_rows_before_it_only():
    batch = random_batch([5], [6], kv_heads=1, masses=False)
    qkv = torch.randn(5, 3, 16)
    before, _ = run(TorchBackend(), batch, qkv)
    changed = qkv.clone()
    changed[3:] = torch.randn(2, 3, 16)
    after, _ = run(TorchBackend(), batch, changed)
    torch.testing.assert_close(after[:3], before[:3])
    assert not torch.allclose(after[3:], before[3:])


def test_log_mass_counts_an_entry_as_often_as_it_stands_for():
    """Five equal tokens and one entry of mass five attend alike."""
    generator = torch.Generator().manual_seed(0)
    q, key, other = torch.randn(3, 1, 1, 4, 16, generator=generator)
    value, rest = torch.randn(2, 1, 1, 1, 16, generator=generator)
    key, other = key[:, :, :1], other[:, :, :1]
    tokens = sdpa_with_lse(q, torch.cat([key] * 5 + [other], 2), torch.cat([value] * 5 + [rest], 2))
    bias = torch.tensor([math.log(5), 0.0]).view(1, 1, 1, 2)
    merged = sdpa_with_lse(q, torch.cat([key, other], 2), torch.cat([value, rest], 2), bias)
    torch.testing.assert_close(merged, tokens)


def test_merging_partial_results_equals_attending_to_everything():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 30, 16, generator=generator)
    whole, whole_lse = sdpa_with_lse(q, k, v)
    left = sdpa_with_lse(q, k[:, :, :11], v[:, :, :11])
    right = sdpa_with_lse(q, k[:, :, 11:], v[:, :, 11:])
    out, lse = merge(*left, *right)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_merging_with_an_empty_set_changes_nothing():
    out, lse = torch.randn(4, 8), torch.randn(4)
    empty, minus_infinity = torch.zeros(4, 8), torch.full((4,), -math.inf)
    for merged in (merge(out, lse, empty, minus_infinity), merge(empty, minus_infinity, out, lse)):
        torch.testing.assert_close(merged, (out, lse))
    both, both_lse = merge(empty, minus_infinity, empty, minus_infinity)
    assert not both.any() and torch.isneginf(both_lse).all()


@pytest.mark.parametrize("causal", [False, True])
def test_plain_operators_give_what_the_fused_one_gives(causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 30, 16, generator=generator)
    bias = None
    if not causal:
        bias = torch.randn(2, 3, 1, 30, generator=generator)
        bias[..., 20:] = -math.inf
        bias[1, 2] = -math.inf
    fused, plain = sdpa_with_lse(q, k, v, bias, causal), plain_sdpa_with_lse(q, k, v, bias, causal)
    torch.testing.assert_close(plain, fused)
