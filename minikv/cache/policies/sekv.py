"""SeKV: surprising tokens stay, the text between them becomes spans (arXiv 2606.31145)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.policies.allocation import fill
from minikv.cache.policies.base import Evidence, LayerView, Rows
from minikv.cache.policies.trees.keys import rotated, unrotated
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import MUTED, Zooming
from minikv.cache.spans.segments import Cutting, segments

if TYPE_CHECKING:
    from minikv.models.rope import Rope


@dataclass(frozen=True)
class Measured:
    """What `assign` and `merge` need of a layer: all [kv_heads, n].

    surprisal: float32, NaN where not known. valid, protected, sealed: bool. counts: int64, tokens of each.
    """

    surprisal: Tensor
    valid: Tensor
    protected: Tensor
    sealed: Tensor
    counts: Tensor


class SeKV:
    """Keeps the entries of surprising tokens and makes one entry of each span between them.

    What a span stands for is kept below the pool and is put back for queries that want it, which is not
    done here (`cache.spans`): with `zooms`, the framework gives this policy `resident` of the budget and
    leaves the rest for rows that are put back. The entry of a span tells which queries want it. With `bounds`
    it holds the greatest and the least of each number of the span's keys, and attention does not see it;
    without, it is the published summary, which attention sees while the span is not zoomed in: mean key, mean
    value and the mass of all its tokens, refitted. Its position is that of its token n // 2, so that an entry
    of n tokens says by itself which they are.

    All lanes are cut alike. What was cut once stays so; under a budget that does not grow, segments that are
    neighbours are joined, and no other borders appear.

    zooming: how spans are chosen, but for how many rows there are; router: for `bounds`, what turns them into
    estimates of attention, None to take them as they are.
    near: part of what is not kept anyway that the latest tokens take.
    longest: sealed text is cut coarser when new text would have to be cut into longer spans than this.
    weighted: summaries are means weighted by surprisal, as published, instead of plain ones. level: means of
    keys before rotation.

    Costs one pass over keys and values.
    """

    name = "sekv"
    zooms = True
    resident = 0.5

    def __init__(
        self,
        rope: Rope,
        cutting: Cutting | None = None,
        *,
        zooming: Zooming | None = None,
        router: Router | None = None,
        longest: int = 64,
        near: float = 0.25,
        weighted: bool = False,
        level: bool = True,
        bounds: bool = True,
    ) -> None:
        self.evidence = Evidence(surprisal=True)
        self.rope = rope
        self.cutting = cutting or Cutting()
        self.zooming = zooming or Zooming(0)
        self.router = router
        self.longest = longest
        self.near = near
        self.weighted = weighted
        self.level = level
        self.bounds = bounds
        self.refit_from = None if bounds else 1.0

    @torch.inference_mode()
    def measure(self, view: LayerView, protected: Tensor) -> Measured:
        """Surprisal of each entry, and which entries were cut before."""
        assert view.surprisal is not None
        known = torch.full((view.num_tokens,), torch.nan)
        count = min(len(view.surprisal), view.num_tokens)
        known[:count] = view.surprisal[:count]
        last = view.positions.masked_fill(view.counts <= 1, -1).amax(dim=1, keepdim=True)
        sealed = view.valid & (view.positions <= last)
        surprisal = known[view.positions.clamp(min=0)].masked_fill(view.counts > 1, torch.nan)
        return Measured(surprisal, view.valid, protected & view.valid, sealed, view.counts)

    @torch.inference_mode()
    def assign(self, measured: list[Measured], total: int) -> list[Tensor]:
        """Per layer [kv_heads, n] int64 places. The lanes get equal shares of `total`."""
        lengths = torch.stack([layer.valid.sum(dim=1) for layer in measured])
        floors = torch.stack([layer.protected.sum(dim=1) for layer in measured])
        floors = torch.minimum(floors.clamp(min=1), lengths)
        wanted = fill(torch.ones(lengths.shape), floors, lengths, total)
        # All layers and heads are cut alike as a rule, and then once; else one lane after the other would
        # cost as much.
        first = measured[0]
        alike = all(_equal(layer, first) for layer in measured)
        if not alike:
            return [self._places(layer, of_layer) for layer, of_layer in zip(measured, wanted, strict=True)]
        numbers, which = wanted.unique(return_inverse=True)
        one = Measured(**{name: t[:1].expand(len(numbers), -1) for name, t in vars(first).items()})
        return list(self._places(one, numbers)[which])

    def _places(self, lanes: Measured, wanted: Tensor) -> Tensor:
        """Places [kv_heads, n] of lanes that are to have `wanted` [kv_heads] segments."""
        rest = lanes.valid & ~lanes.protected
        after = rest.flip(1).cumsum(dim=1).flip(1)  # entries from each one to the end
        most = (self.near * (wanted - lanes.protected.sum(dim=1))).long()[:, None]
        latest = lanes.protected | (rest & (after <= most) & (lanes.counts == 1))
        kept = latest | lanes.sealed
        left, free = wanted - kept.sum(dim=1), (lanes.valid & ~kept).sum(dim=1)
        tight = (left * self.longest < free)[:, None]
        kept = torch.where(tight, latest, kept)
        return segments(lanes.surprisal, lanes.valid & ~kept, kept, wanted, self.cutting)

    @torch.inference_mode()
    def merge(self, view: LayerView, measured: Measured, assignment: Tensor, protected: Tensor) -> Rows:
        """The summaries, and entries that are segments of their own."""
        weights = view.counts.float()
        if self.weighted:
            weights = weights * measured.surprisal.nan_to_num(1.0).clamp(min=1e-6)
        if self.bounds:
            return bounds_of(view, assignment)
        return summaries(view, assignment, weights, protected, self.rope, self.level)


def summaries(
    view: LayerView, assignment: Tensor, weights: Tensor, protected: Tensor, rope: Rope, level: bool = False
) -> Rows:
    """The new entries of a layer. weights: [kv_heads, n] float32, positive, of rows in the means."""
    kv_heads, _, width = view.keys.shape
    most = int(assignment.max()) + 1
    stays = assignment >= 0
    lane = torch.arange(kv_heads)[:, None].expand_as(assignment)[stays]
    to, size = lane * most + assignment[stays], kv_heads * most

    def added(rows: Tensor) -> Tensor:
        return torch.zeros(size, *rows.shape[1:], dtype=rows.dtype).index_add_(0, to, rows)

    counts, positions = view.counts[stays], view.positions[stays]
    weight = weights[stays]
    share = (weight / added(weight).clamp(min=1e-30)[to])[:, None]
    total = added(counts)
    start = torch.full((size,), view.num_tokens).scatter_reduce_(
        0, to, first_token(positions, counts), "amin"
    )
    middle = start + total // 2
    plain = view.keys[stays]
    if level:
        plain = unrotated(rope, plain[None], positions[None], view.num_tokens)[0]
        keys = rotated(rope, added(share * plain)[None], middle[None], view.num_tokens)[0]
    else:
        keys = added(share * plain)
    values = added(share * view.values[stays])
    # Masses may have been corrected, so they add up as they are.
    masses = added(view.log_mass[stays].exp()).clamp(min=1e-30).log()
    single = added(torch.ones_like(counts)) == 1
    source = torch.zeros(size, dtype=torch.int64).scatter_(0, to, stays.flatten().nonzero()[:, 0])[single]
    # Where one entry alone goes into a new one it is that entry, to the bit.
    keys[single] = view.keys.reshape(-1, width)[source]
    values[single] = view.values.reshape(-1, width)[source]
    masses[single] = view.log_mass.flatten()[source]
    middle[single] = view.positions.flatten()[source]
    # A token is never refitted: with its span zoomed in, all is as it was computed.
    fixed = total == 1
    fixed[to] |= protected[stays]
    shape, empty = (kv_heads, most), total == 0
    return Rows(
        keys.view(*shape, width),
        values.view(*shape, width),
        masses.masked_fill(empty, 0.0).view(shape),
        middle.masked_fill(empty, -1).view(shape),
        total.view(shape),
        fixed.view(shape),
    )


def bounds_of(view: LayerView, assignment: Tensor) -> Rows:
    """The new entries of a layer, where those that stand for several tokens hold the greatest of each number
    of their keys as key and the least as value, and have no weight in attention."""
    kv_heads, _, width = view.keys.shape
    most = int(assignment.max()) + 1
    place = torch.where(assignment >= 0, assignment, most)
    wide = place[..., None].expand(-1, -1, width)
    # Of entries that are bounds already, these; an entry alone stays what it is.
    low = torch.where((view.log_mass <= MUTED)[..., None], view.values, view.keys)

    def gathered(rows: Tensor, how: str) -> Tensor:
        into = torch.zeros(kv_heads, most + 1, width)
        return into.scatter_reduce_(1, wide, rows, how, include_self=False)[:, :most]

    def numbers(rows: Tensor, how: str, start: int) -> Tensor:
        into = torch.full((kv_heads, most + 1), start)
        return into.scatter_reduce_(1, place, rows, how)[:, :most]

    total = numbers(view.counts, "sum", 0)
    entries = numbers(torch.ones_like(view.counts), "sum", 0)
    start = numbers(first_token(view.positions, view.counts), "amin", view.num_tokens)
    source = numbers(torch.arange(place.shape[1]).expand_as(place), "amin", place.shape[1])
    source = source.clamp(max=place.shape[1] - 1)
    same = source[..., None].expand(-1, -1, width)
    alone = entries == 1
    keys = torch.where(alone[..., None], view.keys.gather(1, same), gathered(view.keys, "amax"))
    values = torch.where(alone[..., None], view.values.gather(1, same), gathered(low, "amin"))
    masses = torch.where(alone, view.log_mass.gather(1, source), MUTED).masked_fill(total == 0, 0.0)
    positions = torch.where(alone, view.positions.gather(1, source), start + total // 2)
    return Rows(keys, values, masses, positions.masked_fill(total == 0, -1), total, total > 0)


def first_token(positions: Tensor, counts: Tensor) -> Tensor:
    """The first token of the span that an entry at its middle stands for."""
    return positions - counts // 2


def _equal(one: Measured, other: Measured) -> bool:
    """Whether all lanes of a layer are like the first of another."""
    return all(
        a.shape == b.shape and bool(torch.equal(a.nan_to_num(-1.0), b[:1].expand_as(a).nan_to_num(-1.0)))
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )
