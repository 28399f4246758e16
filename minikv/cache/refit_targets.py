"""What a refit aims at: the attention and output of full lanes on reference queries."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView, Rows
from minikv.kernels.backend import merge
from minikv.kernels.sdpa import sdpa_with_lse

_JUDGING = 4  # one query in so many judges
_JUDGE = 2  # which of them: neither the first nor the last of a short window
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
class Part:
    """Some of a layer's new entries; c is the most of any lane.

    place: [kv_heads, c] int64, where they stand in the rows; real: [kv_heads, c] bool, false past a lane's
    last; keys, values: [kv_heads, c, head_dim]; log_mass: [kv_heads, c], 0 past the last; positions:
    [kv_heads, c] int64.
    """

    place: Tensor
    real: Tensor
    keys: Tensor
    values: Tensor
    log_mass: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Targets:
    """Per lane and reference query, in units in which no power and no `mass` is above 1.

    powers: [kv_heads, r, c], of the entries that may change, their own masses counted, 0 for queries and
    entries that are not there. mass: [kv_heads, r], what these should sum to: the sum over all entries of
    the full lane but the protected ones. fixed_mass [kv_heads, r], fixed_sum [kv_heads, r, head_dim]: sum
    over the protected entries, of powers and of powers times values. output: [kv_heads, r, head_dim] of the
    full lane. real: [kv_heads, r] bool; judging: [r] bool.
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


def part_of(rows: Rows, wanted: Tensor) -> Part:
    """The wanted entries [kv_heads, m] of the rows."""
    count = int(wanted.sum(dim=1).max())
    place = torch.argsort(wanted.int(), dim=1, descending=True, stable=True)[:, :count]
    wide = place[..., None].expand(-1, -1, rows.keys.shape[2])
    real = wanted.gather(1, place)
    return Part(
        place=place,
        real=real,
        keys=rows.keys.gather(1, wide),
        values=rows.values.gather(1, wide),
        log_mass=rows.log_mass.gather(1, place).masked_fill(~real, 0.0),
        positions=rows.positions.gather(1, place),
    )


def targets_of(view: LayerView, rows: Rows, references: References, free: Part) -> Targets:
    """Targets for the entries of the rows that may change."""
    fixed = part_of(rows, rows.fixed & (rows.positions >= 0))
    powers, held = _logits(references, free), _logits(references, fixed)
    least = torch.cat((powers.amax(dim=2, keepdim=True), held), dim=2).amax(dim=2)
    top, mass, wanted = _sums(view, compressible(view, rows), references, least)
    powers.sub_(top[..., None]).exp_()
    held.sub_(top[..., None]).exp_()
    if not references.real.all():
        powers.mul_(references.real[..., None])
    fixed_mass, fixed_sum = held.sum(dim=2), held @ fixed.values
    total = (mass + fixed_mass).clamp(min=torch.finfo(mass.dtype).tiny)[..., None]
    return Targets(
        powers=powers,
        mass=mass,
        fixed_mass=fixed_mass,
        fixed_sum=fixed_sum,
        output=(wanted + fixed_sum) / total,
        real=references.real,
        judging=references.judging,
    )


def _logits(references: References, part: Part) -> Tensor:
    """Logits [kv_heads, r, c] of all reference queries with entries, far down where they are not real."""
    bias = part.log_mass.masked_fill(~part.real, _UNSEEN)[:, None]
    scale = part.keys.shape[2] ** -0.5
    logits = torch.baddbmm(bias, references.queries, part.keys.transpose(1, 2), alpha=scale)
    if (part.positions > references.at.min()).any():  # seldom, where the last entries are protected
        logits.masked_fill_(part.positions[:, None] > references.at[:, None], _UNSEEN)
    return logits


def _sums(
    view: LayerView, wanted: Tensor, references: References, least: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Over the wanted entries [kv_heads, n] of the full lanes: the sum of powers [kv_heads, r], and of powers
    times values [kv_heads, r, head_dim]; and before them the logits [kv_heads, r] whose power is the unit,
    that of the sum but at least `least`."""
    lengths = view.valid.sum(dim=1).tolist()
    parts = [_mean_of_lane(view, lane, length, wanted, references) for lane, length in enumerate(lengths)]
    means, log_sums = (torch.stack(part) for part in zip(*parts, strict=True))
    tops = torch.maximum(least, log_sums).clamp(min=_UNSEEN / 2)
    sums = (log_sums - tops).exp_()
    return tops, sums, means * sums[..., None]


def _mean_of_lane(
    view: LayerView, lane: int, length: int, wanted: Tensor, references: References
) -> tuple[Tensor, Tensor]:
    """Attention over the wanted entries of a lane: means of values [r, head_dim], log sums of powers [r]."""
    positions, wanted = view.positions[lane, :length], wanted[lane, :length]
    bias = view.log_mass[lane, :length].masked_fill(~wanted, _UNSEEN)
    queries = references.queries[lane]
    # All queries see the entries before this one, which is near the end: a few hold a mask for each query.
    late = int(torch.searchsorted(positions, references.at.min(), right=True))
    mean, log_sum = torch.zeros_like(queries), queries.new_full(queries.shape[:1], _UNSEEN)
    if late:
        mean, log_sum = _attend(view, lane, slice(late), queries, bias[None, :late])
    if wanted[late:].any():
        hidden = positions[late:] > references.at[:, None]
        masks = bias[late:].expand(hidden.shape).masked_fill(hidden, _UNSEEN)
        mean, log_sum = merge(mean, log_sum, *_attend(view, lane, slice(late, length), queries, masks))
    return mean, log_sum


def _attend(view: LayerView, lane: int, part: slice, queries: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    entries = view.keys[None, None, lane, part], view.values[None, None, lane, part]
    mean, log_sum = sdpa_with_lse(queries[None, None], *entries, bias[None, None])
    return mean[0, 0], log_sum[0, 0]
