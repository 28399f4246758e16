"""Codes of keys: exact in every KV dtype, in the basis whose scores err least, and cells of spans."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minikv.cache.pool import PagePool
from minikv.cache.spans.codes import (
    LEVELS,
    Basis,
    basis_entries,
    basis_of,
    cell_of,
    cells_of,
    centres,
    digits_of,
    first_of,
    pack,
    rounded,
    unpack,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low_rank(tokens, width=64, rank=12, heads=2, seed=0):
    """Keys that differ in few directions, with a mean, and queries that look at few of these."""
    directions = drawn(heads, rank, width, seed=seed)
    sizes = 0.6 ** torch.arange(rank)
    keys = drawn(heads, tokens, rank, seed=seed + 1) * sizes @ directions + 3 * drawn(
        heads, 1, width, seed=seed + 2
    )
    return keys, drawn(heads, 32, width, seed=seed + 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_come_back_from_a_pool_as_they_were_written(dtype, transposed):
    pool = PagePool(4, 32, 64, dtype, keys_transposed=transposed)
    digits = digits_of(dtype)
    codes = torch.randint(
        0, LEVELS, (100, cells_of(dtype), 16), generator=torch.Generator().manual_seed(3)
    ).float()
    codes[0] = 0
    codes[1] = LEVELS - 1
    slots = torch.arange(100)
    pool.write_rows(slots, *pack(codes, digits).chunk(2, dim=-1))
    assert torch.equal(unpack(torch.cat(pool.read_rows(slots), dim=-1), digits), codes)


@pytest.mark.parametrize("width", [16, 64, 80, 96, 128])
def test_an_entry_holds_a_code_for_each_quarter_of_its_keys_numbers(width):
    codes = torch.randint(0, LEVELS, (3, 24, width // 4)).float()
    numbers = pack(codes, 3)
    assert numbers.shape == (3, 2 * width) and numbers.abs().max() <= 2048
    assert torch.equal(unpack(numbers, 3), codes)


@given(st.integers(1, 300), st.sampled_from([8, 16, 24]))
def test_cells_part_a_span_into_runs_as_even_as_can_be(tokens, cells):
    count = torch.tensor(tokens)
    first = first_of(torch.arange(cells + 1), count, cells)
    sizes = first.diff()
    assert int(first[0]) == 0 and int(first[-1]) == tokens and int(sizes.min()) >= 0
    used = sizes[sizes > 0]
    assert len(used) == min(tokens, cells) and int(used.max() - used.min()) <= 1
    of = cell_of(torch.arange(tokens), count, cells)
    assert torch.equal(of, torch.arange(cells).repeat_interleave(sizes))


def estimated(basis, keys, queries):
    codes = rounded(basis.levels(keys))
    kept = basis.mean.float()[:, None] + centres(codes) @ basis.decoder.float()
    return queries @ kept.transpose(1, 2)


def test_scores_of_coded_keys_are_near_the_true_ones():
    keys, queries = low_rank(400)
    basis = basis_of(keys, torch.ones(2, 400, dtype=torch.bool), queries)
    true = queries @ keys.transpose(1, 2)
    error = (estimated(basis, keys, queries) - true).square().mean()
    assert error < 0.01 * true.var()
    # New keys and new queries of the same kind.
    fresh, asking = low_rank(100)[0], drawn(2, 32, 64, seed=9)
    true = asking @ fresh.transpose(1, 2)
    assert (estimated(basis, fresh, asking) - true).square().mean() < 0.02 * true.var()


def test_the_basis_is_that_of_the_queries_that_are_asked():
    """Of directions in which keys differ alike, those stay that queries look at."""
    keys, some = drawn(1, 500, 64), torch.ones(1, 500, dtype=torch.bool)
    wanted = torch.zeros(64)
    wanted[40:50] = 1
    queries = drawn(1, 64, 64, seed=5) * (wanted + 0.01)
    plain = drawn(1, 64, 64, seed=6)
    true = queries @ keys.transpose(1, 2)

    def error(basis):
        return float((estimated(basis, keys, queries) - true).square().mean() / true.var())

    assert error(basis_of(keys, some, queries)) < 0.02
    assert error(basis_of(keys, some, plain)) > 0.3


def test_entries_that_do_not_count_change_no_basis():
    keys, queries = low_rank(60)
    some = torch.arange(60).expand(2, -1) < 50
    other = keys.clone()
    other[:, 50:] = 1e4
    for one, two in zip(
        vars(basis_of(keys, some, queries)).values(),
        vars(basis_of(other, some, queries)).values(),
        strict=True,
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("width", [8, 16, 64, 96])
def test_a_basis_is_the_same_from_its_packed_form_and_fits_its_entries(width):
    basis = basis_of(drawn(3, 40, width), torch.ones(3, 40, dtype=torch.bool), drawn(3, 9, width, seed=1))
    back = Basis.unpacked(basis.packed())
    assert all(torch.equal(getattr(basis, name), getattr(back, name)) for name in vars(basis))
    rows = basis.rows()
    assert rows.shape == (3, basis_entries(width), 2 * width)
    numbers = rows.unflatten(-1, (2, -1)).flatten(1, 2)
    assert torch.equal(numbers[:, 0], basis.mean.float())
    assert torch.equal(numbers[:, 1 : 1 + width // 4], basis.decoder.float())


def test_keys_that_are_all_alike_and_queries_of_nothing_give_finite_numbers():
    for keys, queries in (
        (torch.full((1, 20, 16), 2.5), drawn(1, 8, 16)),
        (drawn(1, 20, 16), torch.zeros(1, 8, 16)),
        (drawn(1, 1, 16), drawn(1, 1, 16)),
    ):
        some = torch.ones(keys.shape[:2], dtype=torch.bool)
        basis = basis_of(keys, some, queries)
        assert all(bool(part.isfinite().all()) for part in vars(basis).values())
        assert bool(rounded(basis.levels(keys)).isfinite().all())
