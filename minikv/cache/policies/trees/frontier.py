"""Which nodes become entries: one price for an entry over all layers, heads and slots.

For a price, every slot chooses the cheapest of its antichains on its own:

    cost(v) = min(drop(v), keep(v) + price, cost(left) + cost(right))

which is the best that so many entries can do together; the price is the one at which the entries
are as many as there may be (Lagrangian relaxation). Where only a whole slot may be dropped, a
slot that is touched is covered by its nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache.policies.trees.slots import LEVELS, pairs, start_of

_LEAST = 1e-30
_STEPS = 60
_SAMPLED = 8
_FINE = 500
_ROUNDS = 8
_NOTHING = 1e-12


@dataclass(frozen=True)
class Forest:
    """Trees of all slots of all lanes, and what their nodes cost.

    drop, keep: per level [slots, SLOT >> level] float32, the damage of leaving a node out and of making it
    one entry; inf where that may not be. A place without an entry has drop 0 and keep inf.
    lanes: [slots] int64, ascending; floors: [lanes] int64, the fewest entries of a lane that count: 1 for
    those that would be empty otherwise.
    """

    drop: list[Tensor]
    keep: list[Tensor]
    lanes: Tensor
    floors: Tensor


@dataclass
class _Choice:
    """Per level [slots, SLOT >> level] bool: nodes that are entries, and nodes that are left out whole."""

    kept: list[Tensor]
    dropped: list[Tensor]


def choose(forest: Forest, total: int) -> list[Tensor]:
    """The nodes that become entries, per level [slots, SLOT >> level] bool: `total` of them, which
    must be no more than there are leaves with an entry, and at least the floors."""
    low, high = _bracket(forest, total)
    choice = _between(forest, low, high, total)
    _guard(forest, choice)
    missing = total - int(sum(level.sum() for level in choice.kept))
    assert missing >= 0
    while missing:
        missing -= _grow(forest, choice, missing)
    return choice.kept


def _bracket(forest: Forest, total: int) -> tuple[float, float]:
    """Prices (low, high) near each other: at `high` the entries are at most `total`, at `low` more, or
    there is no lower price."""
    ceiling = 2 * float(forest.drop[LEVELS].max()) + _LEAST
    low, high = 0.0, ceiling
    slots = len(forest.lanes)
    if slots >= 64 * _SAMPLED:  # a part of the slots tells where to look
        part = Forest(
            [level[::_SAMPLED].contiguous() for level in forest.drop],
            [level[::_SAMPLED].contiguous() for level in forest.keep],
            forest.lanes[::_SAMPLED],
            torch.zeros_like(forest.floors),
        )
        guess = _search(part, round(total * len(part.lanes) / slots), low, high)[1]
        low, high = 0.9 * guess, min(1.1 * guess, ceiling)
        if _count(forest, high) > total:
            low, high = high, ceiling
        elif _count(forest, low) <= total:
            low, high = 0.0, low
    return _search(forest, total, low, high)


def _search(forest: Forest, total: int, low: float, high: float) -> tuple[float, float]:
    """Narrow prices down, by interpolation between the logarithms and by bisection in turn, until all but
    one in `_FINE` of the entries have their price."""
    ceiling, more, fewer = high, float("inf"), _count(forest, high)
    for step in range(_STEPS):
        if total - fewer <= total // _FINE:
            break
        part = 0.5
        if step % 3 and more < float("inf"):
            part = min(max((total - fewer) / (more - fewer), 0.02), 0.98)
        middle = high * (low / high) ** part if low else high / 32
        if not low < middle < high or (not low and middle < _NOTHING * ceiling):
            break
        count = _count(forest, middle)
        if count > total:
            low, more = middle, count
        else:
            high, fewer = middle, count
    return low, high


def _count(forest: Forest, price: float) -> int:
    """Entries that all lanes have at a price."""
    counts = _upward(forest, torch.tensor([[price]]))[1][LEVELS][:, 0]
    lanes = torch.zeros(forest.floors.shape).index_add_(0, forest.lanes, counts)
    return int(torch.maximum(lanes.long(), forest.floors).sum())


def _upward(forest: Forest, price: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Costs and numbers of entries of the best antichain below every node, per level. price: [slots or 1,
    1]."""
    costs, counts = [], []
    for level in range(LEVELS + 1):
        kept = forest.keep[level] + price
        count = (kept < forest.drop[level]).float()
        cost = torch.minimum(forest.drop[level], kept)
        if level:
            split = _sums(costs[-1])
            count = torch.where(split < cost, _sums(counts[-1]), count)
            cost = torch.minimum(split, cost)
        costs.append(cost)
        counts.append(count)
    return costs, counts


def _between(forest: Forest, low: float, high: float, total: int) -> _Choice:
    """The antichains of the higher price, and those of the lower price in the slots that gain most by
    them for each entry, as far as the entries suffice; for what is still left, of lower prices yet."""
    price = torch.full((len(forest.lanes), 1), high)
    # Floors of lanes are not looked at slot by slot: less is taken, and the rest added singly.
    spare = total - _count(forest, high)
    held, damage = _at(forest, price)
    for step in range(_ROUNDS):
        lower = torch.full_like(price, low * 0.5**step)
        counts, damages = _at(forest, lower)
        more, gain = counts - held, damage - damages
        fits = (more > 0) & (more <= spare) & (gain > 0)
        order = torch.where(fits, gain / more.clamp(min=1), -torch.inf).argsort(descending=True, stable=True)
        taken = order[(more[order].cumsum(0, dtype=torch.float64) <= spare) & fits[order]]
        price[taken], held[taken], damage[taken] = lower[taken], counts[taken], damages[taken]
        spare -= int(more[taken].sum())
        if spare <= total // _FINE:
            break
    return _downward(forest, price)


def _at(forest: Forest, price: Tensor) -> tuple[Tensor, Tensor]:
    """Entries and damage [slots] of the antichains of prices [slots, 1]."""
    costs, counts = (part[LEVELS][:, 0] for part in _upward(forest, price))
    return counts, costs - price[:, 0] * counts


def _downward(forest: Forest, price: Tensor) -> _Choice:
    costs, _ = _upward(forest, price)
    kept, dropped = [], []
    reached = torch.ones_like(forest.drop[LEVELS], dtype=torch.bool)
    for level in range(LEVELS, -1, -1):
        here, drop = forest.keep[level] + price, forest.drop[level]
        best = reached & ((costs[level] >= here) | (costs[level] >= drop))
        takes = best & (here < drop)
        kept.insert(0, takes)
        dropped.insert(0, best & ~takes)
        reached = (reached & ~best).repeat_interleave(2, dim=1)
    return _Choice(kept, dropped)


# Entries that no price divides


def _guard(forest: Forest, choice: _Choice) -> None:
    """Make the best slot an entry of every lane that would be empty."""
    taken = torch.stack([level.sum(dim=1) for level in choice.kept]).sum(dim=0)
    held = torch.zeros_like(forest.floors).index_add_(0, forest.lanes, taken)
    gain = forest.drop[LEVELS][:, 0] - forest.keep[LEVELS][:, 0]
    for lane in (held < forest.floors).nonzero()[:, 0].tolist():
        slots = (forest.lanes == lane).nonzero()[:, 0]
        best = slots[gain[slots].argmax()]
        for level in choice.dropped:
            level[best] = False
        choice.kept[LEVELS][best] = True


def _grow(forest: Forest, choice: _Choice, missing: int) -> int:
    """Add up to `missing` entries by the best single steps, no two of which concern one node: a node
    that was left out becomes an entry, or an entry gives way to its two children. Returns how many."""
    _settle(forest, choice)
    adds = [
        torch.where(dropped & keep.isfinite(), drop - keep, -torch.inf)
        for dropped, drop, keep in zip(choice.dropped, forest.drop, forest.keep, strict=True)
    ]
    splits = [
        torch.where(choice.kept[i], forest.keep[i] - _sums(forest.keep[i - 1]), -torch.inf)
        for i in range(1, LEVELS + 1)
    ]
    gains = torch.cat([level.flatten() for level in (*adds, *splits)])
    taken = torch.zeros(len(gains), dtype=torch.bool)
    best = gains.topk(min(missing, int((gains > -torch.inf).sum()))).indices
    taken[best] = True
    parts = iter(taken.split([level.numel() for level in (*adds, *splits)]))
    for level, gain in enumerate(adds):
        added = next(parts).view(gain.shape)
        choice.kept[level] |= added
        choice.dropped[level] &= ~added
    for level in range(1, LEVELS + 1):
        divided = next(parts).view(choice.kept[level].shape)
        choice.kept[level] &= ~divided
        choice.kept[level - 1] |= divided.repeat_interleave(2, dim=1)
    assert len(best), "there is nothing left to add"
    return len(best)


def _settle(forest: Forest, choice: _Choice) -> None:
    """Put entries with one child in the child's place, and nodes left out that cannot become an entry
    into their children's, so that every single step changes the number of entries by one."""
    filled = [forest.keep[0].isfinite()]
    for _ in range(LEVELS):
        left, right = pairs(filled[-1])
        filled.append(left | right)
    for level in range(LEVELS, 0, -1):
        left, right = pairs(filled[level - 1])
        passed = choice.kept[level] & ~(left & right)
        choice.kept[level] &= ~passed
        choice.kept[level - 1] |= passed.repeat_interleave(2, dim=1) & filled[level - 1]
        passed = choice.dropped[level] & ~forest.keep[level].isfinite()
        choice.dropped[level] &= ~passed
        choice.dropped[level - 1] |= passed.repeat_interleave(2, dim=1)


def nodes_of(kept: list[Tensor]) -> Tensor:
    """The node that every leaf goes into: [slots, SLOT] int64, its number among the slot's nodes, or -1
    where there is none."""
    node = torch.full(kept[0].shape, -1, dtype=torch.int64)
    for level, taken in enumerate(kept):
        number = torch.where(taken, torch.arange(taken.shape[1]) + start_of(level), -1)
        node = torch.maximum(node, number.repeat_interleave(1 << level, dim=1))
    return node


def _sums(level: Tensor) -> Tensor:
    left, right = pairs(level)
    return left + right
