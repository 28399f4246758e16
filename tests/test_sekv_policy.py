"""Summaries of spans against their definition, and attention at mixed resolution against a dense oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_compress import DECODER, LANES, filled
from tiny import TINY

from minikv.cache.compress import Compressor
from minikv.cache.evidence import Recorded
from minikv.cache.policies.registry import make_policy
from minikv.cache.policies.sekv import SeKV
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import MUTED, bound_scores
from minikv.cache.spans.segments import Cutting
from minikv.config import CacheConfig


def surprisal(tokens, seed=0):
    return torch.empty(tokens).exponential_(generator=torch.Generator().manual_seed(seed))


def compressed(tokens, budget, policy=None, sinks=2, recent=3, store=None, seed=0):
    store, seq = store or filled(tokens)
    policy = policy or SeKV(DECODER.rope)
    config = CacheConfig(policy="sekv", budget=budget, sinks=sinks, recent=recent, refit=False)
    Compressor(store, DECODER).compress(
        seq, policy, config, tokens, Recorded(surprisal=surprisal(tokens, seed))
    )
    store.check()
    return store, seq


def held(store, seq):
    slots, _ = store.slots(seq)
    keys, values = store.pool.read_rows(slots)
    return keys, values, store.pool.log_mass.view(-1)[slots], store.positions(seq).long(), store.counts(seq)


@given(st.integers(24, 120), st.integers(8, 60), st.integers(0, 50))
def test_lanes_hold_half_the_budget_and_stand_for_every_token_once(tokens, budget, seed):
    store, seq = compressed(tokens, budget, seed=seed)
    *_, positions, counts = held(store, seq)
    if budget >= tokens or not store.num_merged(seq):
        assert (counts.sum(-1) == tokens).all()
        return
    assert int(store.lengths[seq].sum()) <= budget * LANES // 2
    assert (counts.sum(-1) == tokens).all()
    start, follows = positions - counts // 2, counts.cumsum(-1) - counts
    assert torch.equal(start[counts > 0], follows[counts > 0])


@pytest.mark.parametrize("level", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_summaries_are_means_of_their_spans(level, weighted):
    policy = SeKV(DECODER.rope, level=level, weighted=weighted, bounds=False)
    full, source = filled(90)
    old_keys, old_values, *_ = held(full, source)
    store, seq = compressed(90, 40, policy)
    keys, values, masses, positions, counts = held(store, seq)
    said = surprisal(90).clamp(min=1e-6).double()
    layer, head = 1, 0
    for place, (position, count) in enumerate(zip(positions[layer, head], counts[layer, head], strict=True)):
        first = int(position - count // 2)
        span = slice(first, first + int(count))
        weights = said[span] if weighted else torch.ones(int(count), dtype=torch.float64)
        weights = weights / weights.sum()
        rows = old_keys[layer, head, span].double()
        if level:
            rows = turned(turned(rows, torch.arange(span.start, span.stop), back=True), position, back=False)
        mean = (weights[:, None] * rows).sum(0)
        torch.testing.assert_close(keys[layer, head, place].double(), mean, rtol=1e-4, atol=1e-5)
        mean = (weights[:, None] * old_values[layer, head, span].double()).sum(0)
        torch.testing.assert_close(values[layer, head, place].double(), mean, rtol=1e-4, atol=1e-5)
        assert masses[layer, head, place].item() == pytest.approx(math.log(int(count)), abs=1e-5)


def turned(rows, positions, back):
    """Rows [n, head_dim] turned to positions [n], or back."""
    cos, sin = (t.double() for t in DECODER.rope.cos_sin(torch.as_tensor(positions).reshape(-1)))
    half = rows.shape[-1] // 2
    cos, sin = cos[..., :half], (-1 if back else 1) * sin[..., :half]
    a, b = rows[..., :half], rows[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def test_what_was_cut_stays_cut_and_a_fixed_budget_only_joins_neighbours():
    store, seq = filled(60)
    compressed(60, 40, store=(store, seq))
    before = borders(store, seq)
    sizes = [int(store.lengths[seq].max())]
    extend(store, seq, 30)
    compressed(90, 100, store=(store, seq))  # grown: room for the new text
    grown = borders(store, seq)
    assert {b for b in grown if b < 50} == {b for b in before if b < 50}
    compressed(90, 30, store=(store, seq))
    assert borders(store, seq) <= grown
    sizes.append(int(store.lengths[seq].max()))
    assert sizes == [20, 15]


def borders(store, seq):
    *_, positions, counts = held(store, seq)
    return set((positions - counts // 2)[0, 0].tolist())


def extend(store, seq, count):
    """Append random rows at the positions that follow."""
    assert store.reserve(seq, count)
    slots = torch.from_numpy(store.next_slots(seq, count))
    shape = (*slots.shape, store.pool.head_dim)
    store.pool.write_rows(slots, torch.randn(shape), torch.randn(shape))
    store.pool.write_entries(slots, torch.arange(count) + int(store.num_tokens[seq]))
    store.append(seq, count)


def test_lanes_that_differ_are_cut_each_for_itself():
    store, seq = filled(60)
    keep = (
        torch.rand(TINY.num_layers, TINY.num_kv_heads, 60, generator=torch.Generator().manual_seed(3)) < 0.8
    )
    store.rewrite(seq, keep)
    compressed(60, 30, store=(store, seq))
    *_, counts = held(store, seq)
    assert torch.equal(counts.sum(-1), keep.sum(-1))
    assert int(store.lengths[seq].sum()) == 15 * LANES


def test_without_what_it_wants_recorded_the_window_policy_takes_its_place():
    store, seq = filled(60)
    config = CacheConfig(policy="sekv", budget=20, sinks=2, recent=3)
    policy = make_policy(
        "sekv", window=16, num_layers=2, num_query_heads=6, num_kv_heads=2, rope=DECODER.rope
    )
    Compressor(store, DECODER).compress(seq, policy, config, 60, Recorded())
    assert store.num_merged(seq) == 0


def test_a_plain_router_says_what_bounds_say_and_counts_its_numbers():
    router = Router.plain(2, 6, 16)
    q = torch.randn(3, 6, 16)
    assert torch.equal(router.queries(1, q), q)
    mass = torch.tensor([[0.5, -torch.inf], [1.0, 2.0]])
    offsets = router.offsets(0, mass, 3)
    assert offsets.shape == (2, 3, 2)
    assert torch.equal(offsets[:, 0], torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
    assert router.num_parameters == 2 * 6 * 18
    louder = replace(router, mass=router.mass + 2, bias=router.bias + 1)
    assert louder.offsets(0, mass, 3)[1, 2].tolist() == [3.0, 5.0]


def test_anchors_are_the_surprising_tokens():
    store, seq = filled(60)
    values = torch.ones(60)
    values[[20, 33]] = 9.0
    config = CacheConfig(policy="sekv", budget=40, sinks=2, recent=3, refit=False)
    policy = SeKV(DECODER.rope, Cutting(1.0, 0.5, 4), near=0.0)
    Compressor(store, DECODER).compress(seq, policy, config, 60, Recorded(surprisal=values))
    *_, positions, counts = held(store, seq)
    single = positions[0, 0][counts[0, 0] == 1].tolist()
    assert {20, 33} <= set(single)


def test_bounds_hold_every_key_of_their_span_and_are_not_seen():
    full, source = filled(90)
    old_keys, *_ = held(full, source)
    store, seq = compressed(90, 40)
    keys, values, masses, positions, counts = held(store, seq)
    merged = counts > 1
    assert (masses[merged] == MUTED).all() and (masses[counts == 1] == 0).all()
    for layer, head, place in merged.nonzero().tolist():
        first = int(positions[layer, head, place] - counts[layer, head, place] // 2)
        span = old_keys[layer, head, first : first + int(counts[layer, head, place])]
        assert torch.equal(keys[layer, head, place], span.amax(0))
        assert torch.equal(values[layer, head, place], span.amin(0))


@given(st.integers(0, 1000))
def test_no_key_within_bounds_scores_higher(seed):
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(5, 9, 16, generator=random)
    queries = torch.randn(7, 16, generator=random)
    found = bound_scores(queries, keys.amax(1), keys.amin(1))
    true = (keys @ queries.T / 4).amax(1).T
    assert bool((found >= true - 1e-5).all())


def test_bounds_are_joined_to_those_of_all_their_tokens():
    store, seq = filled(90)
    compressed(90, 60, store=(store, seq))
    compressed(90, 30, store=(store, seq))
    full, source = filled(90)
    old_keys, *_ = held(full, source)
    keys, values, _, positions, counts = held(store, seq)
    for place in (counts[0, 0] > 1).nonzero()[:, 0].tolist():
        first = int(positions[0, 0, place] - counts[0, 0, place] // 2)
        span = old_keys[0, 0, first : first + int(counts[0, 0, place])]
        assert torch.equal(keys[0, 0, place], span.amax(0)) and torch.equal(values[0, 0, place], span.amin(0))
