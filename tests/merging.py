"""A policy that merges neighbours, for tests of merging that depend on no method."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from minikv.cache.policies.allocation import fill
from minikv.cache.policies.base import Evidence, LayerView, Rows


class Pairs:
    """Merges the smallest neighbouring groups of each lane until they are as many as wanted; protected
    entries part groups, and where no neighbours are left the earliest are dropped."""

    name = "pairs"

    def __init__(self, evidence: Evidence | None = None, refit_from: float | None = None):
        self.evidence = evidence or Evidence()
        self.refit_from = refit_from
        self.views: list[LayerView] = []

    def measure(self, view: LayerView, protected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.views.append(view)
        return view.valid, protected, view.counts

    def assign(self, measured, total: int) -> list[Tensor]:
        lengths = torch.stack([valid.sum(1) for valid, _, _ in measured])
        floors = torch.stack([protected.sum(1) for _, protected, _ in measured])
        floors = torch.minimum(floors.clamp(min=1), lengths)
        wanted = fill(torch.ones(lengths.shape), floors, lengths, total)
        return [self._layer(*layer, counts) for layer, counts in zip(measured, wanted, strict=True)]

    def _layer(self, valid: Tensor, protected: Tensor, counts: Tensor, wanted: Tensor) -> Tensor:
        found = torch.full(valid.shape, -1, dtype=torch.int64)
        for lane, held, guarded, sizes, most in zip(found, valid, protected, counts, wanted, strict=True):
            groups = [([i], bool(guarded[i]), int(sizes[i])) for i in range(int(held.sum()))]
            for place, (members, _, _) in enumerate(_grouped(groups, int(most))):
                lane[members] = place
        return found

    def merge(self, view: LayerView, measured, assignment: Tensor, protected: Tensor) -> Rows:
        heads, width = assignment.shape[0], int(assignment.max()) + 1
        rows = Rows(
            keys=torch.zeros(heads, width, view.keys.shape[2]),
            values=torch.zeros(heads, width, view.keys.shape[2]),
            log_mass=torch.zeros(heads, width),
            positions=torch.full((heads, width), -1),
            counts=torch.zeros(heads, width, dtype=torch.int64),
            fixed=torch.zeros(heads, width, dtype=torch.bool),
        )
        for lane in range(heads):
            for place in range(int(assignment[lane].max()) + 1):
                self._merge_one(view, lane, (assignment[lane] == place).nonzero()[:, 0], place, rows)
        rows.fixed[:] = False
        for lane, guarded in enumerate(protected):
            rows.fixed[lane, assignment[lane][guarded]] = True
        return rows

    def _merge_one(self, view: LayerView, lane: int, members: Tensor, place: int, rows: Rows) -> None:
        mass = view.log_mass[lane, members].softmax(0)[:, None]
        one = len(members) == 1
        for old, new in ((view.keys, rows.keys), (view.values, rows.values)):
            new[lane, place] = old[lane, members[0]] if one else (mass * old[lane, members]).sum(0)
        log_mass = view.log_mass[lane, members]
        rows.log_mass[lane, place] = log_mass[0] if one else log_mass.logsumexp(0)
        rows.positions[lane, place] = view.positions[lane, members[0]]
        rows.counts[lane, place] = view.counts[lane, members].sum()


def _grouped(groups, most: int):
    """groups: (members, protected, tokens) in order."""
    while len(groups) > most:
        pairs = [(a[2] + b[2], i) for i, (a, b) in enumerate(pairwise(groups)) if not (a[1] or b[1])]
        if pairs:
            _, at = min(pairs)
            (m1, _, n1), (m2, _, n2) = groups[at : at + 2]
            groups[at : at + 2] = [(m1 + m2, False, n1 + n2)]
        else:
            del groups[next(i for i, group in enumerate(groups) if not group[1])]
    return groups
