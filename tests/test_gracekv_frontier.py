"""The choice of nodes: optimal on the envelope, exact in number, whatever the trees look like."""

from __future__ import annotations

import gracekv_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minikv.cache.policies.trees.frontier import Forest, _between, _bracket, choose, nodes_of
from minikv.cache.policies.trees.slots import LEVELS, NODES, SLOT, level_slice, pairs, whole


def forest_of(slots: int, seed: int, cover: int = 1, empty: float = 0.2, lanes: int = 2) -> Forest:
    """Random trees with places that hold nothing; damage grows with a node's size, but not evenly."""
    random = np.random.default_rng(seed)
    filled = random.random((slots, SLOT)) >= empty
    filled[:, 0] |= ~filled.any(axis=1)
    weight = torch.from_numpy(np.where(filled, random.exponential(1.0, filled.shape) ** 3, 0.0)).float()
    number = torch.from_numpy(filled).long()
    drop, keep = [], []
    for level in range(LEVELS + 1):
        noise = torch.from_numpy(random.random(weight.shape)).float()
        out = weight * (0.7 + 0.3 * noise)
        keep.append(
            torch.where(
                number > 1, out * torch.from_numpy(random.random(out.shape)).float(), 0.0
            ).masked_fill(number == 0, torch.inf)
        )
        drop.append(out.masked_fill((number > 0) & (1 << level < cover), torch.inf))
        if level < LEVELS:
            weight, number = (sum(pairs(x)) for x in (weight, number))
    lane = torch.arange(slots) * lanes // slots
    return Forest(drop, keep, lane, torch.zeros(lanes, dtype=torch.int64))


def damage(forest: Forest, kept: list[Tensor]) -> float:
    """What a choice costs, nodes left out taken as large as may be."""
    below = torch.zeros(len(forest.lanes), SLOT, dtype=torch.float64)
    some = torch.zeros(len(forest.lanes), SLOT, dtype=torch.bool)
    for level, taken in enumerate(kept):
        if level:
            (left, right), (a, b) = pairs(below), pairs(some)
            below, some = left + right, a | b
        none = ~taken & ~some
        out = forest.drop[level].double()
        below = torch.where(none, torch.minimum(below, out) if level else out, below)
        below = torch.where(taken, forest.keep[level].double(), below)
        some = some | taken
    return float(below.sum())


def curves(forest: Forest) -> list[np.ndarray]:
    drop = torch.cat(forest.drop, dim=1).double().numpy()
    keep = torch.cat(forest.keep, dim=1).double().numpy()
    return [oracle.curve(NODES - 1, SLOT, d, k) for d, k in zip(drop, keep, strict=True)]


def number_of(kept: list[Tensor]) -> int:
    return int(sum(level.sum() for level in kept))


def test_the_oracle_finds_the_best_antichain_of_all():
    random = np.random.default_rng(0)
    for _ in range(30):
        drop, keep = random.random(15), random.random(15)
        keep[:8] = 0.0
        best: dict[int, float] = {}
        for cost, kept in oracle.antichains(14, 8, drop, keep):
            best[len(kept)] = min(best.get(len(kept), np.inf), cost)
        found = oracle.curve(14, 8, drop, keep)
        assert found[: len(best)] == pytest.approx([best[k] for k in sorted(best)])


@pytest.mark.parametrize("cover", [1, 8, SLOT])
@pytest.mark.parametrize("seed", range(3))
def test_equals_greedy_over_the_envelope(seed, cover):
    forest = forest_of(6, seed, cover)
    corners = oracle.greedy_over_envelopes(curves(forest))
    most = int(forest.keep[0].isfinite().sum())
    for count, cost in corners[1::5]:
        if count < most:
            kept = choose(forest, count)
            assert number_of(kept) == count
            assert damage(forest, kept) == pytest.approx(cost, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("cover", [1, SLOT])
def test_prices_between_corners_cost_no_more_than_the_corner_before(cover):
    forest = forest_of(5, 9, cover)
    corners = oracle.greedy_over_envelopes(curves(forest))
    for (count, cost), (after, _) in zip(corners[2::9], corners[3::9], strict=False):
        for total in {count, (count + after) // 2}:
            assert damage(forest, choose(forest, total)) <= cost * (1 + 1e-4) + 1e-5


def test_lower_prices_only_refine_what_covers():
    """Nested: every entry of a higher price is the ancestor of entries of a lower one, or one itself."""
    forest = forest_of(20, 4, cover=SLOT)
    finer = None
    for total in (600, 300, 150, 60, 21, 10):
        _, high = _bracket(forest, total)
        kept = _between(forest, high, high, total).kept
        above = covered(kept).masked_fill(~forest.keep[0].isfinite(), -1)
        if finer is not None:
            assert not ((above >= 0) & (finer < 0)).any(), "an entry that was left out came back"
            assert (above[above >= 0] >= finer[above >= 0]).all()
        finer = above


def covered(kept: list[Tensor]) -> Tensor:
    """The level of the node that each leaf is in, -1 for none."""
    node = nodes_of(kept)
    starts = torch.tensor([level_slice(i).start for i in range(LEVELS + 1)])
    return torch.where(node >= 0, torch.searchsorted(starts, node, right=True) - 1, -1)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    cover=st.sampled_from([1, 2, 8, SLOT]),
    empty=st.sampled_from([0.0, 0.3, 0.97]),
    share=st.floats(0, 1),
)
def test_the_number_of_entries_is_exact_and_no_lane_is_empty(slots, seed, cover, empty, share):
    forest = forest_of(slots, seed, cover, empty, lanes=min(2, slots))
    forest = Forest(forest.drop, forest.keep, forest.lanes, torch.ones_like(forest.floors))
    most = int(forest.keep[0].isfinite().sum())
    lanes = len(forest.floors)
    total = lanes + round(share * (most - lanes))
    kept = choose(forest, total)
    assert number_of(kept) == total
    held = torch.zeros(lanes, dtype=torch.int64)
    held.index_add_(0, forest.lanes, torch.stack([level.sum(dim=1) for level in kept]).sum(dim=0))
    assert (held > 0).all()
    leaves = nodes_of(kept)
    assert all(
        len(np.unique(row[row >= 0])) == n for row, n in zip(leaves.numpy(), per_slot(kept), strict=True)
    )


def per_slot(kept: list[Tensor]) -> list[int]:
    return torch.stack([level.sum(dim=1) for level in kept]).sum(dim=0).tolist()


def test_trees_that_hold_nothing_get_nothing():
    forest = forest_of(4, 0)
    drop = [torch.zeros_like(level) for level in forest.drop]
    keep = [level.clone() for level in forest.keep]
    for level in range(LEVELS + 1):
        drop[level][0], keep[level][0] = forest.drop[level][0], forest.keep[level][0]
        keep[level][1:] = torch.inf
    kept = choose(Forest(drop, keep, forest.lanes, forest.floors), 5)
    assert number_of(kept) == 5 and not any(level[1:].any() for level in kept)


def test_entries_around_a_protected_one_do_not_merge():
    free = torch.ones(1, SLOT, dtype=torch.bool)
    free[0, 5] = False
    may = whole(free, ~free)[0]
    assert not may[level_slice(1)][2] or free[0, 4:6].sum() == 1
    assert not may[level_slice(3)][0] and not may[NODES - 1]
    assert may[level_slice(3)][1] and may[level_slice(1)][0]
    free[0, :5] = False
    assert whole(free, ~free)[0, NODES - 1]
