"""Every policy against its float64 oracle, and the contract that all of them keep."""

from __future__ import annotations

from dataclasses import replace

import policy_oracles as oracle
import pytest
import torch
from torch import Tensor

from minikv.cache.policies import (
    MERGING_NAMES,
    POLICY_NAMES,
    Allocation,
    HeadProfile,
    LayerView,
    Policy,
    QueryStatistics,
    check_policy_name,
    make_policy,
    select,
)
from minikv.cache.policies.allocation import fill
from minikv.cache.policies.base import output_gram
from minikv.cache.policies.compresskv import CompressKV
from minikv.errors import ConfigError
from minikv.models.config import RopeConfig
from minikv.models.rope import Rope

WIDTH, WINDOW, LAYERS = 8, 4, 3
ROPE = Rope(RopeConfig(), WIDTH)
SCORES = {
    "full": lambda view, profile, rope: [[0.0] * oracle.lane_length(view, h) for h in range(len(view.keys))],
    "window": oracle.window,
    "snapkv": oracle.snapkv,
    "adakv": oracle.snapkv,
    "expected": oracle.expected,
    "compresskv": oracle.compresskv,
    "adakv:expected": oracle.expected,
    "adakv:compresskv": oracle.compresskv_own,
}
SCORING_NAMES = tuple(name for name in POLICY_NAMES if name not in MERGING_NAMES)
OBSERVING = ("snapkv", "adakv", "compresskv", "adakv:compresskv")


def profile_of(heads: int, seed: int = 0, top_heads: int = 2) -> HeadProfile:
    random = torch.Generator().manual_seed(seed + 100)
    scores, errors = torch.rand(LAYERS, heads, generator=random), torch.rand(LAYERS, generator=random)
    return HeadProfile(scores, errors + 0.2, top_heads)


def policy_of(name: str, kv_heads: int, group: int, seed: int = 0, profiled: bool = True) -> Policy:
    heads = kv_heads * group
    return make_policy(
        name,
        window=WINDOW,
        num_layers=LAYERS,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        profile=profile_of(heads, seed) if profiled else None,
        rope=ROPE,
    )


def view_of(
    policy: Policy, kv_heads: int, group: int, lengths: list[int], tokens: int, layer: int = 0, seed: int = 0
) -> LayerView:
    """Random lanes of these lengths over `tokens` positions, with masses; the window ends three tokens early,
    as if a template suffix followed."""
    random = torch.Generator().manual_seed(1000 * seed + layer)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    longest, heads = max(lengths), kv_heads * group
    positions = torch.full((kv_heads, longest), -1, dtype=torch.int64)
    for lane, length in zip(positions, lengths, strict=True):
        lane[:length] = torch.randperm(tokens, generator=random)[:length].sort().values
    wanted = torch.arange(heads) if policy.evidence.heads is None else policy.evidence.heads[layer]
    root = normal(heads, WIDTH, WIDTH) / WIDTH
    last = max(tokens - 3, 1)
    rows = torch.arange(max(last - WINDOW, 0), last)
    return LayerView(
        layer=layer,
        keys=normal(kv_heads, longest, WIDTH),
        values=normal(kv_heads, longest, WIDTH),
        log_mass=torch.randint(1, 4, (kv_heads, longest), generator=random).float().log(),
        counts=(positions >= 0).long(),
        positions=positions,
        valid=positions >= 0,
        num_tokens=tokens,
        group=group,
        output_weight=(weight := normal(12, heads * WIDTH)),
        output_gram=output_gram(weight, WIDTH),
        queries=1.5 * normal(heads, len(rows), WIDTH)[wanted] if policy.evidence.window else None,
        query_heads=wanted if policy.evidence.window else None,
        query_positions=rows if policy.evidence.window else None,
        statistics=QueryStatistics(normal(heads, WIDTH), root @ root.transpose(1, 2)),
    )


def question_of(
    policy: Policy, views: list[LayerView], total: int, sinks: int = 2, recent: int = 3
) -> Allocation:
    """What the framework asks: infinite scores for protected entries and for places past a lane's end."""
    scores, lengths, protected = [], [], []
    for view in views:
        length = view.valid.sum(dim=1, keepdim=True)
        place = torch.arange(view.valid.shape[1])
        guarded = view.valid & ((place < sinks) | (place >= length - recent))
        raw = policy.score(view).masked_fill(~view.valid, -torch.inf)
        scores.append(raw.masked_fill(guarded, torch.inf))
        lengths.append(length[:, 0])
        protected.append(guarded.sum(dim=1))
    return Allocation(scores, torch.stack(lengths), torch.stack(protected), total)


def kept(policy: Policy, views: list[LayerView], total: int, **guard: int) -> Tensor:
    question = question_of(policy, views, total, **guard)
    return select(question.scores, policy.allocate(question))


def sets(mask: Tensor) -> list[set[int]]:
    return [set(lane.nonzero()[:, 0].tolist()) for lane in mask]


# group, kv heads, lane lengths, logical length
SHAPES = [
    (1, 3, [40, 40, 40], 40),
    (2, 2, [33, 17], 60),
    (3, 3, [50, 21, 9], 80),
    (4, 2, [12, 30], 30),
    (5, 1, [25], 300),
    (6, 2, [8, 31], 40),
    (7, 2, [20, 20], 20),
    (8, 1, [37], 37),
]


@pytest.mark.parametrize("name", SCORING_NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"group{s[0]}")
def test_scores_and_kept_entries_equal_the_oracle(name, shape):
    group, kv_heads, lengths, tokens = shape
    policy = policy_of(name, kv_heads, group)
    views = [view_of(policy, kv_heads, group, lengths, tokens, layer) for layer in range(LAYERS)]
    total = int(0.5 * LAYERS * sum(lengths))
    question = question_of(policy, views, total)
    counts = policy.allocate(question)
    keep = select(question.scores, counts)
    guarded = []
    for layer, view in enumerate(views):
        exact = SCORES[name](view, profile_of(kv_heads * group), ROPE)
        ours = policy.score(view)
        for head, lane in enumerate(exact):
            wanted = torch.tensor(lane, dtype=torch.float32)
            torch.testing.assert_close(ours[head, : len(lane)], wanted, rtol=2e-4, atol=1e-6)
        guarded.append(
            [
                [float("inf") if j < 2 or j >= len(lane) - 3 else x for j, x in enumerate(lane)]
                for lane in exact
            ]
        )
        assert sets(keep[layer]) == oracle.keep(guarded[layer], counts[layer].tolist())
    assert counts.tolist() == expected_counts(name, guarded, question, kv_heads * group)


def expected_counts(name: str, scores, question: Allocation, heads: int) -> list[list[int]]:
    lengths, protected = question.lengths.tolist(), question.protected.tolist()
    if name.endswith("compresskv"):
        rows = oracle.layer_rows(profile_of(heads).layer_errors, question.total // len(lengths[0]))
        shares = layer_shares(rows, question)
    else:
        shares = oracle.uniform(lengths, protected, question.total)
    if name.startswith("adakv"):
        return oracle.across_heads(scores, lengths, protected, shares)
    return shares


def layer_shares(rows: list[int], question: Allocation) -> list[list[int]]:
    """Bounds of the lanes and what they leave over are `fill`'s business, tested on its own."""
    lengths, protected, total = question.lengths, question.protected, question.total
    mean = total / lengths.numel()
    floors = torch.maximum(protected, lengths.clamp(max=min(32, int(mean))))
    ceilings = torch.maximum(protected, lengths.clamp(max=int(3 * mean)))
    floors = floors if int(floors.sum()) <= total else protected
    ceilings = ceilings if int(ceilings.sum()) >= total else lengths
    return fill(torch.tensor(rows)[:, None].expand(lengths.shape), floors, ceilings, total).tolist()


@pytest.mark.parametrize("name", SCORING_NAMES)
class TestContract:
    def views(self, name: str, lengths=(40, 23), tokens: int = 50, group: int = 3) -> tuple[Policy, list]:
        policy = policy_of(name, len(lengths), group)
        return policy, [view_of(policy, len(lengths), group, list(lengths), tokens, i) for i in range(LAYERS)]

    def test_has_its_name(self, name):
        assert policy_of(name, 2, 2).name == name

    def test_scores_are_finite_float32_of_the_lanes_shape(self, name):
        policy, views = self.views(name)
        for view in views:
            scores = policy.score(view)
            assert scores.dtype == torch.float32 and scores.shape == view.positions.shape
            assert scores[view.valid].isfinite().all()

    def test_what_lies_past_a_lanes_end_changes_nothing(self, name):
        policy, views = self.views(name)
        for view in views:
            longer = pad(view, 7)
            before, after = policy.score(view), policy.score(longer)[:, :40]
            torch.testing.assert_close(after[view.valid], before[view.valid], rtol=1e-5, atol=1e-8)
        longer_views = [pad(view, 7) for view in views]
        assert torch.equal(kept(policy, longer_views, 90)[..., :40], kept(policy, views, 90))

    def test_counts_sum_to_the_budget_and_protected_entries_stay(self, name):
        policy, views = self.views(name)
        for total in (30, 31, 60, 97, 150):
            keep = kept(policy, views, total)
            assert int(keep.sum()) == total
            for mask, view in zip(keep, views, strict=True):
                assert not mask[~view.valid].any()
                for lane, length in zip(mask, view.valid.sum(dim=1), strict=True):
                    assert lane[:2].all() and lane[length - 3 : length].all()

    def test_a_budget_of_the_length_or_more_keeps_everything(self, name):
        policy, views = self.views(name)
        for total in (LAYERS * 63, 10_000):
            assert torch.equal(kept(policy, views, total), torch.stack([view.valid for view in views]))

    def test_is_deterministic(self, name):
        policy, views = self.views(name)
        again, _ = self.views(name)
        assert torch.equal(kept(policy, views, 70), kept(again, views, 70))

    def test_lanes_of_one_entry_are_fine(self, name):
        policy, views = self.views(name, lengths=(1, 1), tokens=30)
        assert kept(policy, views, 6).all()
        policy, views = self.views(name, lengths=(1, 20), tokens=30)
        keep = kept(policy, views, 30)
        assert int(keep.sum()) == 30 and keep[:, 0, 0].all()

    def test_lanes_of_a_long_past_are_fine(self, name):
        policy, views = self.views(name, lengths=(20, 11), tokens=5000)
        assert int(kept(policy, views, 50).sum()) == 50

    def test_without_a_profile_it_works_too(self, name):
        policy = policy_of(name, 2, 3, profiled=False)
        assert policy.evidence.heads is None
        views = [view_of(policy, 2, 3, [30, 30], 30, i) for i in range(LAYERS)]
        question = question_of(policy, views, 60)
        counts = policy.allocate(question)
        assert counts.sum(dim=1).tolist() == [20, 20, 20]
        if not name.startswith("adakv"):
            assert (counts == 10).all()


def pad(view: LayerView, count: int) -> LayerView:
    """The same lanes with more places past their ends, and other numbers in all such places."""

    def wider(tensor: Tensor, value: float) -> Tensor:
        shape = (tensor.shape[0], count, *tensor.shape[2:])
        out = torch.cat((tensor, torch.full(shape, value, dtype=tensor.dtype)), dim=1)
        out[~valid] = value
        return out

    valid = torch.cat((view.valid, torch.zeros(len(view.valid), count, dtype=torch.bool)), dim=1)
    return replace(
        view,
        keys=wider(view.keys, 9.0),
        values=wider(view.values, -9.0),
        log_mass=wider(view.log_mass, 3.0),
        positions=wider(view.positions, -1),
        valid=valid,
    )


@pytest.mark.parametrize("name", ["full", *OBSERVING, "expected", "adakv:expected"])
def test_of_equal_entries_the_earlier_stay(name):
    policy = policy_of(name, 2, 3)
    view = view_of(policy, 2, 3, [40, 40], 90)
    view = replace(
        view,
        keys=view.keys[:, :1].expand_as(view.keys),
        values=view.values[:, :1].expand_as(view.values),
        log_mass=torch.zeros(2, 40),
        positions=torch.arange(40).expand(2, 40),
    )
    question = question_of(policy, [replace(view, layer=i) for i in range(LAYERS)], 90)
    # Equal in exact arithmetic; what rounding makes of it is not the matter here.
    rounded = [scores.mul(1e4).round() for scores in question.scores]
    keep = select(rounded, torch.full((LAYERS, 2), 15))
    assert all(lane == {*range(12), 37, 38, 39} for lane in sets(keep.flatten(0, 1)))


@pytest.mark.parametrize("name", OBSERVING)
def test_missing_queries_are_an_internal_error(name):
    policy = policy_of(name, 2, 3)
    view = view_of(policy, 2, 3, [20, 20], 20)
    with pytest.raises(AssertionError):
        policy.score(replace(view, queries=None, query_heads=None))


def test_a_nan_score_is_an_internal_error():
    scores = torch.tensor([[1.0, float("nan"), 0.0]])
    with pytest.raises(AssertionError, match="NaN"):
        select([scores], torch.tensor([[1]]))


def test_select_takes_layers_of_different_lengths():
    scores = [torch.tensor([[1.0, 3, 2, 3]]), torch.tensor([[0.0, 0.0]])]
    keep = select(scores, torch.tensor([[2], [1]]))
    assert keep.tolist() == [[[False, True, False, True]], [[True, False, False, False]]]


def pointed_view(policy: Policy, marks: dict[int, int]) -> LayerView:
    """Two KV heads with three query heads each, 40 entries; query head h looks at entry marks[h] alone."""
    view = view_of(policy, 2, 3, [40, 40], 60)
    wanted = view.query_heads
    assert wanted is not None
    queries, keys = torch.zeros(6, WINDOW, WIDTH), torch.zeros(2, 40, WIDTH)
    for head, entry in marks.items():
        queries[head, :, head] = 30.0
        keys[head // 3, entry, head] = 3.0
    return replace(
        view,
        queries=queries[wanted],
        keys=keys,
        log_mass=torch.zeros(2, 40),
        positions=torch.arange(40).expand(2, 40),
    )


MARKS = {0: 4, 1: 10, 2: 16, 3: 22, 4: 28, 5: 34}


def peaks(scores: Tensor) -> list[list[int]]:
    """Entries that stand out of each lane, in order (a mark's neighbours are as high as the mark)."""
    return [sorted(j for j in MARKS.values() if lane[j] > 0.01) for lane in scores]


def test_snapkv_reads_the_query_heads_of_a_kv_heads_own_group():
    scores = policy_of("snapkv", 2, 3).score(pointed_view(policy_of("snapkv", 2, 3), MARKS))
    assert peaks(scores) == [[4, 10, 16], [22, 28, 34]]
    # Mean over three heads of a mass of one, spread over five entries.
    assert scores[0, 4].item() == pytest.approx(1 / 15, rel=1e-3)


def compresskv_with(heads: list[int], sharing) -> CompressKV:
    scores = torch.zeros(LAYERS, 6)
    scores[:, heads] = torch.tensor([0.9, 0.6, 0.3])[: len(heads)]
    profile = HeadProfile(scores, torch.ones(LAYERS), top_heads=len(heads))
    return CompressKV(WINDOW, profile, sharing=sharing)


def test_compresskv_reads_its_retrieval_heads_and_shares_their_scores():
    policy = compresskv_with([1, 0, 5], "layer")
    assert policy.evidence.heads is not None and policy.evidence.heads.tolist() == [[0, 1, 5]] * LAYERS
    scores = policy.score(pointed_view(policy, MARKS))
    assert peaks(scores) == [[4, 10, 34]] * 2 and torch.equal(scores[0], scores[1])
    other = compresskv_with([1, 0, 4], "layer")
    assert peaks(other.score(pointed_view(other, MARKS))) == [[4, 10, 28]] * 2


def test_compresskv_can_keep_to_the_groups_own_retrieval_heads():
    policy = compresskv_with([1, 0, 5], "own")
    assert peaks(policy.score(pointed_view(policy, MARKS))) == [[4, 10], [34]]
    lonely = compresskv_with([1, 0], "own")
    scores = lonely.score(pointed_view(lonely, MARKS))
    assert peaks(scores) == [[4, 10], [4, 10]], "a group without retrieval heads takes the layer's scores"


def test_compresskv_can_weight_all_heads_by_their_retrieval_scores():
    policy = compresskv_with([1, 0, 5], "weighted")
    assert policy.evidence.heads is None
    scores = policy.score(pointed_view(policy, MARKS))
    assert peaks(scores) == [[4, 10], [34]]
    assert scores[0, 10] / scores[0, 4] == pytest.approx(0.9 / 0.6, rel=1e-3)


def test_the_windows_attention_to_itself_does_not_spill_over():
    policy = policy_of("snapkv", 1, 1)
    view = view_of(policy, 1, 1, [30], 30)
    view = replace(view, keys=torch.zeros_like(view.keys), log_mass=torch.zeros(1, 30))
    assert view.query_positions is not None
    first = int(view.query_positions[0])
    scores = policy.score(replace(view, log_mass=view.log_mass.index_fill(1, torch.tensor([first]), 20.0)))
    assert scores[0, first] > 0.99 and scores[0, first - 1] < 1e-6


def test_smoothing_does_not_damp_the_edges():
    policy = policy_of("snapkv", 1, 1)
    view = view_of(policy, 1, 1, [30], 60)
    even = replace(view, keys=torch.zeros_like(view.keys), log_mass=torch.zeros(1, 30))
    even = replace(even, positions=torch.arange(30)[None])
    torch.testing.assert_close(policy.score(even), torch.full((1, 30), 1 / 30))


def test_masses_count_in_observed_and_in_expected_attention():
    for name in ("snapkv", "expected"):
        policy = policy_of(name, 1, 2)
        view = replace(view_of(policy, 1, 2, [30], 60), log_mass=torch.zeros(1, 30))
        heavier = replace(view, log_mass=view.log_mass.index_fill(1, torch.tensor([12]), 2.0))
        assert policy.score(heavier)[0, 12] > 1.5 * policy.score(view)[0, 12]


def test_expected_attention_follows_what_the_mean_query_will_see():
    """One narrow Gaussian, no covariance: the score is the attention of the mean query, turned ahead."""
    policy = policy_of("expected", 1, 1)
    view = view_of(policy, 1, 1, [30], 30)
    mean = torch.zeros(1, WIDTH)
    mean[0, WIDTH // 2 - 1] = 6.0  # the slowest pair: it hardly turns in 512 positions
    statistics = QueryStatistics(mean, torch.zeros(1, WIDTH, WIDTH))
    keys = torch.zeros(1, 30, WIDTH)
    keys[0, 17] = mean
    even = torch.ones(1, 30, WIDTH)
    view = replace(view, keys=keys, values=even, statistics=statistics, log_mass=torch.zeros(1, 30))
    assert policy.score(view)[0].argmax() == 17


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "linear"])
def test_expected_attention_takes_every_rope(kind):
    config = RopeConfig(kind=kind, factor=4.0, original_context=16)
    rope = Rope(config, WIDTH)
    shape = {"window": WINDOW, "num_layers": LAYERS, "num_query_heads": 2, "num_kv_heads": 1}
    policy = make_policy("expected", **shape, rope=rope)
    view = view_of(policy, 1, 2, [30], 30)
    exact_rope = rope
    if kind == "dynamic":
        exact_rope = Rope(config, WIDTH)
        exact_rope.inv_freq = rope._dynamic_frequencies(torch.tensor([30]))[0]
    exact = torch.tensor(oracle.expected(view, None, exact_rope)[0], dtype=torch.float32)
    torch.testing.assert_close(policy.score(view)[0], exact, rtol=2e-4, atol=1e-6)


def test_lanes_compressed_apart_share_scores_by_position():
    policy = compresskv_with([0, 3], "layer")
    view = view_of(policy, 2, 3, [20, 20], 200)
    scores = policy.score(view)
    by_position = {}
    for head in range(2):
        for at, score in zip(view.positions[head].tolist(), scores[head].tolist(), strict=True):
            assert by_position.setdefault(at, score) == score


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_known_names_are_accepted(name):
    check_policy_name(name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("snapvk", "did you mean snapkv"),
        ("AdaKV:Expectd", "did you mean adakv:expected"),
        ("zzz", "choose from full, window"),
        ("adakv:adakv", "There is no policy 'adakv:adakv'"),
        (7, "There is no policy 7"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_policy_name(name)


def test_a_profile_of_another_model_is_refused():
    shape = {"window": WINDOW, "num_layers": LAYERS, "num_query_heads": 9, "num_kv_heads": 3}
    with pytest.raises(ConfigError, match="3 layers and 6 query heads, but this model has 3 and 9"):
        make_policy("compresskv", **shape, profile=profile_of(6))
    make_policy("snapkv", **shape, profile=profile_of(6))


def test_the_best_heads_of_a_profile_ascend_and_ties_go_to_the_lower():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert HeadProfile(scores, torch.ones(2), 3).heads().tolist() == [[1, 2, 3], [0, 1, 2]]
    assert HeadProfile(scores, torch.ones(2), 9).heads().shape == (2, 5)
