"""The compressor with policies that merge, and with a refit, against what the lanes held before."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import Pairs
from test_compress import DECODER, LANES, LAYERS, PAGE, Ordered, Uneven, cache, filled
from tiny import TINY

from minikv.cache.ceiling import Ceiling
from minikv.cache.compress import Compressor, evidence_for, refits
from minikv.cache.evidence import Recorded
from minikv.cache.policies.base import Evidence
from minikv.cache.showing import joined, shown_to
from minikv.config import CacheConfig
from minikv.errors import ConfigError

REFIT = "minikv.cache.refit"


def entries(store, seq):
    """Keys, values [layers, kv_heads, n, head_dim], log masses and counts [layers, kv_heads, n]."""
    slots, valid = store.slots(seq)
    keys, values = store.pool.read_rows(slots)
    masses = store.pool.log_mass.view(-1)[slots].masked_fill(~valid, -torch.inf)
    return keys, values, masses, store.counts(seq)


def compressed(tokens, config, policy, recorded=None, store=None, **options):
    store, seq = store or filled(tokens)
    report = Compressor(store, DECODER).compress(
        seq, policy, config, tokens, recorded or Recorded(), **options
    )
    store.check()
    return store, seq, report


def evidence(tokens=60, window=4, future=8):
    """Recorded as for a refit."""
    generator = torch.Generator().manual_seed(1)
    shape = TINY.num_layers, TINY.num_query_heads
    return Recorded(
        queries=torch.randn(*shape, window, TINY.head_dim, generator=generator),
        query_heads=torch.arange(TINY.num_query_heads).expand(shape),
        query_positions=torch.arange(tokens - window, tokens),
        residual_norms=torch.rand(TINY.num_layers, window, generator=generator),
        future=torch.randn(*shape, future, TINY.head_dim, generator=generator),
    )


# Merging


def test_merged_lanes_stand_for_all_tokens_and_hold_what_the_budget_allows():
    store, seq, report = compressed(60, cache(20, sinks=2, recent=3), Pairs())
    assert report.entries == (60 * LANES, 20 * LANES) and report.merged > 0
    assert report.bytes[1] == store.bytes_of(seq) == 20 // PAGE * LANES * store.pool.page_bytes
    keys, values, masses, counts = entries(store, seq)
    assert (counts.sum(-1) == 60).all()
    assert store.has_mass[seq]
    torch.testing.assert_close(masses.exp().sum(-1), torch.full(counts.shape[:2], 60.0))
    torch.testing.assert_close((values * counts[..., None]).sum(2), full_sums(60)[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((keys * counts[..., None]).sum(2), full_sums(60)[0], rtol=1e-4, atol=1e-4)


def full_sums(tokens):
    store, seq = filled(tokens)
    keys, values, _, _ = entries(store, seq)
    return keys.sum(2), values.sum(2)


def test_protected_entries_stay_as_they_are_among_merged_ones():
    config = cache(20, sinks=2, recent=3)
    store, seq = filled(60)
    before = entries(store, seq)
    positions = store.positions(seq)
    compressed(60, config, Pairs(), store=(store, seq), pinned=((30, 33),))
    kept = [0, 1, 30, 31, 32, 57, 58, 59]
    after = entries(store, seq)
    for layer, head in ((0, 0), (1, 1)):
        places = [store.positions(seq)[layer, head].tolist().index(p) for p in kept]
        assert (after[3][layer, head, places] == 1).all()
        assert (after[2][layer, head, places] == 0).all()
        for mine, old in zip(after[:2], before[:2], strict=True):
            assert torch.equal(mine[layer, head, places], old[layer, head, positions[layer, head, kept]])


def test_a_budget_that_holds_everything_measures_and_changes_nothing():
    for config, tokens in ((cache(1.0), 60), (cache(60), 60), (cache("1MiB"), 60), (cache(0.1), 20)):
        policy = Pairs()
        store, seq, report = compressed(tokens, config, policy)
        assert not policy.views and report.merged == 0 and not store.has_mass[seq]
        assert report.entries[0] == report.entries[1]


def test_merged_lanes_are_merged_again_and_stand_for_the_same_tokens():
    config = cache(20, sinks=2, recent=3)
    store, seq, _ = compressed(60, config, Pairs())
    policy = Pairs()
    compressed(60, cache(8, sinks=2, recent=3), policy, store=(store, seq))
    assert (policy.views[0].counts.sum(-1) == 60).all()
    _, values, masses, counts = entries(store, seq)
    assert counts.shape[-1] == 8 and (counts.sum(-1) == 60).all()
    torch.testing.assert_close(masses.exp().sum(-1), torch.full(counts.shape[:2], 60.0))
    torch.testing.assert_close((values * counts[..., None]).sum(2), full_sums(60)[1], rtol=1e-4, atol=1e-4)


def test_entries_evicted_from_merged_lanes_take_their_counts_and_masses_along():
    store, seq, _ = compressed(60, cache(20, sinks=2, recent=3), Pairs())
    policy = Uneven(torch.arange(60).float())
    compressed(60, cache(12, sinks=2, recent=3), policy, store=(store, seq))
    _, _, masses, counts = entries(store, seq)
    held = counts > 0
    torch.testing.assert_close(masses[held], counts[held].float().log())


def test_a_merging_policy_whose_evidence_is_missing_gives_way_to_the_window():
    policy = Pairs(Evidence(window=4))
    store, seq, report = compressed(60, cache(10, sinks=2, recent=2), policy)
    assert not policy.views and report.merged == 0
    assert store.positions(seq)[0, 0].tolist() == [0, 1, *range(52, 60)]


@given(st.integers(LANES, 120), st.integers(0, 40), st.integers(21, 90))
@settings(max_examples=25, deadline=None)
def test_merged_lanes_leave_the_room_asked_for_under_a_ceiling(pages, wanted, tokens):
    store, seq = filled(tokens)
    config = cache(f"{pages * store.pool.page_bytes}B", sinks=1, recent=2)
    ceiling = Ceiling.of(config.limit, store)
    room = min(wanted, ceiling.per_lane - 1)
    compressed(tokens, config, Pairs(), store=(store, seq), room=room)
    lengths = store.lengths[seq]
    assert ceiling.pages(lengths, room) <= pages
    assert lengths.min() >= 1
    assert lengths.max() == tokens or pages - ceiling.pages(lengths, room) < 2 * LANES


def test_policies_see_only_the_evidence_that_they_asked_for():
    policy = Pairs(Evidence(window=2, residual_norms=True))
    found = evidence()
    compressed(60, cache(20), policy, found)
    view = policy.views[1]
    assert torch.equal(view.queries, found.queries[1, :, -2:])
    assert torch.equal(view.residual_norms, found.residual_norms[1, -2:])
    assert view.query_positions.tolist() == [58, 59]
    assert view.future_queries is None
    heads = torch.tensor([[4, 1], [0, 3]])
    shown = shown_to(found, Evidence(window=3, heads=heads))
    assert shown.query_heads.tolist() == [[1, 4], [0, 3]]
    assert torch.equal(shown.queries[0], found.queries[0, [1, 4], -3:])
    assert shown_to(shown, Evidence(window=3, heads=heads)).queries.equal(shown.queries)


def test_queries_still_to_come_are_rotated_past_the_last_position():
    policy = Pairs(Evidence(future=4))
    found = evidence(future=4)
    compressed(60, cache(20), policy, found)
    got = policy.views[0].future_queries
    positions = torch.tensor([60, 92, 124, 156])
    cos, sin = DECODER.rope.cos_sin(positions)
    half = TINY.head_dim // 2
    pairs = torch.complex(*(found.future[0, ..., i : i + half].double() for i in (0, half)))
    turned = pairs * torch.complex(cos[:, :half].double(), sin[:, :half].double())
    torch.testing.assert_close(got.double(), torch.cat((turned.real, turned.imag), dim=-1))


# What is demanded of a policy


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda rows: replace(rows, positions=rows.positions.flip(1)), "ascend"),
        (lambda rows: replace(rows, positions=rows.positions + 60), "past the sequence"),
        (lambda rows: replace(rows, counts=rows.counts * 0), "no token"),
        (lambda rows: replace(rows, keys=rows.keys * torch.nan), "not finite"),
        (lambda rows: replace(rows, positions=rows.positions[:, :-1]), "as many rows"),
    ],
)
def test_rows_that_cannot_be_are_caught_before_they_are_written(fault, words):
    class Faulty(Pairs):
        def merge(self, *args):
            return fault(super().merge(*args))

    store, seq = filled(60)
    before = entries(store, seq)
    with pytest.raises(AssertionError, match=words):
        compressed(60, cache(20), Faulty(), store=(store, seq))
    store.check()
    for mine, old in zip(entries(store, seq), before, strict=True):
        assert torch.equal(mine, old)


def test_a_policy_that_fails_in_a_later_layer_leaves_lanes_that_can_be_freed():
    class Failing(Pairs):
        def merge(self, view, *args):
            if view.layer:
                raise MemoryError
            return super().merge(view, *args)

    store, seq = filled(60)
    with pytest.raises(MemoryError):
        compressed(60, cache(20), Failing(), store=(store, seq))
    store.check()
    assert store.lengths[seq].tolist() == [[kept] * TINY.num_kv_heads for kept in (20, 60)]
    store.close(seq)
    assert store.pool.num_free == store.pool.num_pages


# Refit


@pytest.fixture
def fake_refit(monkeypatch):
    """A refit that adds 1 to the masses and values of what is not protected."""
    calls = []

    def refit(view, rows, *, seen=None):
        calls.append((view, rows))
        free = ~rows.fixed & (rows.positions >= 0)
        return replace(rows, values=rows.values + free[..., None], log_mass=rows.log_mass + free)

    monkeypatch.setitem(sys.modules, REFIT, SimpleNamespace(refit=refit))
    return calls


@pytest.mark.parametrize("policy", [Ordered(torch.arange(60.0)), Uneven(torch.arange(60.0)), Pairs()])
def test_a_refit_changes_masses_and_values_and_neither_keys_nor_protected_entries(policy, fake_refit):
    config = cache(20, sinks=2, recent=3, window=4)
    stores = []
    for refit in (False, True):
        store, seq, _ = compressed(60, replace(config, refit=refit), policy, evidence())
        stores.append(entries(store, seq))
        assert store.has_mass[seq] == (refit or isinstance(policy, Pairs))
    plain, fitted = stores
    assert len(fake_refit) == LAYERS
    assert torch.equal(plain[0], fitted[0]) and torch.equal(plain[3], fitted[3])
    for layer, (view, rows) in enumerate(fake_refit):
        assert view.layer == layer and view.keys.shape[1] == 60
        assert view.queries.shape == (TINY.num_query_heads, 4, TINY.head_dim)
        assert view.future_queries.shape == (TINY.num_query_heads, 8, TINY.head_dim)
        held = rows.positions >= 0
        assert (rows.fixed.sum(1) == 5).all()
        free = (held & ~rows.fixed).float()
        difference = (fitted[1] - plain[1])[layer, :, : held.shape[1]]
        torch.testing.assert_close(difference[held], free[held][:, None].expand(-1, TINY.head_dim))
        masses = (fitted[2] - plain[2])[layer, :, : held.shape[1]]
        torch.testing.assert_close(masses[held], free[held])


def test_without_the_evidence_for_it_there_is_no_refit(fake_refit):
    config = cache(20, refit=True)
    store, seq, _ = compressed(60, config, Ordered(torch.arange(60.0)))
    assert not fake_refit and not store.has_mass[seq]


def test_a_policy_may_refit_by_itself_and_the_configuration_has_the_last_word(fake_refit):
    policy = Pairs(refit_from=3.0)
    for asked, expected in ((None, True), (True, True), (False, False)):
        config = cache(20, refit=asked)
        assert refits(policy, config) is expected
        wanted = evidence_for(policy, config)
        assert bool(wanted.future) is bool(wanted.window) is expected
    assert not refits(Pairs(), cache(20))


@pytest.mark.parametrize(("budget", "expected"), [(20, True), (21, False)])
def test_a_policy_that_refits_by_itself_does_so_from_its_ratio_on(fake_refit, budget, expected):
    config = cache(budget)
    compressed(60, replace(config, window=4), Pairs(refit_from=3.0), evidence())
    assert bool(fake_refit) is expected


def test_a_refit_asks_for_all_heads_beside_what_the_policy_wants():
    heads = torch.tensor([[1, 2], [0, 3]])
    policy = Pairs(Evidence(window=2, heads=heads, surprisal=True, output_weight=True))
    wanted = evidence_for(policy, cache(20, window=6, refit=True))
    assert (wanted.window, wanted.heads, wanted.surprisal) == (6, None, True)
    assert wanted.output_weight and wanted.future
    every = joined([Evidence(residual_norms=True), Evidence(future=3), Evidence(window=2, future=1)])
    assert (every.window, every.future, every.residual_norms) == (2, 3, True)


def test_refitting_what_keeps_everything_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"^refit corrects .*everything\.$"):
        CacheConfig(refit=True)
    with pytest.raises(ConfigError, match=r"^refit corrects .* of policy sekv stand for themselves"):
        CacheConfig(policy="sekv", budget=0.1, refit=True)
    with pytest.raises(ConfigError, match="refit must be"):
        CacheConfig(policy="snapkv", budget=0.5, refit="yes")
    assert CacheConfig(refit=False).refit is False
