"""Merging in the engine: the same entries, masses and counts however the work is arranged."""

from __future__ import annotations

import pytest
import torch
from keeping import LANES, PROMPTS, check_ceiling, keep, pages, run
from merging import Pairs
from tiny import drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.cache.policies.base import Evidence
from minikv.config import TierConfig
from minikv.sampling import SamplingParams
from minikv.scheduler import retention
from minikv.scheduler.request import Lanes


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(params=["pairs", "gracekv"])
def policy(request, monkeypatch):
    """`gracekv` as it is, or a plain policy that is found under its name."""
    made = retention.make_policy
    if request.param == "pairs":
        wanted = Evidence(window=6, future=4, residual_norms=True)
        monkeypatch.setattr(
            retention,
            "make_policy",
            lambda name, **given: Pairs(wanted) if name == "gracekv" else made(name, **given),
        )
    else:
        pytest.importorskip("minikv.cache.policies.gracekv")
    return "gracekv"


REFITS = [False, True]


def held(decoder, ids, cache, params=None, engine=None, lanes=None, **options):
    """Keys, values, positions, masses and counts of all entries after a request."""
    engine, lanes = engine or tiny_engine(decoder, **options), lanes or Lanes()
    run(engine, ids, cache, params or greedy(1), lanes=lanes)
    return entries(engine, lanes)


def entries(engine, lanes):
    store = engine.store
    slots, valid = store.slots(lanes.seq)
    keys, values = store.pool.read_rows(slots)
    masses = store.pool.log_mass.view(-1)[slots].masked_fill(~valid, -torch.inf)
    keys, values = (x.masked_fill(~valid[..., None], 0) for x in (keys, values))
    return keys, values, store.positions(lanes.seq), masses, store.counts(lanes.seq)


def same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)


def test_a_budget_that_holds_the_prompt_changes_no_bit(decoder, policy):
    expected = held(decoder, PROMPTS[0], None, greedy(12))
    for budget in (1.0, 120, "1MiB"):
        found = held(decoder, PROMPTS[0], keep(policy, budget, refit=True), greedy(12))
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("refit", REFITS)
def test_lanes_hold_the_budget_and_stand_for_no_more_than_the_tokens(decoder, policy, refit):
    cache = keep(policy, 0.3, refit=refit, pinned=((30, 34),))
    _, _, positions, masses, counts = held(decoder, PROMPTS[0], cache)
    assert int((counts > 0).sum()) == round(0.3 * 90 * LANES)
    assert (counts > 1).any() and (counts.sum(-1) <= 90).all()
    for lane, number, mass in zip(*(x.flatten(0, 1) for x in (positions, counts, masses)), strict=True):
        stays = lane >= 0
        assert (lane[stays].diff() > 0).all()
        guarded = torch.isin(lane, torch.tensor([0, 1, 30, 31, 32, 33, 86, 87, 88, 89]))
        assert guarded.sum() == 10 and (number[guarded] == 1).all() and (mass[guarded] == 0).all()


@pytest.mark.parametrize("refit", REFITS)
@pytest.mark.parametrize("chunk", [7, 64])
def test_chunked_prefill_gives_the_same_lanes_as_one_shot(decoder, policy, refit, chunk):
    cache = keep(policy, 0.3, refit=refit)
    whole = held(decoder, PROMPTS[0], cache)
    same(
        held(decoder, PROMPTS[0], cache, prefill_chunk=chunk, max_seqs=4, max_batch_tokens=max(chunk, 4)),
        whole,
    )


def everyone(policy):
    return [
        keep(policy, 0.2),
        keep("snapkv", 0.2, refit=True),
        None,
        keep(policy, 0.3, decode_slack=3, refit=True),
        keep("window", 15),
        keep(policy, pages(24), refit=True),
        keep(policy, pages(30), prefill="streaming"),
    ]


def alone(decoder, ids, cache, params=None, **options):
    return run(tiny_engine(decoder, **options), ids, cache, params)[0]


@pytest.fixture
def each_alone(decoder, policy):
    return [alone(decoder, p, c, greedy(20)) for p, c in zip(PROMPTS, everyone(policy), strict=True)]


def run_all(engine, caches):
    ids = [engine.add(p, greedy(20), cache=c)[0] for p, c in zip(PROMPTS, caches, strict=True)]
    collector = drain(engine)
    assert engine.store.pool.bytes_in_use == 0
    return [collector.tokens[i] for i in ids]


def test_a_batch_of_different_policies_equals_each_alone(decoder, policy, each_alone):
    full = [alone(decoder, p, None, greedy(20)) for p in PROMPTS]
    assert sum(a != b for a, b in zip(each_alone, full, strict=True)) > 3, "compression must be felt"
    assert run_all(tiny_engine(decoder), everyone(policy)) == each_alone
    chunked = run_all(tiny_engine(decoder, prefill_chunk=16, max_batch_tokens=40), everyone(policy))
    # The last one streams, and compresses with every chunk.
    assert chunked[:6] == each_alone[:6]


def test_preempted_requests_come_to_the_same_lanes_along_their_course(decoder, policy, each_alone):
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(34 * LANES)))
    assert run_all(engine, everyone(policy)) == each_alone
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("slack", [None, 3])
@pytest.mark.parametrize("refit", REFITS)
def test_four_completions_equal_four_single_runs_with_following_seeds(decoder, policy, slack, refit):
    cache = keep(policy, 0.2, decode_slack=slack, refit=refit)
    params = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    single = [alone(decoder, PROMPTS[0], cache, SamplingParams(seed=7 + i, **params)) for i in range(4)]
    engine = tiny_engine(decoder, prefill_chunk=32)
    requests = engine.add(PROMPTS[0], SamplingParams(seed=7, n=4, **params), cache=cache)
    collector = drain(engine)
    assert [collector.tokens[r] for r in requests] == single
    assert [collector.finished[r].request.num_reused for r in requests] == [0, 90, 90, 90]


def test_siblings_get_masses_and_counts_with_their_lanes(decoder, policy):
    engine = tiny_engine(decoder)
    (leader, *_) = engine.add(PROMPTS[0], greedy(6, n=4), cache=keep(policy, 0.2))
    engine.step()
    first, *others = (request.seq for request in engine.scheduler.running)
    assert len(others) == 3 and engine.store.num_merged(first) > 0
    for seq in others:
        assert engine.store.has_mass[seq]
        same(entries(engine, Lanes(seq)), entries(engine, Lanes(first)))
    drain(engine)
    assert leader == 0 and engine.store.pool.bytes_in_use == 0


@pytest.mark.parametrize("count", [LANES, 3 * LANES + 1, 9 * LANES + 2])
def test_a_byte_budget_holds_at_every_step_of_a_streaming_request(decoder, policy, count):
    engine = tiny_engine(decoder, prefill_chunk=9)
    cache = keep(policy, pages(count), prefill="streaming", recent=2, sinks=1)
    (request,) = engine.add(PROMPTS[3], greedy(40), cache=cache)
    collector = check_ceiling(engine, count)
    assert len(collector.tokens[request]) == 40


@pytest.mark.parametrize("refit", REFITS)
def test_streaming_and_decoding_merge_merged_lanes_again(decoder, policy, refit):
    engine, lanes = tiny_engine(decoder, prefill_chunk=16), Lanes()
    cache = keep(policy, 20, prefill="streaming", decode_slack=4, refit=refit)
    engine.add(PROMPTS[3], greedy(40), cache=cache, lanes=lanes)
    most, largest = 0, 0
    while engine.has_work:
        engine.step()
        most = max(most, int(engine.store.lengths.sum()))
        for running in engine.scheduler.running:
            largest = max(largest, int(engine.store.counts(running.seq).max()))
    assert most <= (20 + 16) * LANES
    _, _, positions, _, counts = entries(engine, lanes)
    # Only entries merged more than once can stand for more than half of a chunk.
    assert largest > 4
    assert (counts.sum(-1) <= 159).all()
    assert (positions.amax(-1) == 158).all()


def test_a_further_turn_goes_on_from_merged_lanes(decoder, policy):
    engine, lanes = tiny_engine(decoder), Lanes()
    cache = keep(policy, 0.3)
    first, _ = run(engine, PROMPTS[0], cache, greedy(8), lanes=lanes)
    before = entries(engine, lanes)
    second = [*PROMPTS[0], *first, *prompt(20, seed=50)]
    _, event = run(engine, second, cache, greedy(4), lanes=lanes)
    assert event.request.num_reused == 97
    after = entries(engine, lanes)
    assert (after[4].sum(-1) <= len(second) + 3).all()
    assert int(after[4].max()) > 1 and int(before[4].max()) > 1


def test_lanes_that_were_reclaimed_are_computed_again_to_the_same_entries(decoder, policy):
    cache = keep(policy, 0.3, decode_slack=3)

    def conversation(reclaim):
        engine, lanes = tiny_engine(decoder), Lanes()
        first, _ = run(engine, PROMPTS[0], cache, greedy(8), lanes=lanes)
        if reclaim:
            engine.scheduler._reclaim(lanes)
        second = [*PROMPTS[0], *first, *prompt(20, seed=50)]
        return held(decoder, second, cache, greedy(6), engine, lanes)

    same(conversation(True), conversation(False))


def test_a_prompt_asked_again_drops_the_reply_and_keeps_merged_lanes(decoder, policy):
    engine, lanes = tiny_engine(decoder), Lanes()
    cache = keep(policy, 0.3)
    run(engine, PROMPTS[0], cache, greedy(8), lanes=lanes)
    _, event = run(engine, PROMPTS[0], cache, greedy(8), lanes=lanes)
    assert event.request.num_reused == 90
    assert (entries(engine, lanes)[4].sum(-1) <= 97).all()


def test_another_beginning_is_not_answered_from_lanes_that_hold_the_old_one(decoder, policy):
    cache = keep(policy, 0.3)
    other = [*PROMPTS[0][:50], *prompt(40, seed=51)]
    expected = held(decoder, other, cache, greedy(8))
    engine, lanes = tiny_engine(decoder), Lanes()
    run(engine, PROMPTS[0], cache, greedy(8), lanes=lanes)
    found = held(decoder, other, cache, greedy(8), engine, lanes)
    same(found, expected)


def test_a_later_turn_changed_in_the_middle_is_computed_again_along_the_course(decoder, policy):
    cache = keep(policy, 0.3)
    engine, lanes = tiny_engine(decoder), Lanes()
    first, _ = run(engine, PROMPTS[0], cache, greedy(8), lanes=lanes)
    past = [*PROMPTS[0], *first]
    run(engine, [*past, *prompt(30, seed=50)], cache, greedy(8), lanes=lanes)
    found = held(decoder, [*past, *prompt(30, seed=52)], cache, greedy(8), engine, lanes)
    engine, lanes = tiny_engine(decoder), Lanes()
    run(engine, PROMPTS[0], cache, greedy(8), lanes=lanes)
    same(found, held(decoder, [*past, *prompt(30, seed=52)], cache, greedy(8), engine, lanes))


def test_more_pinned_than_the_budget_is_kept_whole(decoder, policy):
    engine, lanes = tiny_engine(decoder), Lanes()
    tokens, event = run(
        engine, PROMPTS[0], keep(policy, 10, sinks=0, recent=0), lanes=lanes, pinned=((0, 500),)
    )
    assert (len(tokens), event.reason) == (12, "length")
    assert int(engine.store.lengths[lanes.seq].min()) == len(PROMPTS[0]) + 11


def test_more_sinks_and_recent_entries_than_a_computer_counts_fill_the_budget(decoder, policy):
    engine, lanes = tiny_engine(decoder), Lanes()
    run(engine, PROMPTS[0], keep(policy, 10, sinks=2**40, recent=2**40), greedy(1), lanes=lanes)
    assert int(engine.store.lengths[lanes.seq].sum()) == 10 * LANES
