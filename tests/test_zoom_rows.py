"""Which rows of an area tokens take and leave, against one loop over them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zooming import LAYERS, Sequence, Shape, batch_of

from minikv.cache.spans import zoom as module
from minikv.cache.spans.zoom import Cells

ONE = Sequence(Shape(heads=3, group=1, head_dim=16, spans=9, rows=70), seed=5)


def some(random, chance):
    return torch.rand(ONE.shape.heads, ONE.num_tokens, generator=random) < chance


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.05, 0.3]))
def test_rows_are_left_and_taken_in_order(seed, full, chance):
    random, zoom = torch.Generator().manual_seed(seed), ONE.zoom
    mass, owner = zoom._pool.log_mass.view(-1), zoom.owner[0]
    for head in range(ONE.shape.heads):
        count = min(int(full * ONE.num_tokens), owner.shape[1])
        rows = torch.randperm(owner.shape[1], generator=random)[:count]
        owner[head] = -1
        owner[head, rows] = torch.randperm(ONE.num_tokens, generator=random)[:count]
    mass[zoom.rows[0]] = torch.where(owner >= 0, 0.5, -torch.inf)
    leaving, entering = some(random, 0.3) & zoom._held(0), some(random, chance) & ~zoom._held(0)
    for head in range(ONE.shape.heads):
        room = int((owner[head] < 0).sum() + leaving[head].sum())
        entering[head, entering[head].nonzero()[room:, 0]] = False
    expected, entered, masses = owner.clone(), torch.full_like(owner, -1), mass[zoom.rows[0]].clone()
    for head in range(ONE.shape.heads):
        for row, token in enumerate(owner[head].tolist()):
            if token >= 0 and leaving[head, token]:
                expected[head, row], masses[head, row] = -1, -torch.inf
        free = (expected[head] < 0).nonzero()[:, 0]
        for row, token in zip(free.tolist(), entering[head].nonzero()[:, 0].tolist(), strict=False):
            expected[head, row] = entered[head, row] = token
    assert torch.equal(zoom._change(0, entering.long() - leaving.long()), entered)
    assert torch.equal(zoom.owner[0], expected)
    assert torch.equal(mass[zoom.rows[0]], masses)


@pytest.mark.parametrize("cells", [4, 24])
def test_the_tokens_of_cells_are_all_that_lie_in_them(cells):
    of = Cells.of(ONE.zoom.start[0], ONE.zoom.size[0], cells)
    chance = torch.rand(of.first.shape, generator=torch.Generator().manual_seed(cells))
    entering, leaving = (chance < 0.4) & (of.size > 0), (chance > 0.7) & (of.size > 0)
    found = ONE.zoom._moving(of, entering, leaving)
    expected = torch.zeros_like(found)
    for some, number in ((entering, 1), (leaving, -1)):
        for head, cell in some.nonzero().tolist():
            first = int(of.first[head, cell])
            expected[head, first : first + int(of.size[head, cell])] = number
    assert set(expected.unique().tolist()) == {-1, 0, 1} and torch.equal(found, expected)


@pytest.mark.parametrize("router", [False, True])
def test_a_few_heads_at_a_time_choose_what_all_at_once_would(router, monkeypatch):
    shape, seen = Shape(heads=5, group=2, rows=30, router=router), []
    for most in (module.MOST_NUMBERS, 1, 2 * (60 * 24) * (3 * 2 + 64)):
        monkeypatch.setattr(module, "MOST_NUMBERS", most)
        one = Sequence(shape, seed=7)
        one.write_new(3)
        batch, q = batch_of([one], [3]), one.queries(3)
        seen.append([one.zoom.decide(batch, 0, layer, q) for layer in range(LAYERS)])
    assert bool((seen[0][0] >= 0).any())
    assert all(map(torch.equal, seen[0], seen[1])) and all(map(torch.equal, seen[0], seen[2]))
