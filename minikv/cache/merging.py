"""From a merging policy's assignment to new rows, and what is demanded of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minikv.cache.ceiling import Ceiling
from minikv.cache.policies.base import AnyPolicy, LayerView, MergingPolicy, Rows

_TRIES = 4  # further totals that are tried to fill the pages of a ceiling


def is_merging(policy: AnyPolicy) -> bool:
    """Whether a policy puts new entries in the place of old ones, rather than choosing among them."""
    return hasattr(policy, "merge")


class Merger:
    """What a merging policy has measured of all layers of a sequence, and what it makes of it.

    lengths, floors: [layers, kv_heads] int64, entries of each lane and how many of them are protected.
    """

    def __init__(self, policy: MergingPolicy, measured: list[Any], lengths: Tensor, floors: Tensor) -> None:
        self.policy = policy
        self.measured = measured
        self.lengths = lengths
        self.floors = floors

    def assign(self, total: int) -> list[Tensor]:
        """Per layer [kv_heads, n] int64, as `MergingPolicy.assign`."""
        assignment = self.policy.assign(self.measured, total)
        places = _places(assignment)
        wanted = min(total, int(self.lengths.sum()))
        assert int(places.sum()) == wanted, (
            f"{int(places.sum())} places were assigned, and {wanted} asked for"
        )
        assert bool((places >= torch.minimum(self.floors.clamp(min=1), self.lengths)).all()), (
            "a lane has too few places for what is protected"
        )
        return assignment

    def assign_pages(self, total: int, ceiling: Ceiling, room: int) -> list[Tensor]:
        """An assignment whose lanes, with `room` entries more in each, fit the ceiling.

        Lanes end within a page, so the entries that fit depend on how they are divided: the total is
        lowered until the pages suffice, and then raised again as long as they do.
        """
        least = int(torch.minimum(self.floors.clamp(min=1), self.lengths).sum())
        too_much = total + 1
        while True:
            found = self.assign(total)
            excess = ceiling.pages(_places(found).numpy(), room) - ceiling.max_pages
            if excess <= 0:
                break
            assert total > least, "the protected entries were found to fit"
            too_much, total = total, max(least, total - excess * ceiling.page_size)
        for _ in range(_TRIES):
            middle = (total + too_much) // 2
            if middle == total:
                break
            tried = self.assign(middle)
            if ceiling.pages(_places(tried).numpy(), room) <= ceiling.max_pages:
                total, found = middle, tried
            else:
                too_much = middle
        return found

    def rows(self, layer: int, view: LayerView, assignment: Tensor, protected: Tensor) -> tuple[Rows, Tensor]:
        """The new rows of a layer, and for each the first old entry that went into it [kv_heads, m]."""
        rows = self.policy.merge(view, self.measured[layer], assignment, protected)
        _check(rows, view, assignment)
        return rows, _first_of(assignment, rows.positions.shape[1])


def kept_rows(view: LayerView, keep: Tensor, protected: Tensor) -> tuple[Rows, Tensor]:
    """The entries of a layer that stay, keep [kv_heads, n] bool, as rows; and which they were: [kv_heads, m]
    int64."""
    source = keep.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    longest = int(keep.sum(dim=1).max())
    source = source[:, :longest]
    held = torch.arange(longest) < keep.sum(dim=1, keepdim=True)
    wide = source[..., None].expand(-1, -1, view.keys.shape[2])
    rows = Rows(
        keys=view.keys.gather(1, wide),
        values=view.values.gather(1, wide),
        log_mass=view.log_mass.gather(1, source).masked_fill(~held, 0.0),
        positions=view.positions.gather(1, source).masked_fill(~held, -1),
        counts=view.counts.gather(1, source) * held,
        fixed=protected.gather(1, source) & held,
    )
    return rows, source


def _places(assignment: list[Tensor]) -> Tensor:
    """Entries that each lane is to have: [layers, kv_heads] int64."""
    return torch.stack([layer.amax(dim=1) + 1 for layer in assignment])


def _first_of(assignment: Tensor, width: int) -> Tensor:
    """The first old entry that goes into each new one: [kv_heads, width] int64, 0 where there is none."""
    heads, longest = assignment.shape
    place = torch.where(assignment >= 0, assignment, width)
    first = torch.full((heads, width + 1), longest, dtype=torch.int64)
    first.scatter_reduce_(1, place, torch.arange(longest).expand(heads, -1), "amin")
    return first[:, :width].masked_fill(first[:, :width] == longest, 0)


def _check(rows: Rows, view: LayerView, assignment: Tensor) -> None:
    """An AssertionError names the first demand on a policy's rows that is not met."""
    held = rows.positions >= 0
    places = assignment.amax(dim=1) + 1
    assert bool((held.sum(dim=1) == places).all()), "there are not as many rows as places"
    beyond = torch.arange(held.shape[1]) >= places[:, None]
    assert not bool((held & beyond).any()), "a row lies past its lane's end"
    steps = rows.positions[:, 1:] - rows.positions[:, :-1]
    assert bool((steps > 0)[held[:, 1:]].all()), "positions do not ascend"
    assert bool((rows.positions < view.num_tokens).all()), "a row lies past the sequence's end"
    assert bool((rows.counts >= 1)[held].all()), "a row stands for no token"
    finite = rows.keys.isfinite().all(2) & rows.values.isfinite().all(2) & rows.log_mass.isfinite()
    assert bool(finite[held].all()), "a row has a number that is not finite"
