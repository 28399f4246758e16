"""Refit written a second time: float64, lane by lane, solved by plain means to convergence.

Nothing is shared with `minikv.cache.refit` but the types of its question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView, Rows


@dataclass(frozen=True)
class Lane:
    """Entries of one lane in float64: keys, values [n, d]; log_mass, positions [n]."""

    keys: Tensor
    values: Tensor
    log_mass: Tensor
    positions: Tensor

    def powers(self, query: Tensor, at: int) -> Tensor:
        logits = self.keys @ query / len(query) ** 0.5 + self.log_mass
        return torch.where(self.positions <= at, logits.exp(), 0.0)

    def output(self, query: Tensor, at: int) -> Tensor:
        powers = self.powers(query, at)
        return powers @ self.values / powers.sum() if powers.sum() > 0 else self.values.sum(dim=0) * 0


def lane_of(entries: LayerView | Rows, head: int, wanted: Tensor) -> Lane:
    parts = (entries.keys, entries.values, entries.log_mass, entries.positions)
    return Lane(*(part[head][wanted].double() for part in parts))


def references(view: LayerView, head: int) -> list[tuple[Tensor, int, bool]]:
    """(query, position that it sees up to, whether it judges) of every reference query of a lane."""
    found = []
    if view.queries is not None:
        for row, query_head in enumerate(view.query_heads.tolist()):
            if query_head // view.group == head:
                for i, at in enumerate(view.query_positions.tolist()):
                    found.append((view.queries[row, i].double(), at, i % 4 == 2))
    if view.future_queries is not None:
        for query_head in range(head * view.group, (head + 1) * view.group):
            for i, query in enumerate(view.future_queries[query_head]):
                found.append((query.double(), view.num_tokens, i % 4 == 2))
    return found


def judged_error(view: LayerView, rows: Rows, head: int) -> float:
    """Squared distance of a lane's outputs from the full lane's over the queries that judge."""
    full = lane_of(view, head, view.valid[head])
    compact = lane_of(rows, head, rows.positions[head] >= 0)
    judges = [(query, at) for query, at, judges in references(view, head) if judges]
    return sum(float((full.output(q, at) - compact.output(q, at)).square().sum()) for q, at in judges)


def refit(view: LayerView, rows: Rows, mass_ridge: float, value_ridge: float) -> Rows:
    """The best of three for every lane: as it was, new masses, new masses and values."""
    out = replace(rows, log_mass=rows.log_mass.clone(), values=rows.values.clone())
    for head in range(len(view.keys)):
        free = ~rows.fixed[head] & (rows.positions[head] >= 0)
        if not free.any():
            continue
        log_mass, values = _fit_lane(view, rows, head, free, mass_ridge, value_ridge)
        tries = [rows]
        tries.append(_with(rows, head, free, log_mass, rows.values[head][free]))
        tries.append(_with(rows, head, free, log_mass, values))
        errors = [judged_error(view, one, head) for one in tries]
        best = tries[errors.index(min(errors))]
        out.log_mass[head], out.values[head] = best.log_mass[head], best.values[head]
    return out


def _with(rows: Rows, head: int, free: Tensor, log_mass: Tensor, values: Tensor) -> Rows:
    new = replace(rows, log_mass=rows.log_mass.clone(), values=rows.values.clone())
    new.log_mass[head, free] = log_mass.float()
    new.values[head, free] = values.float()
    return new


def _fit_lane(
    view: LayerView, rows: Rows, head: int, free: Tensor, mass_ridge: float, value_ridge: float
) -> tuple[Tensor, Tensor]:
    protected = set(rows.positions[head][rows.fixed[head]].tolist())
    compressible = view.valid[head] & torch.tensor(
        [position not in protected for position in view.positions[head].tolist()]
    )
    full = lane_of(view, head, view.valid[head])
    given_up = lane_of(view, head, compressible)
    new = lane_of(rows, head, free)
    kept = lane_of(rows, head, rows.fixed[head] & (rows.positions[head] >= 0))
    drawn, goals, weights = [], [], []
    fitted = [(query, at) for query, at, judges in references(view, head) if not judges]
    for query, at in fitted:
        total = full.powers(query, at).sum()
        drawn.append(new.powers(query, at) / total if total > 0 else new.log_mass * 0)
        goals.append(given_up.powers(query, at).sum() / total if total > 0 else total)
    whole = given_up.log_mass.exp().sum().clamp(min=1.0).log()
    low, high = (-whole - new.log_mass).clamp(max=0).exp(), (whole - new.log_mass).clamp(min=0).exp()
    factors = bounded_least_squares(torch.stack(drawn), torch.stack(goals), low, high, mass_ridge)
    fitted_lane = replace(new, log_mass=new.log_mass + factors.log())
    missing = []
    for query, at in fitted:
        normaliser = fitted_lane.powers(query, at).sum() + kept.powers(query, at).sum()
        weights.append(fitted_lane.powers(query, at) / normaliser.clamp(min=1e-300))
        others = kept.powers(query, at) @ kept.values / normaliser.clamp(min=1e-300)
        missing.append(full.output(query, at) - others - weights[-1] @ new.values)
    values = new.values + ridge_solution(torch.stack(weights), torch.stack(missing), value_ridge)
    return fitted_lane.log_mass, values.clamp(full.values.amin(dim=0), full.values.amax(dim=0))


def bounded_least_squares(a: Tensor, goal: Tensor, low: Tensor, high: Tensor, ridge: float) -> Tensor:
    """Least squares a x = goal with low <= x <= high, pulled towards 1: plain projected gradients."""
    pull = mean_pull(a, ridge)
    gram, right = a.T @ a, a.T @ goal
    gram += pull * torch.eye(len(gram), dtype=gram.dtype)
    step = 1 / torch.linalg.eigvalsh(gram)[-1]
    x = torch.ones_like(low).clamp(low, high)
    for _ in range(4000):
        x = (x - step * (gram @ x - right - pull)).clamp(low, high)
    return x


def mean_pull(a: Tensor, ridge: float) -> Tensor:
    """`ridge` times the mean squared length of the columns that are not zero."""
    lengths = a.square().sum(dim=0)
    return ridge * lengths.sum() / max(1, int((lengths > 0).sum())) + 1e-12


def ridge_solution(p: Tensor, missing: Tensor, ridge: float) -> Tensor:
    """min |p x - missing|^2 + pull |x|^2 as one plain least-squares problem."""
    pull = mean_pull(p, ridge)
    stacked = torch.cat((p, pull.sqrt() * torch.eye(p.shape[1], dtype=p.dtype)))
    goals = torch.cat((missing, missing.new_zeros(p.shape[1], missing.shape[1])))
    return torch.linalg.lstsq(stacked, goals).solution
