"""Spans with random rows, and ways to damage files, for tests of the tiers."""

from __future__ import annotations

import torch

from minikv.cache.entries import Entries, Stored
from minikv.cache.pool import round_rows
from minikv.cache.tiers.encode import Encoder, turning
from minikv.cache.tiers.span import Owner, Span, owner_key
from minikv.models.config import RopeConfig
from minikv.models.rope import Rope

DIM = 32
ROPE = Rope(RopeConfig(), DIM)
MODEL = b"model".ljust(32)
EXACT = Encoder(MODEL, ROPE)
KV_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


def entries(lengths=(7, 4), dtype=torch.float32, seed=0, rank=None, merged=True) -> Entries:
    """Random entries of lanes; with a rank, keys that lay near so many directions before they were rotated,
    and values that lie near them."""
    random = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    if rank is None:
        keys, values = torch.randn(2, count, DIM, generator=random)
    else:
        near = torch.randn(2, count, rank, generator=random) @ torch.randn(2, rank, DIM, generator=random)
        keys, values = near + 0.01 * torch.randn(2, count, DIM, generator=random)
    positions = torch.cat([torch.randperm(4 * n, generator=random)[:n].sort().values for n in lengths]).int()
    turn = turning(ROPE, positions, list(lengths), 4 * max(lengths))
    keys = torch.cat([turn(rows, lane, False) for lane, rows in enumerate(keys.split(list(lengths)))])
    (keys, key_scales), (values, value_scales) = round_rows(keys, dtype), round_rows(values, dtype)
    counts = torch.randint(1, 4, (count,), generator=random).int() if merged else torch.ones(count).int()
    rows = Stored(keys, values, key_scales, value_scales, counts.float().log(), positions)
    return Entries(rows, counts, torch.tensor(lengths))


def span(name="a", layer=0, encoder=EXACT, **options) -> Span:
    """A span of `entries` that belongs to a name."""
    rows = entries(**options)
    return encoder.encode(rows, Owner(owner_key(name), layer), 4 * int(rows.lengths.max()))


def same(one: Entries, other: Entries) -> bool:
    """Whether two sets of entries are equal bit for bit."""
    pairs = [
        *zip(one.rows, other.rows, strict=True),
        (one.counts, other.counts),
        (one.lengths, other.lengths),
    ]
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in pairs
    )
