"""Entries of spans against the keys they stand for, and which text goes into which."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from test_compress import DECODER, LANES, filled
from tiny import TINY

from minikv.cache.compress import Compressor
from minikv.cache.evidence import Recorded
from minikv.cache.policies.registry import make_policy
from minikv.cache.policies.sekv import SeKV
from minikv.cache.spans.codes import Basis, cell_of, cells_of, centres, digits_of, unpack
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import MUTED
from minikv.cache.spans.segments import Cutting
from minikv.config import CacheConfig


def recorded(tokens, seed=0, said=None):
    """What the policy wants, of queries that are like one another."""
    random = torch.Generator().manual_seed(seed)
    window = min(64, tokens)
    return Recorded(
        queries=torch.randn(TINY.num_layers, TINY.num_query_heads, window, TINY.head_dim, generator=random),
        query_heads=torch.arange(TINY.num_query_heads).expand(TINY.num_layers, -1),
        query_positions=torch.arange(tokens - window, tokens),
        surprisal=torch.empty(tokens).exponential_(generator=random) if said is None else said,
    )


def compressed(tokens, budget, policy=None, sinks=2, recent=3, store=None, seed=0, basis=None):
    """The store, the sequence and the basis of its codes."""
    store, seq = store or filled(tokens)
    config = CacheConfig(policy="sekv", budget=budget, sinks=sinks, recent=recent, refit=False)
    report = Compressor(store, DECODER).compress(
        seq, policy or SeKV(), config, tokens, recorded(tokens, seed), basis=basis
    )
    store.check()
    return store, seq, report.basis


def held(store, seq):
    slots, _ = store.slots(seq)
    keys, values = store.pool.read_rows(slots)
    return keys, values, store.pool.log_mass.view(-1)[slots], store.positions(seq).long(), store.counts(seq)


@given(st.integers(24, 120), st.integers(8, 60), st.integers(0, 50))
def test_lanes_hold_their_part_of_the_budget_and_stand_for_every_token_once(tokens, budget, seed):
    store, seq, _ = compressed(tokens, budget, seed=seed)
    *_, positions, counts = held(store, seq)
    if budget >= tokens or not store.num_merged(seq):
        assert (counts.sum(-1) == tokens).all()
        return
    assert int(store.lengths[seq].sum()) <= budget * LANES * SeKV.resident
    assert (counts.sum(-1) == tokens).all()
    start, follows = positions - counts // 2, counts.cumsum(-1) - counts
    assert torch.equal(start[counts > 0], follows[counts > 0])


def test_what_was_cut_stays_cut_and_a_fixed_budget_only_joins_neighbours():
    store, seq = filled(60)
    _, _, basis = compressed(60, 40, store=(store, seq))
    before = borders(store, seq)
    sizes = [int(store.lengths[seq].max())]
    extend(store, seq, 30)
    compressed(90, 88, store=(store, seq), basis=basis)  # grown: room for the new text
    grown = borders(store, seq)
    assert {b for b in grown if b < 50} == {b for b in before if b < 50}
    compressed(90, 26, store=(store, seq), basis=basis)
    assert borders(store, seq) <= grown
    sizes.append(int(store.lengths[seq].max()))
    assert sizes == [24, 16]


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
    assert int(store.lengths[seq].sum()) == int(SeKV.resident * 30 * LANES)


def test_without_what_it_wants_recorded_the_window_policy_takes_its_place():
    store, seq = filled(60)
    config = CacheConfig(policy="sekv", budget=20, sinks=2, recent=3)
    policy = make_policy("sekv", window=16, num_layers=2, num_query_heads=6, num_kv_heads=2)
    Compressor(store, DECODER).compress(seq, policy, config, 60, Recorded())
    assert store.num_merged(seq) == 0


def test_a_plain_router_changes_nothing_and_counts_its_numbers():
    router = Router.plain(2, 6, 16)
    scale, bias = router.of_rows(1, kv_heads=2, rows=5)
    assert scale.shape == (2, 15, 4) and bias.shape == (2, 15, 1)
    assert bool((scale == 1).all()) and not bool(bias.any())
    assert router.num_parameters == 2 * 6 * 5
    louder = replace(router, bias=torch.arange(12.0).view(2, 6))
    assert louder.of_rows(1, kv_heads=2, rows=2)[1][1, :, 0].tolist() == [9, 9, 10, 10, 11, 11]


def test_anchors_are_the_surprising_tokens():
    store, seq = filled(60)
    values = torch.ones(60)
    values[[20, 33]] = 9.0
    config = CacheConfig(policy="sekv", budget=40, sinks=2, recent=3, refit=False)
    policy = SeKV(Cutting(1.0, 0.5, 4))
    Compressor(store, DECODER).compress(seq, policy, config, 60, recorded(60, said=values))
    *_, positions, counts = held(store, seq)
    single = positions[0, 0][counts[0, 0] == 1].tolist()
    assert {20, 33} <= set(single)


def decoded(store, seq, basis: Basis, layer, head, place):
    """The keys that an entry's codes stand for: [tokens, head_dim]."""
    keys, values, *_, counts = held(store, seq)
    count, dtype = int(counts[layer, head, place]), store.pool.dtype
    codes = unpack(torch.cat((keys, values), dim=-1)[layer, head, place], digits_of(dtype))
    cell = cell_of(torch.arange(count), torch.tensor(count), cells_of(dtype))
    own = basis.layer(layer)
    return own.mean[head].float() + centres(codes[cell]) @ own.decoder[head].float()


def nearest(store, seq, basis, old_keys, layer, head, place):
    """The keys of an entry's tokens as near as codes can be to them."""
    *_, positions, counts = held(store, seq)
    first = int(positions[layer, head, place] - counts[layer, head, place] // 2)
    own = basis.layer(layer)
    levels = own.levels(old_keys[layer])[head, first : first + int(counts[layer, head, place])]
    levels = levels.floor().clamp(-8, 7) + 0.5
    return own.mean[head].float() + levels @ own.decoder[head].float()


def test_spans_hold_codes_of_their_tokens_and_are_not_seen():
    full, source = filled(90)
    old_keys, *_ = held(full, source)
    store, seq, basis = compressed(90, 40)
    _, _, masses, _, counts = held(store, seq)
    merged = counts > 1
    assert (masses[merged] == MUTED).all() and (masses[counts == 1] == 0).all()
    assert int(counts.max()) <= cells_of(store.pool.dtype)
    for layer, head, place in merged.nonzero().tolist():
        found = decoded(store, seq, basis, layer, head, place)
        torch.testing.assert_close(found, nearest(store, seq, basis, old_keys, layer, head, place))


def test_joined_spans_hold_the_codes_that_their_parts_held():
    store, seq = filled(90)
    _, _, basis = compressed(90, 60, store=(store, seq))
    *_, positions, counts = held(store, seq)
    parts = {}
    for layer, head, place in (counts > 1).nonzero().tolist():
        keys = decoded(store, seq, basis, layer, head, place)
        first = int(positions[layer, head, place] - counts[layer, head, place] // 2)
        parts |= {(layer, head, first + i): key for i, key in enumerate(keys)}
    _, _, same = compressed(90, 30, store=(store, seq), basis=basis)
    assert all(torch.equal(getattr(same, name), getattr(basis, name)) for name in vars(basis))
    *_, positions, counts = held(store, seq)
    found = 0
    for layer, head, place in (counts > 1).nonzero().tolist():
        keys = decoded(store, seq, basis, layer, head, place)
        first = int(positions[layer, head, place] - counts[layer, head, place] // 2)
        for i, key in enumerate(keys):
            if (layer, head, first + i) in parts:
                torch.testing.assert_close(key, parts[layer, head, first + i])
                found += 1
    assert found > len(parts) // 2


def test_a_span_longer_than_an_entry_has_codes_gives_neighbours_one():
    full, source = filled(120)
    old_keys, *_ = held(full, source)
    store, seq, basis = compressed(120, 10, sinks=2, recent=2)
    *_, positions, counts = held(store, seq)
    place = int(counts[0, 0].argmax())
    count = int(counts[0, 0, place])
    assert count > cells_of(store.pool.dtype)
    keys = decoded(store, seq, basis, 0, 0, place)
    assert len(keys.unique(dim=0)) <= cells_of(store.pool.dtype)
    first = int(positions[0, 0, place] - count // 2)
    cell = cell_of(torch.arange(count), torch.tensor(count), cells_of(store.pool.dtype))
    own = basis.layer(0)
    levels = own.levels(old_keys[0])[0, first : first + count]
    several = int(cell.bincount().argmax())
    mean = levels[cell == several].mean(0).floor().clamp(-8, 7) + 0.5
    expected = own.mean[0].float() + mean @ own.decoder[0].float()
    torch.testing.assert_close(keys[int((cell == several).nonzero()[0])], expected)
