"""Demotion when memory, pages or tiers are short, and when turns end early or are asked again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from demoting import KINDS, WARM, Talk, demoting
from keeping import LANES, keep, run
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.cache.lanes import LaneStore
from minikv.cache.tiers.below import Below
from minikv.cache.tiers.encode import Encoder
from minikv.config import CacheConfig, TierConfig
from minikv.errors import ConfigError
from minikv.scheduler.request import Lanes

kinds = pytest.mark.parametrize("policy", KINDS)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def nothing_left(engine):
    pool = engine.store.pool
    return pool.num_free == pool.num_pages and engine.store.num_free_seqs == engine.store.max_seqs


def after(method, calls, error):
    """A method that raises once it was called so often."""
    left = [calls]

    def failing(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return method(*args, **options)

    return failing


# Memory


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't allocate memory")], ids=["python", "torch"]
)
@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [(Below, "fill", 0), (Encoder, "decode", 1), (LaneStore, "take", 0), (LaneStore, "take", 1)],
    ids=["fill", "decode", "take", "take-later"],
)
@pytest.mark.parametrize("reclaimed", [False, True])
def test_where_memory_is_short_a_turn_goes_on_with_less_and_others_with_all(
    decoder, monkeypatch, owner, name, calls, error, reclaimed
):
    engine = tiny_engine(decoder, tiers=WARM)
    talk = Talk(engine, demoting())
    talk.ask(1)
    (other,) = engine.add(prompt(20, seed=77), greedy(40))
    expected = run(tiny_engine(decoder), prompt(20, seed=77), None, greedy(40))[0]
    collector = Collector()
    collector.take(engine.step())
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, after(getattr(owner, name), calls, error))
        if reclaimed:
            engine.scheduler._reclaim(talk.lanes)
        (request,) = engine.add(
            talk.history + prompt(9, seed=2), greedy(5), lanes=talk.lanes, cache=talk.cache
        )
        drain(engine, collector)
    assert collector.tokens[other] == expected
    assert collector.reason(request) == "length" and len(collector.tokens[request]) == 5
    engine.release(talk.lanes)
    assert nothing_left(engine) and engine.storage._own == set()


# Pages


@pytest.mark.parametrize("warm", ["24KiB", "32KiB", "64MiB"])
def test_a_turn_that_is_preempted_without_room_below_says_all_it_would_have(decoder, warm):
    tiers = TierConfig(hot=hot_bytes(20 * LANES), warm=warm, prefixes=False)
    engine = tiny_engine(decoder, tiers=tiers)
    talk = Talk(engine, demoting())
    talk.ask(1)
    engine.add(prompt(8, seed=5), greedy(60))
    (request,) = engine.add(talk.history + prompt(23, seed=2), greedy(60), lanes=talk.lanes, cache=talk.cache)
    collector = drain(engine)
    assert collector.reason(request) == "length" and len(collector.tokens[request]) == 60
    assert engine.scheduler.num_preemptions


@kinds
@pytest.mark.parametrize("preempted", [False, True])
def test_a_turn_that_ends_while_it_is_read_leaves_what_was_before_it(decoder, policy, preempted):
    def answer(interrupted):
        tiers = TierConfig(hot=hot_bytes(20 * LANES), warm="64MiB")
        engine = tiny_engine(decoder, tiers=tiers, prefill_chunk=8)
        talk = Talk(engine, demoting(policy, 12))
        talk.ask(1)
        if interrupted:
            cancelled = talk.history + prompt(20, seed=2)
            (request,) = engine.add(cancelled, greedy(5), lanes=talk.lanes, cache=talk.cache)
            engine.step()
            if preempted:
                engine.scheduler._preempt(engine.scheduler.running[0], {})
            engine.abort(request)
            assert drain(engine).reason(request) == "abort"
            assert engine.store.pool.num_free == engine.store.pool.num_pages
        said, request = talk.ask(3, size=28)
        return said, request.num_reused, request.restored

    assert answer(True) == answer(False)


@kinds
def test_a_turn_that_ends_while_it_is_read_leaves_room_for_a_longer_question(decoder, policy):
    small = TierConfig(hot=hot_bytes(14 * LANES), warm="64MiB")
    engine = tiny_engine(decoder, tiers=small, prefill_chunk=8)
    talk = Talk(engine, demoting(policy, 12))
    talk.ask(1)
    (request,) = engine.add(talk.history + prompt(20, seed=2), greedy(5), lanes=talk.lanes, cache=talk.cache)
    engine.step()
    engine.abort(request)
    drain(engine)
    assert len(talk.ask(3, size=28)[0]) == 7


@kinds
def test_after_a_turn_that_was_preempted_and_ended_the_next_begins_with_everything(decoder, policy):
    def restored(preempted):
        engine = tiny_engine(decoder, tiers=WARM)
        talk = Talk(engine, demoting(policy))
        talk.ask(1)
        talk.history += prompt(23, seed=2)
        (request,) = engine.add(talk.history, greedy(30), lanes=talk.lanes, cache=talk.cache)
        collector = Collector()
        for _ in range(5):
            collector.take(engine.step())
        if preempted:
            engine.scheduler._preempt(engine.scheduler.running[0], {})
        engine.abort(request)
        drain(engine, collector)
        talk.history += collector.tokens[request]
        said, request = talk.ask(3)
        return said, request.restored

    assert restored(True) == restored(False) == (restored(False)[0], True)


# Asked again


@kinds
@pytest.mark.parametrize("slack", [None, 3])
def test_a_reply_cut_short_after_a_reclaim_is_gone_on_from_as_if_there_had_been_none(decoder, policy, slack):
    def answer(reclaimed):
        engine = tiny_engine(decoder, tiers=WARM)
        talk = Talk(engine, demoting(policy, decode_slack=slack))
        talk.ask(1)
        talk.ask(2, answer=12)
        if reclaimed:
            engine.scheduler._reclaim(talk.lanes)
        talk.history = talk.history[:-6]
        said, request = talk.ask(3, size=15, answer=12)
        again, _ = talk.ask(4)
        return said, again, request.num_reused, request.restored

    if slack is None:
        assert answer(True) == answer(False)
    else:  # what was chosen for the sake of the rest of the reply is computed again
        assert answer(True)[0] == answer(False)[0]


@kinds
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_the_last_question_is_answered_the_same_again_after_a_reclaim(decoder, policy, turns):
    engine = tiny_engine(decoder, tiers=WARM)
    talk = Talk(engine, demoting(policy))
    for seed in range(turns):
        said, _ = talk.ask(seed, answer=12)
    for reclaimed in (False, True, True):
        if reclaimed:
            engine.scheduler._reclaim(talk.lanes)
        talk.history = talk.history[: -len(said)]
        assert talk.ask(0, size=0, answer=12)[0] == said


@kinds
def test_a_turn_that_drops_between_others_leaves_nothing_behind_that_claims_to_be_whole(decoder, policy):
    engine = tiny_engine(decoder, tiers=WARM)
    talk = Talk(engine, demoting(policy))
    talk.ask(1)
    talk.ask(2, size=40, cache=keep(policy, 14))
    assert talk.lanes.course.below is None and engine.storage._own == set()
    held = engine.store.lengths[talk.lanes.seq].copy()
    talk.ask(3, size=9, answer=1)  # computes the last token that was said as well
    below = talk.lanes.course.below
    assert sum(span.header.num_rows for span in below.spans(below.end)) == held.sum() + 10 * LANES


# Whose spans make way


def test_lanes_that_are_below_alone_are_freed_when_they_are_abandoned(decoder):
    engine = tiny_engine(decoder, tiers=replace(WARM, prefixes=False))
    talk = Talk(engine, demoting())
    talk.ask(1)
    engine.scheduler._reclaim(talk.lanes)
    assert engine.storage.tiers.nbytes and talk.lanes.holds
    talk.lanes.abandoned = True
    run(engine, prompt(5))
    assert engine.storage.tiers.nbytes == 0


def test_a_question_that_is_replaced_and_ends_before_it_runs_leaves_what_is_freed(decoder):
    engine = tiny_engine(decoder, tiers=replace(WARM, prefixes=False))
    talk = Talk(engine, demoting())
    talk.ask(1)
    past = list(talk.history)
    talk.ask(2)
    (request,) = engine.add(past + prompt(9, seed=5), greedy(5), lanes=talk.lanes, cache=talk.cache)
    engine.scheduler._cut_to_common_prefix(engine._requests[request])
    engine.abort(request)
    drain(engine)
    assert talk.lanes.are_below
    talk.history = past
    assert talk.ask(3)[1].restored
    engine.scheduler._reclaim(talk.lanes)
    talk.lanes.abandoned = True
    run(engine, prompt(5))
    assert engine.storage.tiers.nbytes == 0


@pytest.mark.parametrize("first", ["whole", "demoting"])
def test_idle_conversations_make_way_below_for_others_of_either_kind(decoder, first):
    engine = tiny_engine(decoder, tiers=TierConfig(warm="40KiB", prefixes=False))
    idle, talk = Lanes(), Talk(engine, demoting())
    if first == "whole":
        run(engine, prompt(60), None, greedy(2), lanes=idle)
        engine.scheduler._reclaim(idle)
        assert idle.holds
        talk.ask(1, size=60)
        engine.scheduler._reclaim(talk.lanes)
        assert talk.lanes.holds and not idle.holds
    else:
        talk.ask(1, size=60)
        engine.scheduler._reclaim(talk.lanes)
        assert talk.lanes.holds
        run(engine, prompt(60), None, greedy(2), lanes=idle)
        engine.scheduler._reclaim(idle)
        assert idle.holds and not talk.lanes.holds
    assert engine.storage.report()["refused"] == 0
    assert len(talk.ask(2)[0]) == 7


def test_demotion_and_streaming_exclude_each_other():
    with pytest.raises(ConfigError, match="use prefill exact, or evicted drop"):
        CacheConfig(policy="snapkv", budget=0.1, evicted="demote", prefill="streaming")


@pytest.mark.parametrize("policy", ["snapkv", "gracekv"])
def test_an_idle_conversation_in_the_pool_makes_way_below_and_is_computed_again(decoder, policy):
    tiers = TierConfig(warm="80KiB", prefixes=False)
    engine, cache = tiny_engine(decoder, tiers=tiers), demoting(policy)
    idle, talk = Talk(engine, cache), Talk(engine, cache)
    idle.ask(1, size=60)
    assert idle.lanes.seq is not None and idle.lanes.course.below.nbytes
    said = [talk.ask(seed, size=60)[0] for seed in (2, 3)]
    assert idle.lanes.seq is None and not idle.lanes.holds
    assert talk.lanes.course.below.nbytes and not talk.lanes.course.below.lost
    alone = Talk(tiny_engine(decoder, tiers=tiers), cache)
    assert said == [alone.ask(seed, size=60)[0] for seed in (2, 3)]
    assert len(idle.ask(4)[0]) == 7  # from its first token again
    for each in (idle, talk):
        engine.release(each.lanes)
    assert engine.storage.tiers.nbytes == 0 and nothing_left(engine)


def test_a_turn_that_drops_nothing_forgets_nothing(decoder):
    engine = tiny_engine(decoder, tiers=WARM)
    talk = Talk(engine, demoting())
    talk.ask(1, size=60)
    held = talk.lanes.course.below.nbytes
    talk.ask(2, cache=keep("snapkv", 200))
    assert talk.lanes.course.below.nbytes == held > 0
    talk.ask(3)
    assert talk.lanes.course.below.end == 60 + 7 + 23 + 7 + 23 and engine.scheduler.num_restored == 1
    talk.ask(4, cache=keep("snapkv", 14))
    assert talk.lanes.course.below is None
