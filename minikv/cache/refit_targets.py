"""What a refit aims at: the attention and output of full lanes on reference queries."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView, Rows

_JUDGING = 4  # one query in so many judges
_JUDGE = 2  # which of them: neither the first nor the last of a short window
_BLOCK_LOGITS = 1 << 19
# Not -inf: the difference of two of them is a number.
_UNSEEN = torch.finfo(torch.float32).min / 4


@dataclass(frozen=True)
class References:
    """Reference queries of every lane.

    queries: [kv_heads, r, head_dim], rotated; at: [r] int64, they see positions up to this one; real:
    [kv_heads, r] bool, false where a lane has fewer; judging: [r] bool, kept out of every fit.
    """

    queries: Tensor
    at: Tensor
    real: Tensor
    judging: Tensor


@dataclass(frozen=True)
class Targets:
    """Per lane and reference query, in units of the largest power of a query's logits.

    powers: [kv_heads, r, c], of the entries that may change, their own masses counted. mass: [kv_heads, r],
    what these should sum to: the sum over all entries of the full lane but the protected ones. fixed_mass
    [kv_heads, r], fixed_sum [kv_heads, r, head_dim]: sum over the protected entries, of powers and of
    powers times values. output: [kv_heads, r, head_dim] of the full lane. real: [kv_heads, r] bool;
    judging: [r] bool.
    """

    powers: Tensor
    mass: Tensor
    fixed_mass: Tensor
    fixed_sum: Tensor
    output: Tensor
    real: Tensor
    judging: Tensor

    @property
    def total(self) -> Tensor:
        """Sum of all powers of the full lane: [kv_heads, r]; infinite for queries that are not there."""
        total = self.mass + self.fixed_mass
        return total.masked_fill(~self.real | (total <= 0), torch.inf)

    def split(self) -> tuple[Targets, Targets]:
        """Those to fit to, and those that judge."""
        return self._at(~self.judging), self._at(self.judging)

    def _at(self, wanted: Tensor) -> Targets:
        rows = wanted.nonzero().squeeze(1)
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        judging = parts.pop("judging")[rows]
        return Targets(**{name: part.index_select(1, rows) for name, part in parts.items()}, judging=judging)


def reference_queries(view: LayerView) -> References | None:
    """The window's queries and the future ones, by lane; None if there are none."""
    parts = []
    if view.queries is not None and view.query_heads is not None and view.query_positions is not None:
        queries, real = _by_lane(view.queries, view.query_heads // view.group, len(view.keys))
        parts.append(_references(queries, view.query_positions, real))
    if view.future_queries is not None:
        _, count, width = view.future_queries.shape
        queries = view.future_queries.reshape(-1, view.group, count, width)
        at = torch.full((count,), view.num_tokens)
        parts.append(_references(queries, at, torch.ones(queries.shape[:2], dtype=torch.bool)))
    if not parts:
        return None
    return References(
        queries=torch.cat([part.queries for part in parts], dim=1),
        at=torch.cat([part.at for part in parts]),
        real=torch.cat([part.real for part in parts], dim=1),
        judging=torch.cat([part.judging for part in parts]),
    )


def _by_lane(queries: Tensor, lanes: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Queries [k, W, d] of heads that read lanes [k] (ascending) as [kv_heads, g, W, d], and which of the g
    places of each lane are taken [kv_heads, g]."""
    counts = torch.bincount(lanes, minlength=kv_heads)
    place = torch.arange(len(lanes)) - (counts.cumsum(0) - counts)[lanes]
    heads = int(counts.max())
    grouped = queries.new_zeros(kv_heads, heads, *queries.shape[1:])
    grouped[lanes, place] = queries
    return grouped, torch.arange(heads) < counts[:, None]


def _references(queries: Tensor, at: Tensor, real: Tensor) -> References:
    """From queries [kv_heads, g, W, d] at positions [W] of heads that are there or not [kv_heads, g]."""
    kv_heads, heads, count, width = queries.shape
    return References(
        queries=queries.reshape(kv_heads, heads * count, width),
        at=at.repeat(heads),
        real=real.repeat_interleave(count, dim=1),
        judging=(torch.arange(count) % _JUDGING == _JUDGE).repeat(heads),
    )


def compressible(view: LayerView, rows: Rows) -> Tensor:
    """Which entries of the full lanes are not protected: [kv_heads, n] bool."""
    nowhere = view.num_tokens
    fixed = torch.where(rows.fixed & (rows.positions >= 0), rows.positions, nowhere)
    held = torch.zeros(len(fixed), nowhere + 1, dtype=torch.bool).scatter_(1, fixed, True)
    return view.valid & ~held.gather(1, view.positions.clamp(min=0))


def targets_of(view: LayerView, rows: Rows, references: References, place: Tensor, real: Tensor) -> Targets:
    """Targets for the entries at place [kv_heads, c] of the rows, as far as they are real [kv_heads, c]."""
    fixed = rows.fixed & (rows.positions >= 0)
    new = _logits(references, rows.keys, rows.log_mass, rows.positions, rows.positions >= 0)
    top, mass, wanted = _sums(view, compressible(view, rows), references, new.amax(dim=2))
    powers = new.sub_(top[..., None]).exp_()
    protected = powers * fixed[:, None]
    fixed_mass, fixed_sum = protected.sum(dim=2), protected @ rows.values
    total = (mass + fixed_mass).clamp(min=torch.finfo(mass.dtype).tiny)[..., None]
    return Targets(
        powers=powers.gather(2, place[:, None].expand(-1, powers.shape[1], -1)) * real[:, None],
        mass=mass,
        fixed_mass=fixed_mass,
        fixed_sum=fixed_sum,
        output=(wanted + fixed_sum) / total,
        real=references.real,
        judging=references.judging,
    )


def _logits(
    references: References, keys: Tensor, log_mass: Tensor, positions: Tensor, there: Tensor
) -> Tensor:
    """Logits [kv_heads, r, n] of all reference queries with entries that are there [kv_heads, n]."""
    bias = log_mass.masked_fill(~there, _UNSEEN)[:, None]
    logits = torch.baddbmm(bias, references.queries, keys.transpose(1, 2), alpha=keys.shape[2] ** -0.5)
    return logits.masked_fill_(positions[:, None] > references.at[:, None], _UNSEEN)


def _sums(
    view: LayerView, wanted: Tensor, references: References, least: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Over the wanted entries [kv_heads, n] of the full lanes: the sum of powers [kv_heads, r], and of powers
    times values [kv_heads, r, head_dim]; and before them the logits [kv_heads, r] whose power is the unit,
    at least `least`."""
    lanes = zip(view.valid.sum(dim=1).tolist(), least, strict=True)
    parts = [
        _sums_of_lane(view, lane, length, wanted, references, top) for lane, (length, top) in enumerate(lanes)
    ]
    tops, sums = (torch.stack(part) for part in zip(*parts, strict=True))
    return tops, sums[..., -1], sums[..., :-1]


def _sums_of_lane(
    view: LayerView, lane: int, length: int, wanted: Tensor, references: References, least: Tensor
) -> tuple[Tensor, Tensor]:
    """Unit logits [r], and sums of powers times values and, last, of powers: [r, head_dim + 1]."""
    keys, positions = view.keys[lane, :length].t(), view.positions[lane, :length]
    # One product gives both sums: values with a column of ones, weighted by the masses.
    mass = (view.log_mass[lane, :length].exp() * wanted[lane, :length])[:, None]
    weighted = torch.cat((view.values[lane, :length] * mass, mass), dim=1)
    # All queries see the entries before this one, which is near the end.
    late = int(torch.searchsorted(positions, references.at.min(), right=True))
    rows = max(8, _BLOCK_LOGITS // max(1, length))
    queries = (references.queries[lane] * len(keys) ** -0.5).split(rows)
    tops, sums = [], []
    for some, at, top in zip(queries, references.at.split(rows), least.split(rows), strict=True):
        block = some @ keys
        block[:, late:].masked_fill_(positions[late:] > at[:, None], _UNSEEN)
        if length:
            top = torch.maximum(top, block.amax(dim=1))
        top = top.clamp(min=_UNSEEN / 2)
        sums.append(block.sub_(top[:, None]).exp_() @ weighted)
        tops.append(top)
    return torch.cat(tops), torch.cat(sums)
