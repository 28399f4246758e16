"""Budgets, ceilings and what the compressor protects, with a policy that only follows orders."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, tiny_decoder

from minikv.cache.budget import Budget, parse_budget, read_budget
from minikv.cache.ceiling import Ceiling
from minikv.cache.compress import Compressor
from minikv.cache.evidence import Recorded
from minikv.cache.lanes import LaneStore
from minikv.cache.policies.allocation import uniform
from minikv.cache.policies.base import Evidence
from minikv.cache.policies.registry import make_policy
from minikv.cache.pool import PagePool
from minikv.config import CacheConfig
from minikv.errors import ConfigError

LAYERS, HEADS, PAGE = TINY.num_layers, TINY.num_kv_heads, 4
LANES = LAYERS * HEADS
DECODER = tiny_decoder()


class Ordered:
    """Scores as given by position; the same for every lane."""

    name = "ordered"

    def __init__(self, scores, evidence=None):
        self.evidence = evidence or Evidence()
        self.scores = scores
        self.views = []

    def score(self, view):
        self.views.append(view)
        return self.scores[view.positions.clamp(min=0)]

    def allocate(self, question):
        return uniform(question)


class Uneven(Ordered):
    """Gives lanes shares as different as it may."""

    def allocate(self, question):
        order = torch.arange(question.lengths.numel())
        weights = (1 + order).float() ** 2
        counts = question.protected.flatten() + torch.zeros_like(order)
        spare = min(question.total, int(question.lengths.sum())) - int(counts.sum())
        most = question.lengths.flatten() - counts
        while spare > 0:
            room = (most > 0).float() * weights
            share = torch.minimum((room / room.sum() * spare).ceil().long(), most)
            for place in order.tolist():
                taken = min(int(share[place]), spare)
                counts[place] += taken
                most[place] -= taken
                spare -= taken
        return counts.view(question.lengths.shape)


def filled(num_tokens, pages=600):
    """A store with one sequence of random rows."""
    store = LaneStore(PagePool(pages, PAGE, TINY.head_dim, torch.float32), 2, LAYERS, HEADS, 256)
    seq = store.open()
    assert store.reserve(seq, num_tokens)
    slots = torch.from_numpy(store.next_slots(seq, num_tokens))
    rows = torch.randn(2, *slots.shape, TINY.head_dim, generator=torch.Generator().manual_seed(0))
    store.pool.write_rows(slots, rows[0], rows[1])
    store.pool.write_entries(slots, torch.arange(num_tokens).expand(slots.shape))
    store.append(seq, num_tokens)
    return store, seq


def kept(num_tokens, cache, policy=None, pinned=(), room=0):
    """Positions that each lane keeps: a set if all lanes keep the same."""
    store, seq = filled(num_tokens)
    policy = policy or Ordered(torch.arange(num_tokens).float())
    Compressor(store, DECODER).compress(seq, policy, cache, num_tokens, Recorded(), pinned, room)
    store.check()
    lanes = [set(lane[lane >= 0].tolist()) for lane in store.positions(seq).flatten(0, 1)]
    assert all(lane == lanes[0] for lane in lanes)
    return lanes[0]


def cache(budget, **options):
    return CacheConfig(policy="window", budget=budget, **options)


# Budgets as they are written


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        (0.5, Budget("fraction", 0.5)),
        (1.0, Budget("fraction", 1.0)),
        ("1/8", Budget("fraction", 0.125)),
        (" 3/3 ", Budget("fraction", 1.0)),
        (1, Budget("entries", 1)),
        (256, Budget("entries", 256)),
        ("64MiB", Budget("bytes", 64 << 20)),
        ("1.5GB", Budget("bytes", 1_500_000_000)),
    ],
)
def test_budgets_that_can_be_meant(value, budget):
    assert parse_budget(value) == budget


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "at least 1 entry"),
        (-3, "at least 1 entry"),
        (0.0, "above 0 and at most 1"),
        (-0.5, "above 0 and at most 1"),
        (1.5, "above 0 and at most 1"),
        (math.nan, "above 0 and at most 1"),
        (math.inf, "above 0 and at most 1"),
        (256.0, "write 256, without a point"),
        (True, "not True"),
        ([1], r"not \[1\]"),
        ("64MQ", "not '64MQ'"),
        ("64 megabytes", "not '64 megabytes'"),
        ("", "not ''"),
        ("256", "number in quotes"),
        ("0.5", "number in quotes"),
        ("-64MiB", "not '-64MiB'"),
        ("1/0", "such as 0.1 or \"1/8\", entries per lane such as 256, .* not '1/0'"),
        ("3/2", "above 0 and at most 1"),
        ("0/5", "above 0 and at most 1"),
        ("-1/8", "not '-1/8'"),
        ("1/8/2", "not '1/8/2'"),
        ("1 / 8", "not '1 / 8'"),
    ],
)
def test_budgets_that_cannot_be_meant_are_refused_in_a_sentence(value, words):
    with pytest.raises(ConfigError, match=words) as caught:
        CacheConfig(policy="snapkv", budget=value)
    assert str(caught.value).count(".") <= 4 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.1", 0.1), ("1.0", 1.0), ("256", 256), (" 64MiB ", "64MiB"), ("1e-2", 0.01), ("1/128", 1 / 128)],
)
def test_budgets_typed_as_text(text, value):
    assert read_budget(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "2.0", "nan", "much", "64MQ", "1/0", "3/2", "0/5", "-1/2"])
def test_budgets_typed_wrongly(text):
    with pytest.raises(ConfigError):
        read_budget(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "snapkv"}, "needs a budget"),
        ({"budget": 0.5}, "needs a policy"),
        ({"prefill": "streaming"}, "needs a policy"),
        ({"policy": "snapvk", "budget": 0.5}, "did you mean snapkv"),
        ({"evicted": "forget"}, "must be drop or demote"),
        ({"evicted": "demote"}, "needs a policy"),
        ({"policy": "snapkv", "budget": 1, "prefill": "fast"}, "exact or streaming"),
        ({"policy": "snapkv", "budget": 1, "decode_slack": 0}, "decode_slack must be"),
        ({"policy": "snapkv", "budget": 1, "window": 0}, "window must be"),
        ({"policy": "snapkv", "budget": 1, "sinks": -1}, "sinks must be"),
        ({"policy": "snapkv", "budget": 1, "profile": "x"}, "read by compresskv and sekv only"),
        ({"policy": "snapkv", "budget": 1, "pinned": ((4, 4),)}, "token ranges"),
    ],
)
def test_configurations_that_cannot_be_are_refused_in_a_sentence(options, words):
    with pytest.raises(ConfigError, match=words):
        CacheConfig(**options)


@given(st.floats(0.0001, 1.0), st.integers(1, 5000), st.integers(1, 300))
def test_a_fraction_of_the_tokens_is_its_share_of_the_entries_and_one_per_lane_at_least(share, tokens, lanes):
    total = Budget("fraction", share).entries(tokens, lanes)
    assert lanes <= total <= max(lanes, tokens * lanes)
    assert total == lanes or abs(total - share * tokens * lanes) <= 0.5


# What is protected


def test_sinks_recent_and_pinned_stay_and_count_towards_the_budget():
    scores = -torch.arange(60).float()
    stay = kept(60, cache(20, sinks=3, recent=5), Ordered(scores), pinned=((30, 33),))
    assert stay == {0, 1, 2, 30, 31, 32, *range(55, 60)} | set(range(3, 12))


def test_a_budget_below_what_is_protected_gives_up_recent_entries_then_sinks():
    assert kept(60, cache(6, sinks=4, recent=16)) == {0, 1, 2, 3, 58, 59}
    assert kept(60, cache(2, sinks=4, recent=16)) == {0, 1}
    assert kept(60, cache(0.001, sinks=4, recent=16)) == {0}
    assert kept(60, cache(3, sinks=0, recent=16)) == {57, 58, 59}


def test_pinned_entries_stay_even_where_they_pass_a_budget_in_entries():
    assert kept(60, cache(4), pinned=((10, 20),)) == set(range(10, 20))
    assert kept(60, cache(12, sinks=2, recent=3), pinned=((10, 20),)) == {0, 1, *range(10, 20)}


def test_nothing_is_scored_or_moved_when_the_budget_holds_everything():
    for config, tokens in ((cache(1.0), 60), (cache(60), 60), (cache("1MiB"), 60), (cache(0.1), 20)):
        policy = Ordered(torch.zeros(tokens))
        assert kept(tokens, config, policy) == set(range(tokens))
        assert not policy.views


def test_ties_go_to_the_lower_position():
    assert kept(60, cache(10, sinks=0, recent=1), Ordered(torch.zeros(60))) == {*range(9), 59}


def test_lanes_may_keep_different_entries_and_are_compressed_again_from_there():
    store, seq = filled(60)
    compressor = Compressor(store, DECODER)
    config = cache(20, sinks=1, recent=2)
    report = compressor.compress(seq, Uneven(torch.arange(60).float()), config, 60, Recorded())
    assert report.entries == (60 * LANES, 20 * LANES)
    assert report.bytes == (60 // PAGE * LANES * store.pool.page_bytes, store.bytes_of(seq))
    assert len(set(store.lengths[seq].flatten().tolist())) > 1
    policy = Uneven(-torch.arange(60).float())
    report = compressor.compress(seq, policy, cache(10, sinks=1, recent=2), 60, Recorded())
    assert report.entries == (20 * LANES, 10 * LANES)
    view = policy.views[0]
    assert (view.valid.sum(-1) < view.valid.shape[1]).any()
    assert (view.positions[~view.valid] == -1).all()
    assert not view.keys.isnan().any()
    store.check()


def test_a_view_shows_the_stored_rows_in_float32():
    store, seq = filled(30)
    view = Compressor(store, DECODER).view(seq, 1, 30, Recorded())
    slots, _ = store.slots(seq)
    keys, values = store.pool.read_rows(slots[1])
    assert torch.equal(view.keys, keys) and torch.equal(view.values, values)
    assert view.output_weight.shape == (TINY.hidden_size, TINY.num_query_heads * TINY.head_dim)
    assert (view.group, view.num_tokens, view.layer) == (3, 30, 1)
    assert Compressor(store, DECODER).view(seq, 1, 30, Recorded(), output=False).output_weight.numel() == 0


def test_a_view_shows_the_grams_of_each_heads_projection_and_keeps_them():
    store, seq = filled(30)
    compressor = Compressor(store, DECODER)
    assert compressor.view(seq, 1, 30, Recorded()).output_gram is None
    view = compressor.view(seq, 1, 30, Recorded(), gram=True)
    assert view.output_gram is compressor.view(seq, 1, 30, Recorded(), output=False, gram=True).output_gram
    for head, gram in enumerate(view.output_gram):
        part = view.output_weight[:, head * TINY.head_dim : (head + 1) * TINY.head_dim]
        torch.testing.assert_close(gram, part.t() @ part)
    assert not torch.equal(view.output_gram, compressor.view(seq, 0, 30, Recorded(), gram=True).output_gram)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("transposed", [False, True])
def test_pages_read_whole_equal_rows_read_one_by_one(dtype, transposed):
    pool = PagePool(20, 32, 16, dtype, keys_transposed=transposed)
    ids = torch.tensor([3, 7, 2])
    slots = (ids[:, None] * 32 + torch.arange(32)).view(-1)
    rows = torch.randn(2, len(slots), 16)
    pool.write_rows(slots, rows[0], rows[1])
    for whole, single in zip(pool.read_pages(ids), pool.read_rows(slots), strict=True):
        assert torch.equal(whole, single)


def test_the_output_weight_is_the_projection_without_its_bias():
    decoder = tiny_decoder(output_bias=True)
    attended = torch.randn(5, TINY.num_query_heads * TINY.head_dim)
    output = decoder.layers[0].output
    expected = attended @ decoder.output_weight(0).t() + output.bias
    torch.testing.assert_close(output(attended), expected, rtol=1e-4, atol=1e-4)


def test_a_policy_whose_evidence_is_missing_gives_way_to_the_window():
    policy = Ordered(-torch.arange(60).float(), Evidence(window=4))
    assert kept(60, cache(10, sinks=2, recent=2), policy) == {0, 1, *range(52, 60)}
    assert not policy.views


# Ceilings in bytes


def ceiling_of(pages):
    return Ceiling(pages, PAGE, LANES, 100)


@given(
    st.lists(st.integers(0, 200), min_size=LANES, max_size=LANES),
    st.integers(LANES, 400),
    st.integers(0, 300),
)
def test_rows_that_fit_are_the_most_that_do(lengths, pages, wanted):
    held, ceiling = np.array(lengths), ceiling_of(pages)
    rows = ceiling.rows_that_fit(held, wanted)
    assert 0 <= rows <= wanted
    if ceiling.pages(held) <= pages:
        assert ceiling.pages(held, rows) <= pages
        assert rows == wanted or ceiling.pages(held, rows + 1) > pages


@given(st.integers(LANES, 120), st.integers(0, 40), st.booleans(), st.integers(21, 90))
@settings(max_examples=60)
def test_a_compression_leaves_the_room_asked_for_under_the_ceiling_and_wastes_no_page(
    pages, wanted, uneven, tokens
):
    store, seq = filled(tokens)
    policy = (Uneven if uneven else Ordered)(torch.arange(tokens).float())
    config = cache(f"{pages * store.pool.page_bytes}B", sinks=1, recent=2)
    ceiling = Ceiling.of(config.limit, store)
    room = min(wanted, ceiling.per_lane - 1)
    Compressor(store, DECODER).compress(seq, policy, config, tokens, Recorded(), room=room)
    lengths = store.lengths[seq]
    assert ceiling.pages(lengths, room) <= pages
    assert lengths.min() >= 1
    # Every lane fills its pages, unless it is whole.
    whole = lengths == tokens
    assert (((lengths + room) % PAGE == 0) | whole).all()
    # What is left is too little for a page in every lane that could use one.
    assert whole.all() or pages - ceiling.pages(lengths, room) < 2 * LANES


def test_a_ceiling_below_a_page_per_lane_names_the_least_possible():
    store, _ = filled(30)
    with pytest.raises(ConfigError, match=r"needs at least 2\.1 KiB"):
        Ceiling.of(Budget("bytes", 100), store)


def test_pinned_entries_past_a_ceiling_name_the_least_possible():
    store, seq = filled(60)
    config = cache(f"{3 * LANES * store.pool.page_bytes}B")
    with pytest.raises(ConfigError, match=r"40 tokens that are pinned .* at least 23\.4 KiB"):
        Compressor(store, DECODER).choose(
            seq, make_policy_of("window"), config, 60, Recorded(), pinned=((0, 40),)
        )


def make_policy_of(name):
    return make_policy(
        name, window=4, num_layers=LAYERS, num_query_heads=TINY.num_query_heads, num_kv_heads=HEADS
    )


def test_the_room_left_is_what_is_asked_for_within_half_of_the_ceiling():
    assert ceiling_of(20 * LANES).slack(None) == 10
    assert ceiling_of(2 * LANES).slack(None) == PAGE
    assert ceiling_of(LANES).slack(None) == 2
    assert ceiling_of(20 * LANES).slack(7) == 7
    assert ceiling_of(20 * LANES).slack(70) == 40
