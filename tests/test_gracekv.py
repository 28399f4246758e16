"""GraceKV against its float64 oracle, and the contract of a policy that merges."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import gracekv_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minikv.cache.policies.base import LayerView, Rows, output_gram
from minikv.cache.policies.gracekv import GraceKV
from minikv.cache.policies.trees import measure
from minikv.cache.policies.trees.probes import observe
from minikv.cache.policies.trees.slots import LEVELS, SLOT, level_slice, tree_sums
from minikv.models.config import RopeConfig
from minikv.models.rope import Rope

WIDTH, WINDOW = 8, 6
ROPE = Rope(RopeConfig(), WIDTH)
VARIANTS = {
    "default": {},
    "cover": {"smallest_drop": SLOT},
    "pairs": {"smallest_drop": 2},
    "coarse": {"smallest_drop": 8},
    "norms": {"additive": True},
}


def policy_of(**options) -> GraceKV:
    return GraceKV(WINDOW, ROPE, **options)


def view_of(
    lengths: tuple[int, ...], group: int = 2, layer: int = 0, seed: int = 0, massive: bool = False
) -> LayerView:
    """Random lanes of these lengths; neighbours resemble each other, as they do in a text."""
    random = torch.Generator().manual_seed(100 * seed + layer)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    kv_heads, longest, heads = len(lengths), max(lengths), len(lengths) * group
    tokens = 2 * longest + WINDOW
    positions = torch.full((kv_heads, longest), -1, dtype=torch.int64)
    for lane, length in zip(positions, lengths, strict=True):
        lane[:length] = torch.randperm(2 * longest, generator=random)[:length].sort().values
    counts = torch.randint(1, 5 if massive else 2, (kv_heads, longest), generator=random)
    return LayerView(
        layer=layer,
        keys=normal(kv_heads, longest, WIDTH),
        values=normal(kv_heads, longest, WIDTH) + normal(kv_heads, 1, WIDTH),
        log_mass=(counts * (1 + massive * torch.rand(counts.shape, generator=random))).log(),
        counts=counts,
        positions=positions,
        valid=positions >= 0,
        num_tokens=tokens,
        group=group,
        output_weight=(weight := normal(12, heads * WIDTH) / 3),
        output_gram=output_gram(weight, WIDTH),
        queries=1.5 * normal(heads, WINDOW, WIDTH),
        query_heads=torch.arange(heads),
        query_positions=torch.arange(tokens - WINDOW, tokens),
        residual_norms=torch.rand(WINDOW, generator=random) + 1,
    )


def ends(view: LayerView, sinks: int = 2, recent: int = 3) -> Tensor:
    place = torch.arange(view.valid.shape[1])
    return view.valid & ((place < sinks) | (place >= view.valid.sum(dim=1, keepdim=True) - recent))


def compressed(
    policy: GraceKV, views: list[LayerView], total: int, **guard: int
) -> tuple[list[Tensor], list[Rows]]:
    protected = [ends(view, **guard) for view in views]
    measured = [policy.measure(view, held) for view, held in zip(views, protected, strict=True)]
    places = policy.assign(measured, total)
    rows = [policy.merge(*each) for each in zip(views, measured, places, protected, strict=True)]
    return places, rows


def number_of(places: list[Tensor]) -> int:
    return sum(int((lane.max(dim=1).values + 1).sum()) for lane in places)


def members(lane: Tensor) -> list[list[int]]:
    return [(lane == place).nonzero()[:, 0].tolist() for place in range(int(lane.max()) + 1)]


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_damages_and_masses_equal_the_oracle(group, massive):
    view = view_of((75, 40), group, massive=massive)
    protected = ends(view)
    found = policy_of().measure(view, protected).damage
    for head in range(2):
        lane = oracle.Lane(view, protected, head, ROPE)
        for level, index in [
            (0, 2),
            (0, 33),
            (1, 1),
            (1, 9),
            (2, 3),
            (3, 1),
            (4, 1),
            (5, 0),
            (6, 0),
            (2, 16),
        ]:
            first = index << level
            node = [j for j in lane.free if first <= j < first + (1 << level)]
            if not node:
                continue
            slot, inside = first // SLOT, level_slice(level).start + (first % SLOT >> level)
            drop, keep, log_mass = lane.damage(node)
            assert found.drop[head, slot, inside].item() == pytest.approx(drop, rel=2e-3, abs=1e-8)
            assert found.keep[head, slot, inside].item() == pytest.approx(keep, rel=5e-3, abs=2e-3 * drop)
            if len(node) > 1:
                assert found.log_mass[head, slot, inside].item() == pytest.approx(log_mass, abs=5e-3)


def test_slots_taken_in_blocks_are_as_those_taken_together(monkeypatch):
    view = view_of((400, 330), massive=True)
    found = {}
    for block in (1, 10, 1000):
        monkeypatch.setattr(measure, "_BLOCK", block)
        found[block] = policy_of().measure(view, ends(view)).damage
    for name in ("drop", "keep", "log_mass", "value_weights"):
        whole = getattr(found[1000], name)
        for block in (1, 10):
            torch.testing.assert_close(getattr(found[block], name), whole, rtol=1e-3, atol=1e-6)


def test_sums_over_trees_are_those_of_the_entries_below():
    leaves = torch.randn(3, 2, SLOT)
    sums = tree_sums(leaves)
    for level in range(LEVELS + 1):
        below = leaves.unflatten(2, (-1, 1 << level)).sum(dim=3)
        torch.testing.assert_close(sums[..., level_slice(level)], below, rtol=1e-5, atol=1e-5)


def test_a_layers_roots_follow_its_grams():
    policy, view = policy_of(), view_of((90, 70))
    other = replace(view, output_gram=4 * view.output_gram)
    single, double = (policy.measure(each, ends(view)).damage.drop for each in (view, other))
    torch.testing.assert_close(double, 4 * single, rtol=1e-3, atol=1e-7)


def test_a_prototype_with_the_best_mass_is_never_worse_than_none_on_what_was_observed():
    found = policy_of(shifts=0).measure(view_of((200, 130)), ends(view_of((200, 130)))).damage
    merges = found.keep.isfinite()
    assert (found.keep <= found.drop * 1.01 + 1e-7)[merges].all()


@pytest.mark.parametrize("massive", [False, True])
def test_merged_entries_are_the_oracles(massive):
    view = view_of((90, 70), massive=massive)
    (places,), (rows,) = compressed(policy_of(), [view], 45)
    protected = ends(view)
    for head in range(2):
        lane = oracle.Lane(view, protected, head, ROPE)
        for place, node in enumerate(members(places[head])):
            mine = {name: getattr(rows, name)[head, place] for name in ("keys", "values", "positions")}
            assert rows.counts[head, place] == view.counts[head, node].sum()
            assert bool(rows.fixed[head, place]) == bool(protected[head, node].any())
            if len(node) == 1:
                assert torch.equal(mine["keys"], view.keys[head, node[0]])
                assert torch.equal(mine["values"], view.values[head, node[0]])
                assert rows.log_mass[head, place] == view.log_mass[head, node[0]]
                continue
            key, value, position = lane.prototype(node)
            torch.testing.assert_close(mine["keys"].double(), torch.from_numpy(key), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(mine["values"].double(), torch.from_numpy(value), atol=1e-5, rtol=1e-4)
            assert mine["positions"] == position
            assert rows.log_mass[head, place].item() == pytest.approx(lane.damage(node)[2], abs=5e-3)


def attention(query: Tensor, keys: Tensor, values: Tensor, log_mass: Tensor) -> Tensor:
    logits = keys.double() @ query.double() / WIDTH**0.5 + log_mass.double()
    return logits.softmax(dim=0) @ values.double()


def test_entries_that_are_alike_merge_without_loss():
    view = view_of((SLOT * 2, SLOT * 2))
    alike = torch.zeros_like(view.positions, dtype=torch.bool)
    alike[:, SLOT:] = True
    same = replace(
        view,
        keys=view.keys.masked_fill(alike[..., None], 0.0),  # nothing to rotate
        values=torch.where(alike[..., None], torch.ones(WIDTH), view.values),
        log_mass=torch.zeros_like(view.log_mass),
        positions=torch.arange(2 * SLOT).expand(2, -1),
    )
    policy = policy_of(smallest_drop=SLOT, shifts=0)  # what looks ahead tells the first ones apart
    (places,), (rows,) = compressed(policy, [same], 2 * (SLOT + 1), sinks=2, recent=0)
    assert (places[:, SLOT:] == SLOT).all() and (rows.counts[:, SLOT] == SLOT).all()
    for head in range(2):
        query = view.queries[2 * head, 0]
        full = attention(query, same.keys[head], same.values[head], same.log_mass[head])
        new = attention(query, rows.keys[head], rows.values[head], rows.log_mass[head])
        torch.testing.assert_close(new, full, atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=4, max_size=4),
    sinks=st.integers(0, 4),
    recent=st.integers(0, 6),
    hole=st.integers(0, 150),
    share=st.floats(0, 1),
    variant=st.sampled_from(sorted(VARIANTS)),
)
def test_the_contract_holds_for_all_lanes_and_totals(lengths, sinks, recent, hole, share, variant):
    if not all(max(lengths[i : i + 2]) for i in (0, 2)):
        return
    policy = policy_of(**VARIANTS[variant])
    views = [view_of((lengths[0], lengths[1]), layer=0), view_of((lengths[2], lengths[3]), layer=1)]
    protected = [ends(view, sinks, recent) for view in views]
    for view, held in zip(views, protected, strict=True):
        held |= view.valid & ((view.positions >= hole) & (view.positions < hole + 9))
    measured = [policy.measure(view, held) for view, held in zip(views, protected, strict=True)]
    least = sum(
        max(int(held[h].sum()), int(view.valid[h].any()))
        for view, held in zip(views, protected, strict=True)
        for h in range(2)
    )
    total = least + round(share * (sum(lengths) - least))
    places = policy.assign(measured, total)
    assert number_of(places) == total
    for view, held, layer, lane in zip(views, protected, measured, places, strict=True):
        check_rows(view, held, lane, policy.merge(view, layer, lane, held))


def check_rows(view: LayerView, protected: Tensor, places: Tensor, rows: Rows) -> None:
    for head in range(len(places)):
        new, valid = members(places[head]), view.valid[head]
        assert bool(new) == bool(valid.any())
        assert (places[head][~valid] == -1).all()
        assert all(len(node) == 1 for node in new if protected[head, node].any())
        assert int(protected[head].sum()) == int(rows.fixed[head].sum())
        firsts = [node[0] for node in new]
        assert firsts == sorted(firsts) and all(new)
        positions = rows.positions[head, : len(new)]
        assert (positions.diff() > 0).all() and (rows.positions[head, len(new) :] == -1).all()
        for name in ("keys", "values", "log_mass"):
            assert getattr(rows, name)[head].isfinite().all()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_budget_of_the_length_or_more_changes_nothing(variant):
    views = [view_of((90, 40), layer=0), view_of((30, 70), layer=1)]
    for total in (230, 1000):
        places, rows = compressed(policy_of(**VARIANTS[variant]), views, total)
        for view, lane, row in zip(views, places, rows, strict=True):
            assert torch.equal(lane, torch.where(view.valid, torch.arange(lane.shape[1]), -1))
            for name in ("keys", "values", "log_mass", "positions"):
                assert torch.equal(getattr(row, name)[view.valid], getattr(view, name)[view.valid])


def test_a_slot_that_is_covered_keeps_all_its_tokens():
    view = view_of((200, 150), massive=True)
    (places,), (rows,) = compressed(policy_of(smallest_drop=SLOT), [view], 60)
    counted = torch.where(places >= 0, view.counts, 0).sum(dim=1)
    assert torch.equal(rows.counts.sum(dim=1), counted)
    for head in range(2):
        for start in range(0, 200, SLOT):
            lane = places[head, start : start + SLOT]
            inner = view.valid[head, start : start + SLOT] & ~ends(view)[head, start : start + SLOT]
            assert (lane[inner] >= 0).all() or (lane[inner] < 0).all()


def test_more_budget_costs_no_more_damage():
    policy, views = policy_of(), [view_of((300, 260), layer=i) for i in range(2)]
    measured = [policy.measure(view, ends(view)) for view in views]
    damages = [damage_of(measured, policy.assign(measured, total)) for total in range(60, 1100, 80)]
    assert all(b <= a * (1 + 1e-4) + 1e-6 for a, b in pairwise(damages))


def damage_of(measured, places: list[Tensor]) -> float:
    """Sum of the damages of new entries, and of what is left out, in the nodes that make it least."""
    whole = 0.0
    for layer, lanes in zip(measured, places, strict=True):
        drop, keep = (layer.damage.drop, layer.damage.keep)
        for head in range(len(lanes)):
            free = layer.valid[head] & ~layer.protected[head]
            for start in range(0, len(free), SLOT):
                lane = lanes[head, start : start + SLOT]
                inner = free[start : start + SLOT]
                whole += _below(drop[head, start // SLOT], keep[head, start // SLOT], lane, inner, LEVELS, 0)
    return whole


def _below(drop: Tensor, keep: Tensor, lane: Tensor, free: Tensor, level: int, index: int) -> float:
    part = slice(index << level, (index + 1) << level)
    mine = lane[part][free[part]]
    number = level_slice(level).start + index
    if not len(mine):
        return 0.0
    if (mine == mine[0]).all() and mine[0] >= 0:
        return float(keep[number])
    below = (_below(drop, keep, lane, free, level - 1, 2 * index + i) for i in (0, 1))
    if (mine < 0).all():
        return min(float(drop[number]), sum(below)) if level > 0 else float(drop[number])
    return sum(below)


def test_the_order_of_heads_does_not_matter():
    view = view_of((120, 120), group=2)
    swapped = replace(
        view,
        **{
            name: getattr(view, name).flip(0)
            for name in ("keys", "values", "log_mass", "counts", "positions")
        },
        valid=view.valid.flip(0),
        queries=view.queries.view(2, 2, WINDOW, WIDTH).flip(0).reshape(4, WINDOW, WIDTH),
        output_gram=view.output_gram.view(2, 2, WIDTH, WIDTH).flip(0).flatten(0, 1),
    )
    (places,), (rows,) = compressed(policy_of(), [view], 61)
    (other,), (others,) = compressed(policy_of(), [swapped], 61)
    assert torch.equal(other.flip(0), places)
    torch.testing.assert_close(others.log_mass.flip(0), rows.log_mass, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_degenerate_lanes_give_numbers(variant):
    policy = policy_of(**VARIANTS[variant])
    view = view_of((100, 100))
    zero = replace(view, values=torch.zeros_like(view.values))
    unseen = replace(view, query_positions=torch.full((WINDOW,), -1))
    one = view_of((1, 0))
    for each, total in ((zero, 40), (unseen, 40), (one, 1)):
        places, (rows,) = compressed(policy, [each], total, sinks=0, recent=0)
        assert number_of(places) == total
        assert all(x.isfinite().all() for x in (rows.keys, rows.values, rows.log_mass))
    places, _ = compressed(policy, [view], 200, sinks=100, recent=0)
    assert number_of(places) == 200


def test_queries_to_come_and_layers_without_norms_are_taken():
    view = replace(view_of((100, 80)), residual_norms=None, future_queries=torch.randn(4, 10, WIDTH))
    places, _ = compressed(policy_of(future=10), [view], 50)
    assert number_of(places) == 50


def test_a_policy_asks_for_what_it_reads():
    evidence = policy_of(future=16).evidence
    assert (evidence.window, evidence.future, evidence.heads) == (WINDOW, 16, None)
    assert evidence.residual_norms and evidence.output_gram
    with pytest.raises(AssertionError):
        policy_of().measure(replace(view_of((9, 9)), queries=None), torch.zeros(2, 9, dtype=torch.bool))


def test_only_what_the_window_asks_for_more_than_others_do_is_looked_ahead_of():
    view = view_of((200, 200), group=1)
    usual = view.queries[:, :1].expand(-1, 8, -1)
    asked, protected = usual.clone(), torch.zeros(2, 200, dtype=torch.bool)
    place = 90
    asked[:, :] = usual + 6 * view.keys[:, place][:, None]
    view = replace(view, positions=torch.arange(200).expand(2, -1), query_positions=torch.arange(200, 208))
    view = replace(view, num_tokens=208, query_heads=torch.arange(2))
    alike = observe(replace(view, queries=usual, future_queries=usual), protected, 4, 3, 0.5, 0.75)
    assert not alike.attention[:, :, 8:].any()
    rows = observe(replace(view, queries=asked, future_queries=usual), protected, 4, 3, 0.5, 0.75)
    ahead = rows.attention[:, :, 8:].amax(dim=(1, 2))
    assert (ahead[:, place + 1 : place + 4] > 0.1).all()
    assert (ahead.argmax(dim=1) - place).clamp(1, 3).equal(ahead.argmax(dim=1) - place)


@pytest.mark.parametrize("size", [200, 400])
@pytest.mark.parametrize("sign", [1, -1])
def test_mean_keys_that_point_at_a_query_harder_than_any_entry_give_numbers(size, sign):
    """Keys across the query, each at its own place, of which means are turned towards it."""
    view, count = view_of((70, 70), group=1), 70
    keys, queries = torch.zeros(2, count, WIDTH), torch.zeros(2, WINDOW, WIDTH)
    keys[..., WIDTH // 2] = sign * size
    queries[..., 0] = WIDTH**0.5
    view = replace(view, keys=keys, queries=queries, log_mass=torch.zeros(2, count), num_tokens=count + 10)
    view = replace(view, positions=torch.arange(count).expand(2, -1), counts=torch.ones(2, count, dtype=int))
    view = replace(view, valid=view.positions >= 0, query_positions=torch.arange(count, count + WINDOW))
    places, (rows,) = compressed(policy_of(), [view], 40)
    assert number_of(places) == 40 and rows.log_mass.isfinite().all()
