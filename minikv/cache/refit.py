"""Refit: log masses and values with which a lane's new entries answer as the full lane did.

After Attention Matching (arXiv 2602.16284), for the entries of any policy, kept or merged. Keys stay. On
reference queries the new entries of a lane are to draw the attention (least squares with bounds), and then
to give the output (ridge regression), that the full lane does. Protected entries are never changed, and
count in every normaliser. A quarter of the queries only judge: a lane takes what was fitted to the others
if it answers these better with it, and else stays as it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView, Rows
from minikv.cache.references import Part, Seen, part_of, reference_queries
from minikv.cache.refit_targets import Targets, compressible, targets_of

_STEPS = 25  # more change the outputs of real lanes by less than a hundredth
_LOOKS = 4  # of the power iteration that bounds the curvature
_TINY = 1e-12


@dataclass(frozen=True)
class Options:
    """Strengths of the pull towards what the policy gave, as shares of the mean curvature of a fit.

    A value ridge of 0.1 answers as well at 32x and beyond, but overfits where much is kept.
    """

    mass_ridge: float = 0.1
    value_ridge: float = 0.3


@torch.inference_mode()
def refit(view: LayerView, rows: Rows, options: Options = Options(), seen: Seen | None = None) -> Rows:
    """The new entries `rows` of a layer `view` with log masses and values fitted to the full lanes.

    Reference queries of a lane are those that were recorded of its group's heads: the observation window,
    which sees what came before it, and `future_queries`, which see everything. Without any nothing changes.
    A lane ends with new masses and values, with new masses alone, or as it was.

    What a policy has `seen` of the full lanes, with the same queries, is not computed again.

    Costs attention of the r reference queries of a lane to its n entries, and for its c entries that may
    change 25 steps of 2 * r * c and a Cholesky of size min(c, r). One thread of a shared machine takes 10 ms
    for 3 lanes with r = 240, n = 1,500, c = 60; 24 ms with n = 6,000, and 35 ms if c = 750. Memory beside
    the layer's: some times r * c numbers.
    """
    references = reference_queries(view)
    free = ~rows.fixed & (rows.positions >= 0)
    if references is None or not free.any():
        return rows
    entries = part_of(rows, free)
    fitted, judging = targets_of(view, rows, references, entries, seen).split()
    factors = solve_masses(fitted, *mass_bounds(view, rows, entries.log_mass), options.mass_ridge)
    values = solve_values(fitted, factors, entries.values, options.value_ridge)
    values = _within(view, values)
    unchanged = torch.ones_like(factors)
    errors = torch.stack(
        [
            output_error(judging, unchanged, entries.values),
            output_error(judging, factors, entries.values),
            output_error(judging, factors, values),
        ]
    ).nan_to_num(nan=torch.inf)
    # argmin takes the first of equals: what helps nothing is not done.
    best = errors.argmin(dim=0)
    return _changed(rows, entries, factors, values, best)


def mass_bounds(view: LayerView, rows: Rows, log_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest factor [kv_heads, c] on the masses exp(log_mass).

    No entry may stand for more than all entries that the lane gives up or changes, nor for less than
    one part in as many: a log mass far enough down that the entry is as good as gone, and finite.
    """
    whole = (view.log_mass.exp() * compressible(view, rows)).sum(dim=1).clamp(min=1.0).log()[:, None]
    return (-whole - log_mass).clamp(max=0.0).exp(), (whole - log_mass).clamp(min=0.0).exp()


def solve_masses(targets: Targets, lower: Tensor, upper: Tensor, ridge: float) -> Tensor:
    """Factors [kv_heads, c] on the policy's masses, within bounds of the same shape.

    Least squares of the share of attention that the entries are to draw, each query weighing alike, with a
    pull towards 1; projected gradients with Nesterov's momentum, which starts anew where it overshoots.
    """
    share = (1 / targets.total)[..., None]
    drawn = targets.powers * share
    goal = targets.mass / targets.total
    curvature = drawn.square().sum(dim=1)
    pull = _pull(curvature, ridge)
    # In units in which every factor has the same curvature the steps suit all of them.
    unit = (curvature + pull).rsqrt()
    product = _normal_product(drawn * unit[:, None], pull * unit.square())
    slope = (goal[:, None] @ drawn).squeeze(1).add_(pull).mul_(unit)
    low, high = lower / unit, upper / unit
    start = (1 / unit).clamp(low, high)
    return _descend(product, slope, low, high, start) * unit


def _pull(curvature: Tensor, ridge: float) -> Tensor:
    """`ridge` times the mean of each lane's curvature [kv_heads, c], over entries that a query sees at all:
    [kv_heads, 1]."""
    seen = (curvature > 0).sum(dim=1, keepdim=True).clamp(min=1)
    return ridge * curvature.sum(dim=1, keepdim=True) / seen + _TINY


def _normal_product(matrix: Tensor, diagonal: Tensor) -> Callable[[Tensor], Tensor]:
    """x [b, c] -> (matrix' matrix + diagonal) x for matrix [b, r, c], diagonal [b, c].

    As rows, which are multiplied much faster than columns are; the gram would take as long to make as all
    products do.
    """
    across = matrix.transpose(1, 2)
    return lambda x: torch.addcmul(((x[:, None] @ across) @ matrix).squeeze(1), diagonal, x)


def _descend(
    product: Callable[[Tensor], Tensor], slope: Tensor, low: Tensor, high: Tensor, start: Tensor
) -> Tensor:
    """Minimise x product(x) / 2 - slope x between low and high, all [b, c]; product has no negative parts."""
    step = 1 / _most_curvature(product, slope)
    x, ahead, momentum = start, start, torch.ones(len(start), 1)
    for _ in range(_STEPS):
        new = (ahead - step * (product(ahead) - slope)).clamp_(low, high)
        moved = new - x
        overshot = ((ahead - new) * moved).sum(dim=1, keepdim=True) > 0
        grown = ((1 + 4 * momentum.square()).sqrt() + 1) / 2
        ahead = torch.addcmul(new, ((momentum - 1) / grown).masked_fill_(overshot, 0.0), moved)
        x, momentum = new, grown.masked_fill_(overshot, 1.0)
    return x


def _most_curvature(product: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """No less than the largest eigenvalue: [b, 1]. For a matrix without negative parts, and any x > 0, the
    greatest of product(x) / x is such a bound; it is close where x is near the first eigenvector."""
    x = torch.ones_like(like)
    for _ in range(_LOOKS):
        x = product(x)
        x = x / x.amax(dim=1, keepdim=True) + 1e-6
    return (product(x) / x).amax(dim=1, keepdim=True)


def solve_values(targets: Targets, factors: Tensor, values: Tensor, ridge: float) -> Tensor:
    """Values [kv_heads, c, head_dim] that give the full lanes' output, with a pull towards `values`."""
    weights, normaliser = _attention(targets, factors)
    missing = targets.output - targets.fixed_sum * normaliser[..., None] - weights @ values
    missing = missing * targets.real[..., None]
    across = weights.transpose(1, 2)
    rows, columns = weights.shape[1:]
    pull = _pull(weights.square().sum(dim=1), ridge)
    # The same solution either way; the smaller system is the cheaper one.
    small = across @ weights if columns <= rows else weights @ across
    small.diagonal(dim1=1, dim2=2).add_(pull)
    factor = torch.linalg.cholesky_ex(small).L
    if columns <= rows:
        return values + torch.cholesky_solve(across @ missing, factor)
    return values + across @ torch.cholesky_solve(missing, factor)


def output_error(targets: Targets, factors: Tensor, values: Tensor) -> Tensor:
    """Squared distance [kv_heads] of the new lanes' outputs from the full ones, over all queries."""
    weights, normaliser = _attention(targets, factors)
    output = weights @ values + targets.fixed_sum * normaliser[..., None]
    return ((output - targets.output).square().sum(dim=2) * targets.real).sum(dim=1)


def _attention(targets: Targets, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [kv_heads, r, c] of the entries that may change, and what makes sums means [kv_heads, r]."""
    powers = targets.powers * factors[:, None]
    normaliser = 1 / (powers.sum(dim=2) + targets.fixed_mass).clamp(min=_TINY)
    return powers * normaliser[..., None], normaliser


def _within(view: LayerView, values: Tensor) -> Tensor:
    """Values held, number by number, in the range that they have in the full lane."""
    # The zeros past a lane's end widen no range that matters.
    there = view.values if view.valid.all() else view.values * view.valid[..., None]
    low, high = there.amin(dim=1, keepdim=True), there.amax(dim=1, keepdim=True)
    return values.clamp(low, high)


def _changed(rows: Rows, free: Part, factors: Tensor, values: Tensor, best: Tensor) -> Rows:
    """The rows with new masses in lanes whose `best` [kv_heads] is at least 1, new values where it is 2."""
    log_mass, new_values = rows.log_mass.clone(), rows.values.clone()
    for lane, choice in enumerate(best.tolist()):
        real = free.real[lane]
        place = free.place[lane][real]
        if choice >= 1:
            log_mass[lane, place] = (free.log_mass[lane] + factors[lane].log())[real]
        if choice == 2:
            new_values[lane, place] = values[lane][real]
    return replace(rows, log_mass=log_mass, values=new_values)
