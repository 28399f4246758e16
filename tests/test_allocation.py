"""Allocation: sums are exact, floors and ceilings hold, and what one lane cannot use goes to others."""

from __future__ import annotations

import policy_oracles as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minikv.cache.policies.allocation import across_heads, by_layer_errors, fill, uniform
from minikv.cache.policies.base import Allocation


@st.composite
def fillings(draw):
    count = draw(st.integers(1, 24))
    floors = torch.tensor(draw(st.lists(st.integers(0, 60), min_size=count, max_size=count)))
    spare = torch.tensor(draw(st.lists(st.integers(0, 900), min_size=count, max_size=count)))
    # Zero, or within twelve orders of magnitude.
    weight = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))
    want = torch.tensor(draw(st.lists(weight, min_size=count, max_size=count)), dtype=torch.float64)
    ceilings = floors + spare
    total = draw(st.integers(int(floors.sum()), int(ceilings.sum()) + 50))
    return want, floors, ceilings, total


@given(fillings())
def test_fill_sums_exactly_within_bounds(case):
    want, floors, ceilings, total = case
    counts = fill(want, floors, ceilings, total)
    assert counts.dtype == torch.int64
    assert int(counts.sum()) == min(total, int(ceilings.sum()))
    assert (counts >= floors).all() and (counts <= ceilings).all()


@given(fillings())
def test_fill_gives_in_proportion_what_bounds_leave_free(case):
    want, floors, ceilings, total = case
    counts = fill(want, floors, ceilings, total)
    for i in range(len(want)):
        for j in range(len(want)):
            # One entry less for i and one more for j would be nearer to proportion only by rounding.
            if counts[i] > floors[i] and counts[j] < ceilings[j] and want[i] > 0 and want[j] > 0:
                low, high = float(counts[i] - 1) / float(want[i]), float(counts[j] + 1) / float(want[j])
                assert low <= high * (1 + 1e-9)


def test_fill_gives_to_places_that_want_nothing_only_what_is_left():
    floors, ceilings = torch.zeros(3, dtype=torch.int64), torch.tensor([50, 20, 50])
    assert fill(torch.tensor([0.0, 1.0, 0.0]), floors, ceilings, 15).tolist() == [0, 15, 0]
    assert fill(torch.tensor([0.0, 1.0, 0.0]), floors, ceilings, 41).tolist() == [11, 20, 10]
    assert fill(torch.zeros(3), floors, ceilings, 30).tolist() == [10, 10, 10]


def test_fill_refuses_floors_above_the_total():
    with pytest.raises(AssertionError, match="floors"):
        fill(torch.ones(2), torch.tensor([5, 5]), torch.tensor([9, 9]), 9)


@st.composite
def questions(draw, most: int = 60):
    layers, heads = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    grid = [[draw(st.integers(1, most)) for _ in range(heads)] for _ in range(layers)]
    lengths = torch.tensor(grid)
    guards = [[draw(st.integers(1, max(1, n // 3))) for n in row] for row in grid]
    protected = torch.tensor(guards)
    total = draw(st.integers(int(protected.sum()), int(lengths.sum()) + 9))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    scores = []
    for length, guard in zip(lengths, protected, strict=True):
        place = torch.arange(int(length.max()))
        # Few distinct values, so that ties are common.
        layer = torch.randint(0, 6, (heads, len(place)), generator=random).float()
        # Some heads above all others, so that these would starve but for their floors.
        layer += 4 * torch.randint(0, 3, (heads, 1), generator=random)
        layer = layer.masked_fill(place >= length[:, None], -torch.inf)
        scores.append(layer.masked_fill(place < guard[:, None], torch.inf))
    return Allocation(scores, lengths, protected, total)


def assert_legal(counts, question: Allocation) -> None:
    assert counts.dtype == torch.int64
    assert int(counts.sum()) == min(question.total, int(question.lengths.sum()))
    assert (counts >= question.protected).all() and (counts <= question.lengths).all()


def lanes_of(question: Allocation) -> list[list[list[float]]]:
    return [
        [row[:n].tolist() for row, n in zip(layer, length.tolist(), strict=True)]
        for layer, length in zip(question.scores, question.lengths, strict=True)
    ]


@given(questions())
def test_uniform_is_one_entry_at_a_time_to_the_shortest_lane(question):
    counts = uniform(question)
    assert_legal(counts, question)
    lengths, protected = question.lengths.tolist(), question.protected.tolist()
    assert counts.tolist() == oracle.uniform(lengths, protected, question.total)


@given(questions())
def test_heads_compete_for_what_their_layer_has(question):
    counts, shares = across_heads(question), uniform(question)
    assert_legal(counts, question)
    assert torch.equal(counts.sum(dim=1), shares.sum(dim=1))
    assert (counts >= (shares * 0.2).long()).all()
    lengths, protected = question.lengths.tolist(), question.protected.tolist()
    wanted = oracle.across_heads(lanes_of(question), lengths, protected, shares.tolist())
    assert counts.tolist() == wanted


def test_a_head_of_low_scores_keeps_a_fifth_of_its_even_share():
    low, high = torch.rand(100), torch.rand(100) + 1
    question = Allocation([torch.stack((low, high))], torch.tensor([[100, 100]]), torch.tensor([[2, 2]]), 60)
    assert across_heads(question).tolist() == [[6, 54]]
    assert across_heads(question, floor=1.0).tolist() == [[30, 30]]
    assert across_heads(question, shares=torch.tensor([[50, 50]])).tolist() == [[10, 90]]


def test_a_tie_between_heads_goes_to_the_lower_position():
    question = Allocation([torch.zeros(2, 10)], torch.full((1, 2), 10), torch.zeros(1, 2).long(), 7)
    assert across_heads(question).tolist() == [[4, 3]]


@given(questions(), st.integers(0, 99))
def test_layer_errors_keep_every_bound(question, seed):
    random = torch.Generator().manual_seed(seed)
    errors = torch.rand(len(question.scores), generator=random) ** 3
    counts = by_layer_errors(question, errors, minimum=8)
    assert_legal(counts, question)


def plain(layers: int, heads: int, length: int, budget: int, protected: int = 0) -> Allocation:
    shape = (layers, heads)
    scores = [torch.zeros(heads, length)] * layers
    return Allocation(
        scores, torch.full(shape, length), torch.full(shape, protected), budget * layers * heads
    )


@given(st.integers(0, 999), st.integers(33, 700), st.sampled_from([(4, 1), (30, 3), (32, 8)]))
def test_layer_errors_divide_as_published(seed, budget, shape):
    layers, heads = shape
    random = torch.Generator().manual_seed(seed)
    errors = torch.rand(layers, generator=random) ** 2 + 1e-3
    counts = by_layer_errors(plain(layers, heads, 5000, budget), errors)
    rows = oracle.layer_rows((errors.double() / errors.double().sum()).tolist(), budget * layers)
    assert counts.tolist() == [[row] * heads for row in rows]
    assert sum(rows) == budget * layers and min(rows) >= 32 and max(rows) <= 3 * budget


def scores_between(low: float, high: float, layers: int = 32) -> torch.Tensor:
    """Normalised errors whose least and greatest are as released; the other layers share the rest."""
    errors = torch.full((layers,), (1 - low - high) / (layers - 2), dtype=torch.float64)
    errors[-1], errors[8] = low, high
    return errors


@pytest.mark.parametrize(
    ("low", "high", "budget", "least", "greatest"),
    [
        (0.0071, 0.0442, 128, 54, 169),
        (0.0071, 0.0442, 256, 83, 350),
        (0.00704, 0.04422, 2048, 486, 2885),
        (0.0132, 0.0455, 128, 73, 173),
        (0.0132, 0.0455, 256, 126, 358),
        (0.01322, 0.04549, 2048, 885, 2966),
    ],
)
def test_layer_errors_reach_the_published_ranges(low, high, budget, least, greatest):
    counts = by_layer_errors(plain(32, 8, 10_000, budget), scores_between(low, high))
    # The released scores are known to three digits only.
    assert int(counts.min()) == pytest.approx(least, abs=2)
    assert int(counts.max()) == pytest.approx(greatest, abs=2)
    assert int(counts.sum()) == budget * 32 * 8


def test_equal_errors_are_uniform_whatever_their_unit():
    for unit in (1e-9, 1.0, 1e6):
        question = plain(7, 3, 900, 100)
        assert torch.equal(by_layer_errors(question, torch.full((7,), unit)), uniform(question))
    question = plain(7, 3, 900, 100)
    assert torch.equal(by_layer_errors(question, torch.zeros(7)), uniform(question))


def test_a_budget_below_the_minimum_is_uniform_and_not_exceeded():
    counts = by_layer_errors(plain(6, 2, 500, 20), torch.arange(6.0))
    assert (counts == 20).all()


def test_no_layer_takes_more_than_three_times_the_mean():
    errors = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
    counts = by_layer_errors(plain(8, 2, 5000, 100), errors)
    assert (counts[0] == 300).all() and int(counts.sum()) == 1600


def test_what_short_lanes_cannot_use_goes_to_the_others():
    question = plain(4, 2, 600, 200)
    lengths = question.lengths.clone()
    lengths[0] = 40
    short = Allocation(question.scores, lengths, question.protected, question.total)
    for counts in (uniform(short), by_layer_errors(short, torch.tensor([5.0, 1, 1, 2]))):
        assert_legal(counts, short)
        assert (counts[0] == 40).all()
    assert uniform(short)[1:].unique().tolist() == [253, 254]


def test_layers_stay_below_three_times_the_mean_while_others_can_take_what_is_left():
    question = plain(8, 1, 5000, 100)
    lengths = question.lengths.clone()
    lengths[1:4] = 10
    short = Allocation(question.scores, lengths, question.protected, question.total)
    counts = by_layer_errors(short, torch.tensor([6.0, 1, 1, 1, 1, 1, 1, 1]))
    assert_legal(counts, short)
    assert counts[:, 0].tolist()[:4] == [300, 10, 10, 10]


def test_layers_pass_three_times_the_mean_before_any_budget_is_lost():
    lengths = torch.tensor([[1000], [10], [10], [10]])
    question = Allocation([torch.zeros(1, 1000)] * 4, lengths, torch.zeros(4, 1).long(), 800)
    assert by_layer_errors(question, torch.ones(4))[:, 0].tolist() == [770, 10, 10, 10]


def test_a_budget_not_divisible_by_heads_is_still_used_up():
    question = plain(5, 3, 400, 64)
    odd = Allocation(question.scores, question.lengths, question.protected, question.total + 2)
    counts = by_layer_errors(odd, torch.tensor([1.0, 2, 3, 4, 5]))
    assert_legal(counts, odd)
    assert int((counts.max(dim=1).values - counts.min(dim=1).values).max()) <= 1
