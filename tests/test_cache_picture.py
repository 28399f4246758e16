"""Lanes as a picture: what each token is in, and means over runs of tokens."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from minikv.cache.picture import binned, cells, resolution

Lane = list[tuple[int, int]]  # position and count of each entry


def lanes_of(*lanes: Lane) -> tuple[Tensor, Tensor]:
    """Positions and counts [1, lanes, n] as a store lists them."""
    longest = max(map(len, lanes))
    positions = torch.full((1, len(lanes), longest), -1, dtype=torch.int32)
    counts = torch.zeros(1, len(lanes), longest, dtype=torch.int64)
    for i, lane in enumerate(lanes):
        for j, (position, count) in enumerate(lane):
            positions[0, i, j], counts[0, i, j] = position, count
    return positions, counts


def partition(seed: int, num_tokens: int, dropped: float) -> tuple[Lane, list[int]]:
    """A lane of runs of neighbours at their rounded centres, some left out, and what each token is in."""
    source = random.Random(seed)
    lane, states = [], []
    while len(states) < num_tokens:
        size = min(source.choice((1, 1, 2, 3, 4, 7, 20)), num_tokens - len(states))
        start = len(states)
        gone = source.random() < dropped
        states += [0 if gone else size] * size
        if not gone:
            lane.append((round(start + (size - 1) / 2), size))
    return lane, states


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_neighbours_are_found_exactly(seed: int) -> None:
    made = [partition(10 * seed + i, 150, 0.0) for i in range(4)]
    held = resolution(*lanes_of(*(lane for lane, _ in made)), 150)
    assert held.dtype == torch.int32
    assert held[0].tolist() == [states for _, states in made]


@pytest.mark.parametrize("seed", range(20))
def test_beside_dropped_tokens_a_run_keeps_its_length_and_touches_no_other(seed: int) -> None:
    lane, states = partition(seed, 300, 0.4)
    held = resolution(*lanes_of(lane), 300)[0, 0].tolist()
    for position, count in lane:
        assert held[position] == count
    assert sum(state > 0 for state in held) == sum(count for _, count in lane)
    assert sum(a != b for a, b in zip(held, states, strict=True)) <= 2 * len(lane)


def test_a_run_that_lost_tokens_inside_is_cut_off_at_its_neighbours() -> None:
    # Four tokens around 5, of which there is room for two between the tokens at 4 and at 7.
    held = resolution(*lanes_of([(4, 1), (5, 4), (7, 1), (9, 9)]), 12)
    assert held.tolist() == [[[0, 0, 0, 0, 1, 4, 4, 1, 9, 9, 9, 9]]]


def test_lanes_end_where_they_end() -> None:
    positions, counts = lanes_of([(0, 1), (2, 3), (5, 1)], [(7, 1)], [])
    counts[positions < 0] = 5  # whatever a store leaves there
    assert resolution(positions, counts, 8)[0].tolist() == [
        [1, 3, 3, 3, 0, 1, 0, 0],
        [0] * 7 + [1],
        [0] * 8,
    ]
    assert resolution(positions[..., :0], counts[..., :0], 3).tolist() == [[[0] * 3] * 3]
    assert resolution(positions[..., :0], counts[..., :0], 0).shape == (1, 3, 0)


def test_means_over_equal_runs_of_tokens() -> None:
    values = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.5], [0.0] * 7])
    assert torch.equal(binned(values, 100), values)
    assert binned(values, 1).tolist() == [[pytest.approx(0.5)], [0.0]]
    assert binned(values, 3)[0].tolist() == pytest.approx([2 / 3, 0.5, 0.25])


def test_every_token_is_in_exactly_one_state() -> None:
    held = torch.tensor([[[1, 1, 4, 4, 4, 4, 0, 0], [1, 0, 2, 2, 3, 3, 3, 0]]])
    exact = cells(held, 8)
    dropped = (held == 0).float().mean(dim=1)
    assert torch.allclose(exact.kept + exact.merged + dropped, torch.ones(1, 8))
    assert exact.kept[0].tolist() == [1, 0.5, 0, 0, 0, 0, 0, 0]
    assert exact.merged[0].tolist() == [0, 0, 1, 1, 1, 1, 0.5, 0]
    # Of 16: 3 kept, 9 in the 3 prototypes, 4 dropped.
    whole = cells(held, 1)
    assert whole.kept.item() == pytest.approx(3 / 16)
    assert whole.merged.item() == pytest.approx(9 / 16)
    assert whole.entries.item() == pytest.approx(6 / 16)
    assert whole.sizes.item() == pytest.approx(3)
    assert cells(torch.ones(2, 3, 5, dtype=torch.int32), 2).sizes.tolist() == [[1, 1], [1, 1]]
