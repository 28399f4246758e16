"""The Triton kernels for rows and attention, interpreted, against the reference."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from triton_tools import DEVICE, GROUPS, HEAD_DIMS, check, check_small, ragged_batch, random_rows, run

from minikv.kernels.reference import ReferenceBackend
from minikv.kernels.triton import shapes
from minikv.kernels.triton.backend import TritonBackend


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_and_group_equals_the_reference(head_dim, group):
    page_size = shapes.PAGE_SIZES[(group + HEAD_DIMS.index(head_dim)) % 2]
    lengths = [[page_size, 3], [page_size - 1, 0], [0, page_size + 1]]
    batch = ragged_batch([1, 5, 1], lengths, head_dim=head_dim, page_size=page_size, seed=group)
    check(TritonBackend(DEVICE), batch, group)


@pytest.mark.parametrize("masses", [False, True])
@pytest.mark.parametrize("page_size", shapes.PAGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_every_kv_type_equals_the_reference(dtype, page_size, masses):
    lengths = [[33, 0], [20, 70], [0, 257]]
    batch = ragged_batch([1, 6, 1], lengths, dtype=dtype, page_size=page_size, masses=masses)
    check(TritonBackend(DEVICE), batch, 3)


@pytest.mark.parametrize("queries", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_queries_in_sixteen_bits_are_taken(queries, dtype):
    batch = ragged_batch([1, 6, 1], [[33, 0], [20, 70], [0, 130]], dtype=dtype, head_dim=128)
    # Rows that both types hold, so that only the arithmetic differs.
    qkv = random_rows(batch, 4).to(torch.bfloat16).to(queries)
    result = run(TritonBackend(DEVICE), batch, qkv)
    expected = run(ReferenceBackend(), batch, qkv.float())
    for got, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(got.float(), wanted, atol=4e-2, rtol=4e-2)
    assert result[1].dtype == queries and result[2].dtype == torch.float32


def around(*sizes: int) -> list[int]:
    return [size + off for size in sizes for off in (-1, 0, 1)]


def test_decoding_at_the_edges_of_pages_blocks_and_splits():
    shape = shapes.decode_shape(64, 2, False)
    totals = around(16, shape.entries, shapes.SPLIT, shapes.SPLIT + shape.entries, 2 * shapes.SPLIT)
    batch = ragged_batch([1] * len(totals), [[total - 1] for total in totals])
    check(TritonBackend(DEVICE), batch, 2)


def test_more_splits_than_are_merged_at_once():
    batch = ragged_batch([1, 1], [[shapes.SPLIT * shapes.MERGED + 1], [shapes.SPLIT * shapes.MERGED - 1]])
    check(TritonBackend(DEVICE), batch, 1)


@pytest.mark.parametrize("few", [True, False])
def test_chunks_at_the_edges_of_tiles_pages_and_blocks(few, monkeypatch):
    monkeypatch.setattr(shapes, "FEW_ROWS", 64 if few else 1)
    shape = shapes.chunk_shape(64, False)
    for group in (2, 3):
        counts = around(shape.rows // group)
        lengths = [[0, shape.entries], [shape.entries - count for count in counts[:2]], [17, 15]]
        check(TritonBackend(DEVICE), ragged_batch(counts, lengths, page_size=16 * (group - 1)), group)


def test_few_rows_at_the_edges_of_splits(monkeypatch):
    monkeypatch.setattr(shapes, "CHUNK_SPLIT", 64)
    totals = around(64, 128)
    batch = ragged_batch([2, 3, 2, 5, 2, 3], [[total - 2] for total in totals])
    check(TritonBackend(DEVICE), batch, 2)


def test_few_and_many_rows_are_told_apart_by_their_number():
    few = shapes.FEW_ROWS
    check(TritonBackend(DEVICE), ragged_batch([few, few + 1, 1], [[9], [0], [3]]), 1)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_entries_of_no_mass_do_not_count(rows):
    """Whole blocks of them come before the first that does."""
    batch = ragged_batch([rows], [[150, 70]])
    mass = batch.pool.log_mass
    slots = batch.lane_pages.long().flatten().to(mass.device)
    mass[slots] = torch.where(torch.isnan(mass[slots]), mass[slots], -math.inf)
    batch.pool.write_entries(batch.slots, batch.positions)
    batch.has_mass = [True]
    check(TritonBackend(DEVICE), batch, 2)


def test_a_sequence_gets_the_same_bits_alone_and_in_company():
    rows, lengths = [1, 4, 1, 7], [[300, 5], [20, 31], [7, 90], [0, 64]]
    batch = ragged_batch(rows, lengths)
    qkv = random_rows(batch, 3)
    _, together, _ = run(TritonBackend(DEVICE), batch, qkv)
    for s, start in enumerate(batch.row_starts[:-1]):
        stop = batch.row_starts[s + 1]
        alone = ragged_batch([rows[s]], [lengths[s]])
        alone.pool = batch.pool
        alone.lane_pages, alone.past_lengths = batch.lane_pages[s : s + 1], batch.past_lengths[s : s + 1]
        alone.cos, alone.sin = batch.cos[start:stop], batch.sin[start:stop]
        alone.has_mass = batch.has_mass[s : s + 1]
        alone.__dict__.pop("slots", None)
        _, out, _ = run(TritonBackend(DEVICE), alone, qkv[start:stop])
        assert torch.equal(out, together[start:stop])


def test_new_rows_one_by_one_or_as_a_chunk_are_alike():
    batch = ragged_batch([5], [[30, 17]])
    qkv = random_rows(batch, 2)
    _, whole, whole_lse = run(TritonBackend(DEVICE), batch, qkv)
    for row in range(5):
        step = ragged_batch([1], [[0, 0]])
        step.pool, step.lane_pages, step.has_mass = batch.pool, batch.lane_pages, batch.has_mass
        step.past_lengths = batch.past_lengths + row
        step.cos, step.sin = batch.cos[row : row + 1], batch.sin[row : row + 1]
        step.__dict__.pop("slots", None)
        _, out, lse = run(TritonBackend(DEVICE), step, qkv[row : row + 1])
        torch.testing.assert_close(out[0], whole[row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[0], whole_lse[row], atol=1e-5, rtol=1e-5)


def test_of_limited_lanes_the_first_entries_are_attended():
    """Limits below, at and above what the lanes held before, for one row, few and many; one lane has none."""
    rows, lengths = [1, 6, 70, 1], [[300, 20], [40, 16], [90, 3], [600, 33]]
    limits = [[288, 16], [48, 16], [96, 0], [272, 40]]
    batch = ragged_batch(rows, lengths)
    limit = torch.tensor([[one, one[::-1]] for one in limits])
    backend = TritonBackend(DEVICE)
    qkv = random_rows(batch, 3)
    q, _, _ = run(backend, batch, qkv, 1)
    batch.plan = backend.plan_of(batch, np.arange(2), np.arange(4)[2:], limit)
    out, lse = (t.cpu() for t in backend.attend(q.to(DEVICE), q, q, batch, 1))
    for s, (start, stop) in enumerate(pairwise(batch.row_starts)):
        for head in range(2):
            heads = slice(head * 3, head * 3 + 3)
            length = lengths[s][1 - head]
            bound = int(limit[s, 1, head]) if s >= 2 else length + rows[s]
            entries = torch.arange(min(bound, length + rows[s]))
            slots = batch.lane_pages[s, 1, head, entries // 16].long() * 16 + entries % 16
            keys, values = batch.pool.read_rows(slots)
            mass, _ = batch.pool.masses_and_positions(slots)
            scores = torch.einsum("tgd,nd->tgn", q[start:stop, heads], keys) / 8 + mass
            seen = entries <= length + torch.arange(rows[s])[:, None]
            scores = scores.masked_fill(~seen[:, None], -math.inf)
            expected = torch.softmax(scores, -1).nan_to_num() @ values
            torch.testing.assert_close(out[start:stop, heads], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[start:stop, heads], scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_the_small_check_passes():
    """What the deliberate faults of test_triton_mutations are found by."""
    check_small(TritonBackend(DEVICE))
