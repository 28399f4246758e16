"""Cutting text into spans and choosing which to zoom in, against what is demanded of both."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from minikv.cache.spans.routing import Zooming, choose, exchanged, worth_of
from minikv.cache.spans.segments import Cutting, anchors, segments


def lanes(seed, count, width):
    """Surprisal, free and kept entries of lanes of different lengths."""
    random = torch.Generator().manual_seed(seed)
    surprisal = torch.empty(count, width).exponential_(generator=random)
    surprisal[torch.rand(count, width, generator=random) < 0.1] = torch.nan
    length = torch.randint(1, width + 1, (count, 1), generator=random)
    valid = torch.arange(width) < length
    kept = valid & (torch.rand(count, width, generator=random) < 0.15)
    return surprisal, valid & ~kept, kept


@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.integers(1, 90),
    st.floats(0, 1),
    st.sampled_from([Cutting(), Cutting(0.0, 1.0, 1), Cutting(1.0, 0.0), Cutting(0.5, 0.5, 8)]),
)
def test_segments_part_every_lane_exactly_into_as_many_as_wanted(seed, count, width, part, cutting):
    surprisal, free, kept = lanes(seed, count, width)
    entries, floor = (free | kept).sum(1), kept.sum(1)
    wanted = torch.maximum(floor, ((entries - floor) * part).long() + floor)
    found = segments(surprisal, free, kept, wanted, cutting, 1000)
    for lane in range(count):
        of_lane = found[lane].tolist()
        assert all(
            place == -1 for place, f, k in zip(of_lane, free[lane], kept[lane], strict=True) if not (f or k)
        )
        used = [place for place in of_lane if place >= 0]
        assert used == sorted(used) and sorted(set(used)) == list(range(len(set(used))))
        assert len(set(used)) == int(wanted[lane])
        for index in kept[lane].nonzero()[:, 0].tolist():
            assert of_lane.count(of_lane[index]) == 1
        for place in set(used):
            members = [i for i, p in enumerate(of_lane) if p == place]
            assert members == list(range(members[0], members[-1] + 1))
        runs = (free[lane] & ~torch.cat((torch.tensor([False]), free[lane][:-1]))).sum()
        if int(wanted[lane] - floor[lane]) >= int(runs):
            assert all(place >= 0 for place, f in zip(of_lane, free[lane], strict=True) if f)


def test_anchors_stand_out_from_what_is_not_kept_anyway_and_from_their_neighbours():
    surprisal = torch.ones(1, 40)
    surprisal[0, 0] = 1000.0  # kept: must not raise the bar
    surprisal[0, [10, 12, 30]] = torch.tensor([6.0, 7.0, 6.5])
    free = torch.ones(1, 40, dtype=torch.bool)
    free[0, 0] = False
    assert anchors(surprisal, free, Cutting(1.0, 1.0, 4))[0].nonzero()[:, 0].tolist() == [12, 30]
    assert anchors(surprisal, free, Cutting(1.0, 1.0, 1))[0].nonzero()[:, 0].tolist() == [10, 12, 30]


def test_text_without_surprises_is_cut_into_equal_spans():
    free = torch.ones(1, 60, dtype=torch.bool)
    for values in (torch.zeros(1, 60), torch.full((1, 60), torch.nan)):
        found = segments(values, free, ~free, torch.tensor([6]), Cutting(), 1000)
        assert found[0].bincount().tolist() == [10] * 6


def test_with_few_segments_there_are_fewer_anchors():
    surprisal = torch.ones(1, 100)
    surprisal[0, 5::10] = 9.0 + torch.arange(10.0)
    free = torch.ones(1, 100, dtype=torch.bool)
    for wanted in (1, 2, 3, 7, 21, 40):
        found = segments(surprisal, free, ~free, torch.tensor([wanted]), Cutting(1.0, 1.0, 4), 1000)
        single = [5 + 10 * i for i in range(10) if (found[0] == found[0, 5 + 10 * i]).sum() == 1]
        assert len(single) == min(10, (wanted - 1) // 2)
        assert single == [5 + 10 * i for i in range(10 - len(single), 10)]


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 60), st.sampled_from([1, 3]))
def test_a_choice_takes_the_best_that_fit(seed, count, rows, largest):
    random = torch.Generator().manual_seed(seed)
    worth = torch.rand(3, count, generator=random)
    sizes = torch.randint(0, largest + 1, (3, count), generator=random)
    zoomed = torch.rand(3, count, generator=random) < 0.3
    chosen = choose(worth, sizes, zoomed, Zooming(rows, hold=1.5, least=0.1))
    assert not (chosen & ((sizes == 0) | (worth < 0.1))).any()
    assert bool(((sizes * chosen).sum(1) <= rows).all())
    rank = torch.where(zoomed, 1.5 * worth, worth)
    for lane in range(3):
        left_out = ~chosen[lane] & (sizes[lane] > 0) & (worth[lane] >= 0.1)
        for cell in left_out.nonzero()[:, 0].tolist():
            better = chosen[lane] & (rank[lane] >= rank[lane, cell])
            assert torch.equal(better, chosen[lane]), "a worse one was taken"
            # Nothing worse is taken instead, so at most one that did not fit leaves room.
            assert int((sizes[lane] * better).sum()) + largest > rows


def test_a_zoomed_cell_stays_while_it_earns_its_place():
    sizes, zoomed, zooming = (
        torch.tensor([[4, 4]]),
        torch.tensor([[True, False]]),
        Zooming(4, hold=1.5, least=0.0),
    )
    assert choose(torch.tensor([[0.2, 0.25]]), sizes, zoomed, zooming).tolist() == [[True, False]]
    assert choose(torch.tensor([[0.2, 0.35]]), sizes, zoomed, zooming).tolist() == [[False, True]]


@given(
    st.integers(0, 10_000),
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(0, 20),
    st.sampled_from([1, 3]),
)
def test_no_more_change_places_than_may(seed, count, rows, most, largest):
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, largest + 1, (3, count), generator=random)
    zooming = Zooming(rows, most, 1.5, 0.1)
    held = torch.zeros(3, count, dtype=torch.bool)
    for _ in range(4):
        worth = torch.rand(3, count, generator=random)
        chosen = choose(worth, sizes, held, zooming)
        free = rows - (sizes * held).sum(1)
        entering, leaving = exchanged(chosen, held, worth, sizes, free, most, zooming)
        assert not (entering & (held | ~chosen)).any()
        assert not (leaving & (chosen | ~held)).any()
        came, went = ((sizes * part).sum(1) for part in (entering, leaving))
        cells = entering.sum(1)
        assert bool((came <= free.clamp(min=0) + most)[cells > 1].all())
        assert bool((cells > 0).eq((chosen & ~held).any(1)).all()), "something better waits for ever"
        # Only as many leave as is needed, and those that are worth least.
        assert bool((went < (came - free).clamp(min=0) + largest).all())
        rank = torch.where(worth >= 0.1, 1.5 * worth, worth)
        for lane in range(3):
            waits, stays = (
                chosen[lane] & ~held[lane] & ~entering[lane],
                held[lane] & ~chosen[lane] & ~leaving[lane],
            )
            if waits.any() and entering[lane].any():
                assert worth[lane][waits].max() <= worth[lane][entering[lane]].min()
            if stays.any() and leaving[lane].any():
                assert rank[lane][stays].min() >= rank[lane][leaving[lane]].max()
        held = held & ~leaving | entering
        assert bool(((sizes * held).sum(1) <= rows).all())


def test_without_a_limit_the_chosen_are_there_at_once():
    random = torch.Generator().manual_seed(0)
    sizes, zooming = torch.ones(2, 50, dtype=torch.int64), Zooming(20, 50, 1.5, 0.0)
    held = torch.zeros(2, 50, dtype=torch.bool)
    for _ in range(5):
        worth = torch.rand(2, 50, generator=random)
        chosen = choose(worth, sizes, held, zooming)
        entering, leaving = exchanged(chosen, held, worth, sizes, 20 - held.sum(1), zooming.moves, zooming)
        held = held & ~leaving | entering
        assert torch.equal(held, chosen)


def test_worths_are_shares_of_all_that_is_seen():
    scores, others = torch.tensor([[[0.0, 1.0, 2.0, 9.0]]]), torch.tensor([[1.5]])
    sizes = torch.tensor([[1, 2, 3, 0]])
    found = worth_of(scores, sizes, others)[0]
    seen = torch.exp(torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.5]))
    torch.testing.assert_close(found[:3], torch.exp(scores[0, 0, :3]) / seen.sum())
    assert float(found[3]) == 0
    # The mean over query rows.
    both = worth_of(torch.cat((scores, scores + 3), 1), sizes, others.expand(1, 2))
    other = worth_of(scores + 3, sizes, others)
    torch.testing.assert_close(both, (found + other) / 2)
