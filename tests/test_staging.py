"""Prompts that the pool cannot hold, computed against what is below it, one layer at a time."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from demoting import KINDS, WARM, Talk, demoting
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import keep, run
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.config import TierConfig
from minikv.scheduler.request import Lanes

CHUNK = 8
LAYERS = 6
LANES = 2 * LAYERS


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder(num_layers=LAYERS)


def engine_of(decoder, pages, **options):
    tiers = replace(WARM, hot=None if pages is None else hot_bytes(pages))
    return tiny_engine(decoder, **({"tiers": tiers, "prefill_chunk": CHUNK} | options))


def staged(engine):
    return engine.scheduler.starting.num_staged


def layer_pages(num_tokens):
    return -(-num_tokens // 4) * 2


@pytest.mark.parametrize("policy", KINDS)
def test_a_prompt_larger_than_the_pool_says_what_it_would_in_a_larger_one(decoder, policy):
    ids, cache = prompt(101, seed=5), demoting(policy)
    expected, _ = run(engine_of(decoder, None), ids, cache)
    small = engine_of(decoder, 15 * LANES)
    tokens, finish = run(small, ids, cache)
    assert tokens == expected and finish.reason == "length"
    assert staged(small) == 1 and small.storage.tiers.nbytes == 0
    assert small.store.pool.num_free == small.store.pool.num_pages


@pytest.mark.parametrize("policy", KINDS)
def test_turns_of_a_conversation_larger_than_the_pool_say_what_they_would_in_a_larger_one(decoder, policy):
    large, small = (Talk(engine_of(decoder, pages), demoting(policy)) for pages in (None, 15 * LANES))
    for seed, size in enumerate((61, 23, 30, 5)):
        assert small.ask(seed, size)[0] == large.ask(seed, size)[0]
    assert staged(small.engine) >= 2 and large.engine.scheduler.num_restored == 3
    # What is kept is the same as well: what is chosen from is everything.
    lanes = [talk.lanes for talk in (small, large)]
    assert (small.engine.store.lengths[lanes[0].seq] == large.engine.store.lengths[lanes[1].seq]).all()


@pytest.mark.parametrize("chunk", [1, 3, 7, 12])
def test_chunks_of_any_size_give_the_same(decoder, chunk):
    expected, _ = run(engine_of(decoder, None), prompt(90, seed=1), demoting(budget=20))
    engine = engine_of(decoder, 16 * LANES, prefill_chunk=chunk)
    tokens, _ = run(engine, prompt(90, seed=1), demoting(budget=20))
    assert staged(engine) == 1 and tokens == expected


def test_the_pool_is_never_passed_and_holds_little_beside_one_layer(decoder):
    ids, cache = prompt(200, seed=2), demoting(budget=12)
    engine = engine_of(decoder, 20 * LANES)
    (_,) = engine.add(ids, greedy(4), cache=cache)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.store.pool.num_pages - engine.store.pool.num_free)
    kept, chunk = (12 * LANES + 4 * LANES) // 4, 3 * LANES
    assert staged(engine) == 1
    assert most <= layer_pages(200) + kept + chunk < 50 * LANES * 2 // 3


def test_a_budget_that_holds_everything_keeps_everything(decoder):
    ids = prompt(90, seed=3)
    expected, _ = run(engine_of(decoder, None), ids, demoting(budget=200))
    # As much as is below the pool, in the end, and a layer of it beside that while it is computed.
    engine = engine_of(decoder, 22 * LANES)
    tokens, finish = run(engine, ids, demoting(budget=200))
    assert tokens is None and finish.reason == "error" and "raise --kv-hot" in finish.message
    engine = engine_of(decoder, 32 * LANES)
    assert run(engine, ids, demoting(budget=200))[0] == expected


def test_company_changes_nothing(decoder):
    ids, cache = prompt(120, seed=4), demoting(budget=16)
    expected, _ = run(engine_of(decoder, None), ids, cache)
    engine, collector = engine_of(decoder, 16 * LANES), Collector()
    (first,) = engine.add(ids, greedy(12), cache=cache)
    others = [engine.add(prompt(20, seed=n), greedy(9))[0] for n in range(3)]
    drain(engine, collector)
    assert staged(engine) == 1 and collector.tokens[first] == expected
    plain = [run(engine_of(decoder, None), prompt(20, seed=n), params=greedy(9))[0] for n in range(3)]
    assert [collector.tokens[other] for other in others] == plain


@pytest.mark.parametrize("steps", range(1, 14, 2))
def test_a_prompt_that_is_preempted_at_any_step_goes_on(decoder, steps):
    large, small = (Talk(engine_of(decoder, pages), demoting()) for pages in (None, 15 * LANES))
    for talk in (large, small):
        talk.ask(0, 61)
    assert small.ask(1, 40, steps=steps)[0] == large.ask(1, 40)[0]
    assert small.ask(2)[0] == large.ask(2)[0]
    first = Talk(engine_of(decoder, 15 * LANES), demoting())
    again = Talk(engine_of(decoder, None), demoting())
    assert first.ask(5, 100, steps=steps)[0] == again.ask(5, 100)[0]
    assert first.ask(6)[0] == again.ask(6)[0]


@pytest.mark.parametrize("steps", range(1, 14, 2))
def test_a_prompt_that_is_taken_back_at_any_step_leaves_what_was_there(decoder, steps):
    talks = [Talk(engine_of(decoder, pages), demoting()) for pages in (None, 15 * LANES)]
    replies = []
    for talk in talks:
        talk.ask(0, 61)
        engine = talk.engine
        (request,) = engine.add(talk.history + prompt(40, seed=9), greedy(4), lanes=talk.lanes)
        if talk is talks[1]:
            for _ in range(steps):
                engine.step()
        engine.abort(request)
        drain(engine)
        replies.append([talk.ask(1)[0], talk.ask(2)[0]])
        engine.release(talk.lanes)
        assert engine.storage.tiers.nbytes == 0
        assert engine.store.pool.num_free == engine.store.pool.num_pages
    assert replies[0] == replies[1]


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_first_prompt_that_is_stopped_leaves_nothing_and_can_be_asked_again(decoder, steps):
    ids, cache = prompt(101, seed=5), demoting()
    expected, _ = run(engine_of(decoder, None), ids, cache)
    engine, lanes = engine_of(decoder, 15 * LANES), Lanes()
    (request,) = engine.add(ids, greedy(12), lanes=lanes, cache=cache)
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    drain(engine)
    assert not lanes.token_ids and not engine.storage.tiers.nbytes
    assert engine.store.pool.num_free == engine.store.pool.num_pages
    (request,) = engine.add(ids, greedy(12), lanes=lanes, cache=cache)
    collector = drain(engine)
    assert collector.tokens[request] == expected


def test_a_first_question_that_the_pool_held_is_chosen_from_as_well(decoder):
    large, small = (Talk(engine_of(decoder, pages), demoting()) for pages in (None, 15 * LANES))
    for talk in (large, small):
        talk.ask(0, 10, answer=3)  # nothing is dropped yet
        talk.ask(1, 70)
    assert staged(small.engine) == 1 and small.history == large.history


@pytest.mark.parametrize("when", range(1, 16))
def test_what_cannot_be_read_any_more_is_computed_again_or_ends_the_request(decoder, when):
    ids, cache = prompt(101, seed=5), demoting()
    expected, _ = run(engine_of(decoder, None), ids, cache)
    engine = engine_of(decoder, 15 * LANES)
    tiers, reads = engine.storage.tiers, 0
    read = tiers.read

    def failing(handle):
        nonlocal reads
        reads += 1
        return None if reads == 3 * when else read(handle)

    tiers.read = failing
    tokens, finish = run(engine, ids, cache)
    assert tokens == expected and finish.reason == "length"
    tiers.read = lambda handle: None
    tokens, finish = run(engine, ids, cache)
    assert finish.reason == "error" and "cannot be read" in finish.message
    assert engine.store.pool.num_free == engine.store.pool.num_pages


def test_tiers_without_room_end_the_request_with_the_reason(decoder):
    engine = engine_of(decoder, 15 * LANES, tiers=TierConfig(hot=hot_bytes(15 * LANES), warm="8KiB"))
    lanes = Lanes()
    _, finish = run(engine, prompt(101), demoting(), lanes=lanes)
    assert finish.reason == "context" and "--kv-warm" in finish.message
    assert engine.store.pool.num_free == engine.store.pool.num_pages
    assert run(engine, prompt(20), demoting(), lanes=lanes)[1].reason == "length"


def test_several_replies_to_a_staged_prompt_share_it(decoder):
    params = greedy(5, n=3)
    expected = [run(engine_of(decoder, None), prompt(101, seed=5), demoting(), greedy(5))[0]] * 3
    engine = engine_of(decoder, 19 * LANES)
    requests = engine.add(prompt(101, seed=5), params, cache=demoting())
    collector = drain(engine)
    assert [collector.tokens[request] for request in requests] == expected


def test_the_log_says_once_that_prompts_are_staged(decoder, caplog):
    engine = engine_of(decoder, 15 * LANES)
    with caplog.at_level(logging.INFO):
        run(engine, prompt(101), demoting())
        run(engine, prompt(102), demoting())
    assert sum("layer by layer" in record.message for record in caplog.records) == 1
    assert engine.tier_stats["prompts_staged"] == 2


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from(["say", "again", "reclaim", "stop"])),
        max_size=8,
    ),
    st.sampled_from(KINDS),
    st.sampled_from(["40KiB", "64MiB"]),
)
def test_random_conversations_in_a_small_pool_end_with_nothing_left(moves, policy, warm):
    engine = engine_of(
        tiny_decoder(num_layers=LAYERS), 15 * LANES, tiers=TierConfig(hot=hot_bytes(15 * LANES), warm=warm)
    )
    talks = [Talk(engine, demoting(policy)) for _ in range(3)]
    for who, steps, what in moves:
        talk = talks[who]
        talk.disturb(what)
        if what == "stop":
            (request,) = engine.add(talk.history + prompt(37), greedy(3), lanes=talk.lanes, cache=talk.cache)
            for _ in range(steps):
                engine.step()
            engine.abort(request)
            drain(engine)
        else:
            (request,) = engine.add(
                talk.history + prompt(37, seed=who), greedy(3), lanes=talk.lanes, cache=talk.cache
            )
            collector = drain(engine)
            talk.history += prompt(37, seed=who) + collector.tokens.get(request, [])
            assert collector.finished[request].reason in ("length", "context")
    for talk in talks:
        engine.release(talk.lanes)
    assert engine.storage.tiers.nbytes == 0
    assert engine.store.pool.num_free == engine.store.pool.num_pages


@pytest.mark.parametrize("budget", [24, 0.3])
def test_spans_of_a_prompt_larger_than_the_pool_zoom_in_as_in_a_larger_one(decoder, budget):
    cache = keep("sekv", budget)
    large, small = (Talk(engine_of(decoder, pages), cache) for pages in (None, 30 * LANES))
    for seed, size in enumerate((141, 23, 30)):
        assert small.ask(seed, size)[0] == large.ask(seed, size)[0]
    assert staged(small.engine) == 1 and small.engine.zoomed.rows == large.engine.zoomed.rows > 0
