"""Conversations whose lanes are compressed: what each turn goes on from, and what they may hold."""

from __future__ import annotations

import pytest
from compression_tools import LANES, PAGE_BYTES, check_ceiling, keep, pages, run
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.config import TierConfig
from minikv.scheduler.request import Lanes


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def turns(engine, cache, count=4, size=23, answer=9, lanes=None, check=lambda: None, **options):
    """A conversation of turns that each bring `size` new tokens; the model's tokens and its requests."""
    lanes = lanes or Lanes()
    history, said, requests = [], [], []
    for turn in range(count):
        history += prompt(size, seed=100 + turn)
        (request,) = engine.add(history, greedy(answer), lanes=lanes, cache=cache, **options)
        collector = Collector()
        while engine.has_work:
            collector.take(engine.step())
            check()
        said.append(collector.tokens.get(request))
        requests.append(collector.finished[request].request)
        history += said[-1] or []
    return said, requests, lanes


def test_each_turn_goes_on_from_the_compressed_past_and_is_compressed_after_its_prompt(decoder):
    engine = tiny_engine(decoder)
    _said, requests, lanes = turns(engine, keep("snapkv", 16))
    # Every turn ends with the budget and the reply, of which the last token is not computed.
    assert int(engine.store.lengths[lanes.seq].sum()) == (16 + 8) * LANES
    assert [r.num_reused for r in requests] == [0, 31, 63, 95]
    assert len(lanes.token_ids) == 4 * 32 - 1
    positions = engine.store.positions(lanes.seq)
    assert int(positions.max()) == 126
    assert requests[-1].full_kv_bytes == 32 * LANES * PAGE_BYTES


@pytest.mark.parametrize("cache", [keep("snapkv", 16), keep("expected", 14, prefill="streaming")])
def test_a_conversation_preempted_in_a_turn_says_the_same(decoder, cache):
    expected, _, _ = turns(tiny_engine(decoder), cache)
    engine, lanes = tiny_engine(decoder), Lanes()
    said, _, _ = turns(engine, cache, count=3, lanes=lanes)
    history = [*lanes.token_ids, said[-1][-1], *prompt(23, seed=103)]
    (request,) = engine.add(history, greedy(9), lanes=lanes, cache=cache)
    collector = Collector()
    for _ in range(4):
        collector.take(engine.step())
    victim = engine.scheduler.running[0]
    engine.scheduler._preempt(victim, {})
    drain(engine, collector)
    assert collector.tokens[request] == expected[3]
    assert engine.scheduler.num_preemptions == 1


def test_a_reclaimed_conversation_is_computed_again_along_its_course(decoder):
    cache = keep("snapkv", 12)
    expected, _, _ = turns(tiny_engine(decoder), cache)
    # Too small for the whole conversation at once: it can only go on as it came.
    engine, lanes = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(14 * LANES))), Lanes()
    said, _, _ = turns(engine, cache, count=3, lanes=lanes)
    assert said == expected[:3]
    run(engine, prompt(50), None, greedy(2))
    assert engine.scheduler.num_reclaimed == 1
    history = [*lanes.token_ids, said[-1][-1], *prompt(23, seed=103)]
    (request,) = engine.add(history, greedy(9), lanes=lanes, cache=cache)
    collector = drain(engine)
    assert collector.tokens[request] == expected[3]


def test_a_conversation_that_departs_from_its_past_goes_on_from_what_is_left(decoder):
    engine, cache = tiny_engine(decoder), keep("snapkv", 16)
    _, _, lanes = turns(engine, cache)
    other = [*lanes.token_ids[:50], *prompt(20, seed=9)]
    tokens, event = run(engine, other, cache, lanes=lanes)
    assert event.request.num_reused == 50
    assert len(tokens) == 12
    assert int(engine.store.positions(lanes.seq).max()) == len(other) + 12 - 2


def test_a_lower_ceiling_in_a_later_turn_is_held_from_its_first_step(decoder):
    engine = tiny_engine(decoder)
    _, _, lanes = turns(engine, keep("snapkv", 0.9))
    limit = 3 * LANES
    cache = keep("snapkv", pages(limit), prefill="streaming", sinks=1, recent=2)
    history = [*lanes.token_ids, *prompt(30, seed=3)]
    (request,) = engine.add(history, greedy(9), lanes=lanes, cache=cache)
    collector = check_ceiling(engine, limit)
    assert len(collector.tokens[request]) == 9


def test_a_conversation_may_change_its_policy_between_turns(decoder):
    engine, lanes = tiny_engine(decoder), Lanes()
    history = []
    for turn, cache in enumerate(
        (None, keep("snapkv", 20), None, keep("adakv:expected", 0.2), keep("window", 9))
    ):
        history += prompt(23, seed=turn)
        tokens, _ = run(engine, history, cache, greedy(5), lanes=lanes)
        history += tokens
    assert int(engine.store.lengths[lanes.seq].sum()) == (9 + 4) * LANES


def test_forty_turns_under_a_byte_budget_never_pass_it_and_without_a_policy_the_pool_ends_them(decoder):
    long = tiny_decoder(max_context=2048)
    limit = 6 * LANES

    def within():
        assert engine.store.pool.num_pages - engine.store.pool.num_free <= limit

    hot = TierConfig(hot=hot_bytes(limit))
    engine = tiny_engine(long, tiers=hot)
    cache = keep("snapkv", pages(limit), prefill="streaming")
    said, _, _ = turns(engine, cache, count=40, check=within, pinned=((0, 5),))
    assert all(len(answer) == 9 for answer in said)
    assert engine.scheduler.num_reclaimed == engine.scheduler.num_preemptions == 0
    engine, lanes = tiny_engine(long, tiers=hot), Lanes()
    tokens, event = run(engine, prompt(15), None, greedy(100), lanes=lanes)
    assert (event.reason, len(tokens)) == ("context", 10)
    assert "--kv-policy" in event.message
