"""Reference queries of a layer, and what they see of its full lanes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView, Rows
from minikv.kernels.backend import merge
from minikv.kernels.sdpa import sdpa_with_lse

_JUDGING = 4  # one query in so many judges
_JUDGE = 2  # which of them: neither the first nor the last of a short window
UNSEEN = torch.finfo(torch.float32).min / 4
"""The logit of what is not seen. Not -inf: the difference of two of them is a number."""


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
    """Some entries of a layer; c is the most of any lane.

    place: [kv_heads, c] int64, where they stand in the lanes; real: [kv_heads, c] bool, false past a lane's
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
class Seen:
    """What reference queries see of some entries of the full lanes.

    queries, at: those of the `References`; wanted: [kv_heads, n] bool, the entries. means: [kv_heads, r,
    head_dim] of values; log_sums: [kv_heads, r] of powers, `UNSEEN` or near it where nothing is seen.
    """

    queries: Tensor
    at: Tensor
    wanted: Tensor
    means: Tensor
    log_sums: Tensor

    def is_of(self, references: References, wanted: Tensor) -> bool:
        """Whether these queries have seen these entries."""
        pairs = ((self.queries, references.queries), (self.at, references.at), (self.wanted, wanted))
        return all(torch.equal(mine, other) for mine, other in pairs)


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


def part_of(entries: Rows | LayerView, wanted: Tensor) -> Part:
    """The wanted entries [kv_heads, m] of the entries."""
    counts = wanted.sum(dim=1)
    real = torch.arange(int(counts.max())) < counts[:, None]
    place = torch.zeros(real.shape, dtype=torch.int64)
    place[real] = wanted.nonzero()[:, 1]  # both lane by lane
    wide = place[..., None].expand(-1, -1, entries.keys.shape[2])
    return Part(
        place=place,
        real=real,
        keys=entries.keys.gather(1, wide),
        values=entries.values.gather(1, wide),
        log_mass=entries.log_mass.gather(1, place).masked_fill(~real, 0.0),
        positions=entries.positions.gather(1, place),
    )


def logits_of(references: References, part: Part) -> Tensor:
    """Logits [kv_heads, r, c] of all reference queries with entries, far down where they are not real."""
    bias = part.log_mass.masked_fill(~part.real, UNSEEN)[:, None]
    scale = part.keys.shape[2] ** -0.5
    logits = torch.baddbmm(bias, references.queries, part.keys.transpose(1, 2), alpha=scale)
    if (part.positions > references.at.min()).any():  # seldom, where the last entries are protected
        logits.masked_fill_(part.positions[:, None] > references.at[:, None], UNSEEN)
    return logits


def see(view: LayerView, wanted: Tensor, references: References) -> Seen:
    """What the queries see of the wanted entries [kv_heads, n]."""
    lengths = view.valid.sum(dim=1).tolist()
    parts = [_mean_of_lane(view, lane, length, wanted, references) for lane, length in enumerate(lengths)]
    means, log_sums = (torch.stack(part) for part in zip(*parts, strict=True))
    return Seen(references.queries, references.at, wanted, means, log_sums)


def _mean_of_lane(
    view: LayerView, lane: int, length: int, wanted: Tensor, references: References
) -> tuple[Tensor, Tensor]:
    """Attention over the wanted entries of a lane: means of values [r, head_dim], log sums of powers [r]."""
    positions, wanted = view.positions[lane, :length], wanted[lane, :length]
    bias = view.log_mass[lane, :length].masked_fill(~wanted, UNSEEN)
    queries = references.queries[lane]
    # All queries see the entries before this one, which is near the end: a few hold a mask for each query.
    late = int(torch.searchsorted(positions, references.at.min(), right=True))
    mean, log_sum = torch.zeros_like(queries), queries.new_full(queries.shape[:1], UNSEEN)
    if late:
        mean, log_sum = _attend(view, lane, slice(late), queries, bias[None, :late])
    if wanted[late:].any():
        hidden = positions[late:] > references.at[:, None]
        masks = bias[late:].expand(hidden.shape).masked_fill(hidden, UNSEEN)
        mean, log_sum = merge(mean, log_sum, *_attend(view, lane, slice(late, length), queries, masks))
    return mean, log_sum


def _attend(view: LayerView, lane: int, part: slice, queries: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    entries = view.keys[None, None, lane, part], view.values[None, None, lane, part]
    mean, log_sum = sdpa_with_lse(queries[None, None], *entries, bias[None, None])
    return mean[0, 0], log_sum[0, 0]
