"""How a budget is divided over lanes: evenly, by pooled scores of a layer's heads, by layer errors."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.cache.policies.base import Allocation


def fill(want: Tensor, floors: Tensor, ceilings: Tensor, total: int) -> Tensor:
    """Divide `total` in proportion to `want`, within bounds, by water-filling.

    Every place gets `level * want` clipped to its bounds, where the level is the one that uses up the
    total; what a place cannot take goes to the others in proportion. Places that want nothing share,
    evenly, only what the others leave. Fractions are rounded so that the sum is exact: the largest
    are rounded up, of equal ones the lower place.

    want: float, at least 0; floors, ceilings: int64 of the same shape, floors <= ceilings, with at most
    `total` in the floors. Returns int64 of that shape that sums to min(total, sum of ceilings).
    """
    low, high = floors.flatten().double(), ceilings.flatten().double()
    assert bool((want >= 0).all()) and bool((low <= high).all())
    total = min(total, int(ceilings.sum()))
    assert int(floors.sum()) <= total, "the floors exceed the total"
    shares = _shares(_weights(want.flatten().double()), low, high, total)
    counts = shares.floor().long()
    fractions = torch.where(counts < ceilings.flatten(), shares - counts, -1.0)
    counts[fractions.argsort(descending=True, stable=True)[: total - int(counts.sum())]] += 1
    assert int(counts.sum()) == total
    return counts.view(floors.shape)


def _weights(want: Tensor) -> Tensor:
    """Weights of at most 1; nothing wanted becomes next to nothing, so that a level always exists."""
    largest = want.max()
    return (want / largest).clamp(min=1e-9) if largest > 0 else torch.ones_like(want)


def _shares(weights: Tensor, low: Tensor, high: Tensor, total: int) -> Tensor:
    """clip(level * weights, low, high) for the level at which it sums to `total`. The sum is piecewise
    linear in the level, with a corner wherever a place meets a bound."""
    corners = torch.cat((low / weights, high / weights)).sort().values
    sums = (corners[:, None] * weights).clamp(low, high).sum(dim=1)
    after = int(torch.searchsorted(sums, float(total)).clamp(1, len(corners) - 1))
    rise = sums[after] - sums[after - 1]
    part = ((total - sums[after - 1]) / rise).clamp(0, 1) if rise > 0 else 0.0
    level = corners[after - 1] + part * (corners[after] - corners[after - 1])
    return (level * weights).clamp(low, high)


def uniform(question: Allocation) -> Tensor:
    """The same number for every lane, [layers, kv_heads] int64, as far as protected entries and short
    lanes allow."""
    want = torch.ones(question.lengths.shape)
    return fill(want, question.protected, question.lengths, question.total)


def across_heads(question: Allocation, floor: float = 0.2, shares: Tensor | None = None) -> Tensor:
    """Let the heads of a layer compete for its entries, [layers, kv_heads] int64 (AdaKV, arXiv 2407.11550).

    Each layer keeps what `shares` [layers, kv_heads] (default: `uniform`) give it. Every head keeps the
    fraction `floor` of its share; the rest goes to the highest scores of all its heads pooled, of equal
    ones to the lower position.
    """
    shares = uniform(question) if shares is None else shares
    floors = torch.maximum(question.protected, (shares * floor).long())
    counts = torch.empty_like(shares)
    for layer, scores in enumerate(question.scores):
        counts[layer] = _pooled(scores, floors[layer], int(shares[layer].sum()))
    return counts


def _pooled(scores: Tensor, floors: Tensor, total: int) -> Tensor:
    """How many of the `total` highest of a layer's scores each head has, at least its floor."""
    heads, length = scores.shape
    order = scores.argsort(dim=1, descending=True, stable=True)
    secured = torch.zeros(scores.shape, dtype=torch.bool)
    secured.scatter_(1, order, torch.arange(length) < floors[:, None])
    # Entries first, heads second: a tie between heads goes to the lower position, not to the lower head.
    pool = scores.masked_fill(secured, float("inf")).t().reshape(-1)
    best = pool.argsort(descending=True, stable=True)[:total]
    return torch.bincount(best % heads, minlength=heads)


def by_layer_errors(question: Allocation, errors: Tensor, minimum: int = 32, ceiling: float = 3.0) -> Tensor:
    """Layers that suffer more from eviction keep more, the heads of a layer the same: [layers, kv_heads]
    int64 (CompressKV, arXiv 2508.02401).

    errors: [layers] float, at least 0, in any unit. Every lane keeps at least `minimum` entries, or the mean
    budget if that is less, and at most `ceiling` times the mean, as far as protected entries and
    lane lengths allow; what a layer cannot use goes to the others.
    """
    lengths, protected, total = question.lengths, question.protected, question.total
    rows = _layer_rows(errors, total // lengths.shape[1], minimum, ceiling)
    lowest = torch.maximum(protected, lengths.clamp(max=min(minimum, total // lengths.numel())))
    highest = torch.maximum(protected, lengths.clamp(max=int(ceiling * total / lengths.numel())))
    if int(lowest.sum()) > total:
        lowest = protected
    if int(highest.sum()) < total:
        highest = lengths
    return fill(rows[:, None].expand(lengths.shape), lowest, highest, total)


def _layer_rows(errors: Tensor, total: int, minimum: int, ceiling: float) -> Tensor:
    """Entries per lane of each layer, [layers] int64, summing to `total` unless every layer is at a bound.

    minimum + error share of the rest, rounded and clipped; then single steps round the layers, in order
    of their errors, until the sum is right.
    """
    layers = len(errors)
    low, high = min(minimum, total // layers), int(ceiling * total / layers)
    weight = errors.double()
    weight = weight / weight.sum() if weight.sum() > 0 else torch.full_like(weight, 1 / layers)
    rows = (low + (weight * (total - low * layers)).round().long()).clamp(low, high)
    while missing := total - int(rows.sum()):
        order = weight.argsort(descending=missing > 0, stable=True)
        movable = (rows < high) if missing > 0 else (rows > low)
        chosen = order[movable[order]][: abs(missing)]
        if not len(chosen):
            break
        rows[chosen] += 1 if missing > 0 else -1
    return rows
