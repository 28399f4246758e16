"""Conversations under compression: the next turn goes on from what was kept, and can be computed again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import LANES, PAGE_BYTES, check_ceiling, keep, pages, run
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.config import CacheConfig, TierConfig
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


CACHES = [
    keep("snapkv", 16),
    keep("adakv", 0.4, decode_slack=3),
    keep("expected", 14, prefill="streaming"),
    keep("compresskv", pages(3 * LANES), prefill="streaming", sinks=1, recent=2),
]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shared", [0, 6])
def test_a_turn_put_in_the_place_of_others_is_answered_as_if_they_had_never_been(decoder, cache, shared):
    engine, lanes = tiny_engine(decoder), Lanes()
    said, _, _ = turns(engine, cache, count=1, lanes=lanes)
    past = prompt(23, seed=100) + said[0]
    question = prompt(23, seed=101)[:shared] + prompt(20, seed=9)
    fresh, _ = run(engine, past + question, cache, greedy(9), lanes=lanes)

    engine = tiny_engine(decoder)
    _, _, lanes = turns(engine, cache, count=3)
    tokens, _ = run(engine, past + question, cache, greedy(9), lanes=lanes)
    assert tokens == fresh
    assert len(lanes.token_ids) == len(past + question) + 8


@pytest.mark.parametrize("cache", CACHES)
def test_a_turn_that_was_taken_back_within_its_prompt_leaves_no_trace(decoder, cache):
    expected, _, _ = turns(tiny_engine(decoder, prefill_chunk=8), cache, count=2)
    engine, lanes = tiny_engine(decoder, prefill_chunk=8), Lanes()
    said, _, _ = turns(engine, cache, count=1, lanes=lanes)
    history = prompt(23, seed=100) + said[0]
    (request,) = engine.add(history + prompt(60, seed=7), greedy(9), lanes=lanes, cache=cache)
    for _ in range(4):
        engine.step()
    engine.abort(request)
    drain(engine)
    tokens, _ = run(engine, history + prompt(23, seed=101), cache, greedy(9), lanes=lanes)
    assert tokens == expected[1]


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_a_question_asked_again_gets_the_same_answer(decoder, cache, preempted):
    engine = tiny_engine(decoder)
    said, requests, lanes = turns(engine, cache, count=3)
    asked = requests[-1].tokens[: requests[-1].num_prompt]
    for _ in range(2):
        (request,) = engine.add(asked, greedy(9), lanes=lanes, cache=cache)
        collector = Collector()
        collector.take(engine.step())
        collector.take(engine.step())
        if preempted:
            engine.scheduler._preempt(engine.scheduler.running[0], {})
        drain(engine, collector)
        assert collector.tokens[request] == said[-1]


def test_a_question_asked_again_computes_no_token_of_its_prompt(decoder):
    engine, cache = tiny_engine(decoder), keep("snapkv", 16)
    _, requests, lanes = turns(engine, cache, count=2)
    asked = requests[-1].tokens[: requests[-1].num_prompt]
    _, event = run(engine, asked, cache, greedy(9), lanes=lanes)
    assert event.request.num_reused == len(asked)
    # Under another policy it is another question.
    _, event = run(engine, asked, keep("window", 16), greedy(9), lanes=lanes)
    assert event.request.num_reused == 0


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


# Random schedules

SMALL = tiny_decoder(num_layers=1)
budgets = st.one_of(
    st.floats(0.01, 1.0), st.integers(1, 40), st.integers(2, 30).map(lambda n: f"{n * PAGE_BYTES}B")
)
caches = st.one_of(
    st.none(),
    st.builds(
        CacheConfig,
        policy=st.sampled_from(["window", "snapkv", "adakv", "expected", "compresskv"]),
        budget=budgets,
        sinks=st.integers(0, 4),
        recent=st.integers(0, 6),
        window=st.integers(1, 8),
        prefill=st.sampled_from(["exact", "streaming"]),
        decode_slack=st.sampled_from([None, None, 1, 7]),
    ),
)
commands = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 12), st.sampled_from([1, 1, 2]), caches),
        st.tuples(st.just("turn"), st.integers(1, 20), st.integers(1, 6), st.integers(0, 1), caches),
        st.tuples(st.just("again"), st.integers(0, 1), st.integers(1, 6), st.integers(0, 25), caches),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("preempt"), st.integers(0, 3)),
    ),
    max_size=12,
)


@given(commands, st.integers(6, 40), st.sampled_from([3, 8, 64]), st.integers(1, 4))
@settings(max_examples=60)
def test_random_schedules_under_policies_end_with_all_pages_free(schedule, pool, chunk, max_seqs):
    engine = tiny_engine(
        SMALL,
        tiers=TierConfig(hot=hot_bytes(pool * 2)),
        prefill_chunk=chunk,
        max_batch_tokens=max(chunk, max_seqs),
        max_seqs=max_seqs,
    )
    collector, added = Collector(), []
    conversations = [(Lanes(), []), (Lanes(), [])]
    for command in schedule:
        match command:
            case ("add", length, tokens, n, cache):
                added += engine.add(prompt(length, seed=len(added)), greedy(tokens, n=n), cache=cache)
            case ("turn", length, tokens, which, cache):
                lanes, history = conversations[which]
                if not lanes.busy:
                    history += prompt(length, seed=len(added))
                    added += engine.add(history, greedy(tokens), lanes=lanes, cache=cache)
            case ("again", which, tokens, dropped, cache):
                # The same question, another in its place, or one that cuts into what was said before.
                lanes, history = conversations[which]
                del history[max(1, len(history) - dropped) :]
                if history and not lanes.busy:
                    added += engine.add(history, greedy(tokens), lanes=lanes, cache=cache)
            case ("step", count):
                for _ in range(count):
                    collector.take(engine.step())
            case ("abort", which) if added:
                engine.abort(added[which % len(added)])
            case ("preempt", which) if engine.scheduler.running:
                running = engine.scheduler.running
                engine.scheduler._preempt(running[which % len(running)], {})
    drain(engine, collector)
    for lanes, _ in conversations:
        engine.release(lanes)
    engine.store.check()
    assert set(collector.finished) == set(added)
    assert engine.store.pool.bytes_in_use == 0
    messages = [e.message for e in collector.finished.values() if e.reason == "error"]
    assert all("pool" in message for message in messages), messages
