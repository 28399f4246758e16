"""Refit: masses and values of chosen entries, fitted to what the full lanes answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import refit_oracle as oracle
import torch

import minikv.cache.refit as refit_module
from minikv.cache.policies.base import LayerView, Rows
from minikv.cache.refit import Options, refit

KV_HEADS, GROUP, WIDTH = 2, 3, 8
WEAK = Options(mass_ridge=1e-6, value_ridge=1e-6)


def layer(entries=40, window=8, future=12, seed=0, lengths=None, heads=None) -> LayerView:
    """A random layer; lanes of `lengths`, window queries of `heads` only."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths or [entries] * KV_HEADS)
    kv_heads, query_heads = len(lengths), len(lengths) * GROUP
    valid = torch.arange(entries) < lengths[:, None]
    heads = torch.arange(query_heads) if heads is None else torch.tensor(heads)
    return LayerView(
        layer=0,
        keys=torch.randn(kv_heads, entries, WIDTH, generator=rng),
        values=torch.randn(kv_heads, entries, WIDTH, generator=rng),
        log_mass=torch.zeros(kv_heads, entries),
        counts=torch.ones(kv_heads, entries, dtype=torch.int64),
        positions=torch.arange(entries).expand(kv_heads, -1).masked_fill(~valid, -1),
        valid=valid,
        num_tokens=entries,
        group=GROUP,
        output_weight=torch.empty(0, 0),
        queries=torch.randn(len(heads), window, WIDTH, generator=rng) if window else None,
        query_heads=heads if window else None,
        query_positions=torch.arange(entries - window, entries) if window else None,
        future_queries=torch.randn(query_heads, future, WIDTH, generator=rng) if future else None,
    )


def keep(view: LayerView, places, fixed=(0, 1)) -> Rows:
    """The entries at `places` (one list, or one per lane), of which those at places `fixed` are protected."""
    lanes = places if isinstance(places[0], list) else [places] * len(view.keys)
    longest = max(map(len, lanes))
    index = torch.tensor([lane + [0] * (longest - len(lane)) for lane in lanes])
    there = torch.arange(longest) < torch.tensor([[len(lane)] for lane in lanes])
    wide = index[..., None].expand(-1, -1, view.keys.shape[2])
    protected = torch.tensor([[place in fixed for place in lane] for lane in index.tolist()])
    return Rows(
        keys=view.keys.gather(1, wide),
        values=view.values.gather(1, wide),
        log_mass=view.log_mass.gather(1, index),
        positions=view.positions.gather(1, index).masked_fill(~there, -1),
        counts=view.counts.gather(1, index),
        fixed=protected & there,
    )


def parts(rows: Rows):
    return (rows.keys, rows.values, rows.log_mass, rows.positions, rows.counts, rows.fixed)


def same(a: Rows, b: Rows) -> bool:
    return all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


def errors(view: LayerView, rows: Rows) -> list[float]:
    return [oracle.judged_error(view, rows, head) for head in range(len(view.keys))]


CASES = {
    "window and future": (layer(), list(range(0, 40, 4))),
    "window only": (layer(future=0, seed=1), [0, 1, 5, 9, 20, 33]),
    "future only": (layer(window=0, seed=2), [0, 1, 5, 9, 20, 33]),
    "window sees what was before": (layer(entries=16, window=12, future=0, seed=3), [0, 1, 3, 7, 11, 14]),
    "few heads": (layer(seed=4, future=0, heads=[0, 1, 2, 5]), [0, 1, 5, 9, 20, 33]),
    "lanes differ": (layer(seed=5, lengths=[40, 23]), [[0, 1, 5, 9, 20, 33], [0, 1, 4, 22]]),
    "more entries than queries": (layer(entries=44, window=4, future=0, seed=6), list(range(0, 44, 2))),
}


@pytest.mark.parametrize("name", CASES)
def test_refit_matches_the_oracle(name, monkeypatch):
    monkeypatch.setattr(refit_module, "_STEPS", 600)
    view, places = CASES[name]
    rows = keep(view, places)
    wanted = oracle.refit(view, rows, 0.1, 0.3)
    given = refit(view, rows, Options(mass_ridge=0.1, value_ridge=0.3))
    torch.testing.assert_close(given.log_mass, wanted.log_mass, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(given.values, wanted.values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_the_bounded_steps_come_near_the_solution(name):
    view, places = CASES[name]
    rows = keep(view, places)
    wanted = oracle.refit(view, rows, 0.1, 0.3)
    given = refit(view, rows, Options(mass_ridge=0.1, value_ridge=0.3))
    reached, best = errors(view, given), errors(view, wanted)
    assert all(new <= 1.02 * old + 1e-9 for old, new in zip(best, reached, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_no_lane_answers_the_judging_queries_worse(seed):
    view = layer(seed=seed, window=seed, future=16 - 2 * seed)
    rows = keep(view, [0, 1, 4, 9, 16, 25, 38, 39], fixed=(0, 1, 39))
    before, after = errors(view, rows), errors(view, refit(view, rows, WEAK))
    assert all(new <= old * (1 + 1e-5) for old, new in zip(before, after, strict=True))


def test_duplicates_of_the_kept_entries_are_recovered():
    view = layer(entries=42, future=40)
    # Entry 2 + j stands there 1, 2, 4, 8, and 25 times.
    times = torch.tensor([1, 1, 1, 2, 4, 8, 25])
    first = times.cumsum(0) - times
    copies = first.repeat_interleave(times)
    view = replace(view, keys=view.keys[:, copies], values=view.values[:, copies])
    rows = keep(view, first.tolist())
    after = refit(view, rows, WEAK)
    torch.testing.assert_close(after.log_mass[:, 2:], times[2:].log().expand(2, -1), rtol=0, atol=0.1)
    assert all(new < 0.01 * old for old, new in zip(errors(view, rows), errors(view, after), strict=True))


def test_masses_of_the_full_lane_count():
    view = layer(entries=12, window=0, future=24)
    view.log_mass[:, 5] = 1.5
    # Entry 5 of mass e^1.5 and its halves, which share its mass, are the same lane.
    halves = [*range(6), 5, *range(6, 12)]
    other = layer(entries=13, window=0)
    split = replace(
        other,
        keys=view.keys[:, halves],
        values=view.values[:, halves],
        log_mass=view.log_mass[:, halves].clone(),
        future_queries=view.future_queries,
    )
    split.log_mass[:, 5:7] -= torch.tensor(2.0).log()
    places = [0, 1, 3, 9]
    whole, cut = refit(view, keep(view, places)), refit(split, keep(split, [0, 1, 3, 10]))
    torch.testing.assert_close(whole.log_mass, cut.log_mass, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(whole.values, cut.values, rtol=1e-3, atol=1e-3)
    plain = refit(replace(view, log_mass=torch.zeros(2, 12)), keep(view, places))
    assert not torch.allclose(plain.values, whole.values, atol=1e-2)


def test_only_masses_and_values_of_entries_that_are_not_fixed_change():
    view = layer()
    rows = keep(view, [0, 1, 8, 16, 30, 38, 39], fixed=(0, 1, 38, 39))
    before = [part.clone() for part in parts(rows)]
    after = refit(view, rows)
    assert all(torch.equal(old, new) for old, new in zip(before, parts(rows), strict=True))
    assert torch.equal(after.keys, rows.keys) and torch.equal(after.positions, rows.positions)
    assert torch.equal(after.counts, rows.counts) and torch.equal(after.fixed, rows.fixed)
    assert torch.equal(after.values[rows.fixed], rows.values[rows.fixed])
    assert torch.equal(after.log_mass[rows.fixed], rows.log_mass[rows.fixed])
    assert not torch.equal(after.values, rows.values)


def test_a_lane_that_refit_does_not_help_stays_bit_for_bit():
    view = layer(seed=3)
    # Lane 0 keeps all it has, so that nothing can be better; lane 1 does not.
    rows = keep(view, [list(range(40)), [0, 1, 20, 39]])
    after = refit(view, rows)
    assert torch.equal(after.values[0], rows.values[0]) and torch.equal(after.log_mass[0], rows.log_mass[0])
    assert not torch.equal(after.values[1], rows.values[1])


@pytest.mark.parametrize(
    ("window", "future", "fixed"), [(0, 0, (0,)), (2, 0, (0,)), (8, 8, tuple(range(40)))]
)
def test_nothing_changes_without_queries_judges_or_entries_that_may(window, future, fixed):
    view = layer(window=window, future=future)
    rows = keep(view, [0, 7, 20, 39], fixed=fixed)
    assert same(refit(view, rows), rows)


def test_heads_may_come_in_any_order():
    view = layer(lengths=[40, 31, 40], seed=7)
    rows = keep(view, [[0, 1, 5, 9, 20], [0, 1, 4], [0, 1, 7, 8, 39]])
    order = torch.tensor([2, 0, 1])
    heads = (order[:, None] * GROUP + torch.arange(GROUP)).flatten()
    moved = replace(
        view,
        **{name: getattr(view, name)[order] for name in ("keys", "values", "log_mass", "positions", "valid")},
        queries=view.queries[heads],
        future_queries=view.future_queries[heads],
    )
    there = refit(moved, Rows(*(part[order] for part in parts(rows))))
    here = refit(view, rows)
    torch.testing.assert_close(there.log_mass, here.log_mass[order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(there.values, here.values[order], rtol=1e-4, atol=1e-4)


DEGENERATE = {
    "one entry": (layer(entries=1, window=1, future=8), [0], ()),
    "one entry may change": (layer(), [0, 1, 20], (0, 1)),
    "an empty lane": (layer(lengths=[40, 0]), [[0, 1, 20], []], (0, 1)),
    "nothing is fixed": (layer(), [3, 20], ()),
    "huge logits": (replace(layer(), keys=layer().keys * 300), [0, 1, 8, 30], (0, 1)),
    "duplicated keys": (replace(layer(), keys=layer().keys[:, :1].expand(-1, 40, -1)), [0, 1, 8, 30], (0, 1)),
    "no values": (replace(layer(), values=torch.zeros(2, 40, WIDTH)), [0, 1, 8, 30], (0, 1)),
    "great masses": (replace(layer(), log_mass=torch.full((2, 40), 60.0)), [0, 1, 8, 30], (0, 1)),
    "window sees nothing": (replace(layer(), query_positions=torch.full((8,), -1)), [0, 1, 8, 30], (0, 1)),
}


@pytest.mark.parametrize("options", [Options(), Options(mass_ridge=0.0, value_ridge=0.0)])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_lanes_stay_finite(name, options):
    view, places, fixed = DEGENERATE[name]
    rows = keep(view, places, fixed)
    after = refit(view, rows, options)
    assert after.values.isfinite().all() and after.log_mass.isfinite().all()


@pytest.mark.parametrize("seed", range(4))
def test_masses_and_values_stay_in_the_range_of_the_lane(seed):
    view = layer(seed=seed, entries=40)
    after = refit(view, keep(view, [0, 1, 7, 20, 21, 35]), WEAK)
    assert (after.log_mass.abs() <= torch.tensor(38.0).log() + 1e-5).all()
    low, high = view.values.amin(dim=1, keepdim=True), view.values.amax(dim=1, keepdim=True)
    assert (after.values >= low).all() and (after.values <= high).all()
