"""Idle conversations that leave the pool whole: the next turn computes only what is new."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cli_tools import write_tiny_model
from keeping import LANES, PROMPTS, keep, run
from session_tools import MORE, PARAMS, begun, load, more
from swapping import caches, every_cache, make_tiers, no_span, nothing_left, rows_computed
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv import SessionError
from minikv.config import TierConfig
from minikv.scheduler.request import Lanes


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture
def tiers(tmp_path):
    return partial(make_tiers, tmp_path)


# Turns


def conversation(engine, cache, count=4, between=lambda lanes: None, params=None):
    """Turns of a conversation, with something done after each; tokens, tokens reused, lanes."""
    lanes, history, said, reused = Lanes(), [], [], []
    for turn in range(count):
        history += prompt(23, seed=100 + turn)
        tokens, event = run(engine, history, cache, params or greedy(9), lanes=lanes)
        said.append(tokens)
        reused.append(event.request.num_reused)
        history += tokens
        between(lanes)
    return said, reused, lanes


def demoted(engine):
    """Something to do after each turn: the lanes leave the pool."""

    def reclaim(lanes):
        if lanes.seq is not None:
            engine.scheduler._reclaim(lanes)

    return reclaim


def without_tiers(decoder, cache):
    """What is said where lanes are computed again each turn; it sums in another order than one that goes on,
    which a policy with slack can notice."""
    engine = tiny_engine(decoder)
    return conversation(engine, cache, between=demoted(engine))[0]


@every_cache("kind", ["warm", "cold"])
def test_a_reclaimed_conversation_goes_on_and_computes_only_what_is_new(decoder, tiers, cache, kind):
    expected, reused, _ = conversation(tiny_engine(decoder), cache)
    engine = tiny_engine(decoder, tiers=tiers(kind))
    rows = rows_computed(engine)
    said, again, lanes = conversation(engine, cache, between=demoted(engine))
    assert (said, again) == (expected, reused)
    assert sum(rows) == 4 * 32 - 1
    assert engine.storage.num_restored == 3 and engine.scheduler.num_reclaimed == 4
    assert lanes.seq is None and len(lanes.token_ids) == 4 * 32 - 1
    assert nothing_left(engine, [lanes])


@every_cache("kind", ["few", "none"])
def test_a_conversation_whose_tiers_are_small_says_the_same(decoder, tiers, cache, kind):
    expected = (
        without_tiers(decoder, cache) if kind == "none" else conversation(tiny_engine(decoder), cache)[0]
    )
    engine = tiny_engine(decoder, tiers=tiers(kind))
    said, _, lanes = conversation(engine, cache, between=demoted(engine))
    assert said == expected
    assert nothing_left(engine, [lanes])


@caches
def test_a_demoted_conversation_that_is_lost_is_computed_again(decoder, tiers, cache):
    expected = without_tiers(decoder, cache)
    engine = tiny_engine(decoder, tiers=tiers("warm"))

    def spoil(lanes):
        demoted(engine)(lanes)
        engine.storage.tiers.drop(lanes.swapped.handles[1])

    said, _, lanes = conversation(engine, cache, between=spoil)
    assert said == expected and engine.storage.num_restored == 0
    assert nothing_left(engine, [lanes])


@caches
@pytest.mark.parametrize("shared", [0, 6])
def test_a_demoted_conversation_cut_back_is_answered_as_if_it_had_stayed(decoder, tiers, cache, shared):
    engine = tiny_engine(decoder)
    said, _, lanes = conversation(engine, cache, count=3)
    past = prompt(23, seed=100) + said[0]
    question = past + prompt(23, seed=101)[:shared] + prompt(20, seed=9)
    expected, event = run(engine, question, cache, greedy(9), lanes=lanes)

    engine = tiny_engine(decoder, tiers=tiers("warm"))
    said, _, lanes = conversation(engine, cache, count=3, between=demoted(engine))
    tokens, again = run(engine, question, cache, greedy(9), lanes=lanes)
    assert tokens == expected and again.request.num_reused == event.request.num_reused
    assert nothing_left(engine, [lanes])


def test_another_text_in_the_place_of_a_demoted_conversation_forgets_it_unread(decoder, tiers):
    engine = tiny_engine(decoder, tiers=tiers("warm"))
    _, _, lanes = conversation(engine, None, count=1, between=demoted(engine))
    run(engine, [96, *prompt(20, seed=5)], lanes=lanes)
    assert engine.storage.num_restored == 0
    assert nothing_left(engine, [lanes])


@caches
def test_a_question_asked_again_of_a_demoted_conversation_gets_the_same_answer(decoder, tiers, cache):
    reference = tiny_engine(decoder)
    said, _, lanes = conversation(reference, cache, count=3)
    asked = lanes.token_ids[: -len(said[-1]) + 1]
    _, event = run(reference, asked, cache, greedy(9), lanes=lanes)
    engine = tiny_engine(decoder, tiers=tiers("warm"))
    _, _, lanes = conversation(engine, cache, count=3, between=demoted(engine))
    for preempted in (False, True):
        (request,) = engine.add(asked, greedy(9), lanes=lanes, cache=cache)
        collector = Collector()
        if preempted:
            # Its first token needs no row, and it is preempted before it has any.
            engine.scheduler.plan()
            engine.scheduler._preempt(engine.scheduler.running[0], {})
        drain(engine, collector)
        assert collector.tokens[request] == said[-1]
        assert collector.finished[request].request.num_reused == event.request.num_reused
        demoted(engine)(lanes)
    assert nothing_left(engine, [lanes])


def test_an_abandoned_conversation_leaves_no_span(decoder, tiers):
    engine = tiny_engine(decoder, tiers=tiers("cold"))
    _, _, lanes = conversation(engine, None, count=1, between=demoted(engine))
    lanes.abandoned = True
    run(engine, prompt(5))
    assert nothing_left(engine)


def test_idle_conversations_leave_before_requests_and_make_way_for_them_in_the_tiers(decoder, tmp_path):
    # Warm holds one sequence of about 90 tokens.
    tiers = TierConfig(hot=hot_bytes(60 * LANES), warm="56KiB")
    engine = tiny_engine(decoder, tiers=tiers, prefill_chunk=64)
    lanes = Lanes()
    run(engine, PROMPTS[0], None, greedy(2), lanes=lanes)
    first = engine.add(PROMPTS[3], greedy(60))
    engine.step()
    second = engine.add(PROMPTS[2], greedy(60))
    collector = Collector()
    while engine.scheduler.num_preemptions == 0:
        collector.take(engine.step())
    # The conversation was demoted first, and then forgotten for the request.
    assert engine.scheduler.num_reclaimed == 1 and engine.storage.num_swapped == 2
    assert not lanes.holds and lanes.token_ids == []
    drain(engine, collector)
    assert engine.storage.num_restored == 1
    for (request,), ids in ((first, PROMPTS[3]), (second, PROMPTS[2])):
        assert collector.tokens[request] == run(tiny_engine(decoder), ids, None, greedy(60))[0]
    assert nothing_left(engine, [lanes])


def test_a_conversation_that_a_request_waits_for_does_not_make_way(decoder):
    tiers = TierConfig(hot=hot_bytes(60 * LANES), warm="56KiB")
    engine = tiny_engine(decoder, tiers=tiers)
    _, _, lanes = conversation(engine, None, count=2, between=demoted(engine))
    lanes.busy = True
    other = Lanes()
    run(engine, PROMPTS[0], None, greedy(2), lanes=other)
    engine.scheduler._reclaim(other)
    assert lanes.holds and not other.holds
    lanes.busy = False
    assert nothing_left(engine, [lanes, other])


def test_lanes_are_brought_back_where_there_is_room(decoder, tiers):
    engine = tiny_engine(decoder, tiers=tiers("warm", hot_bytes(40 * LANES)))
    _, _, lanes = conversation(engine, None, between=demoted(engine))
    (request,) = engine.add(PROMPTS[4], greedy(60))
    engine.step()
    assert not engine.bring_back(lanes) and lanes.holds
    engine.abort(request)
    drain(engine)
    other = Lanes()
    run(engine, PROMPTS[4], None, greedy(2), lanes=other)
    assert engine.bring_back(lanes) and engine.bring_back(lanes)
    assert lanes.seq is not None and other.swapped is not None
    assert engine.bring_back(other) and lanes.swapped is not None
    assert nothing_left(engine, [lanes, other])


# Sessions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


def answered_again(session):
    return [piece.result.token_ids for piece in session.regenerate(PARAMS) if piece.result]


def demote_session(llm, session):
    llm.engine.scheduler._reclaim(session._lanes)
    assert session._lanes.swapped is not None


@pytest.mark.parametrize("cache", [None, keep("adakv", 0.3), keep("gracekv", 40)])
def test_a_demoted_session_shows_its_tokens_is_saved_whole_and_goes_on(model, tmp_path, cache):
    tiers = TierConfig(hot="4MiB", cold=f"{tmp_path / 'kv.cold'}:16MiB")
    with load(model, tiers=tiers) as llm, load(model) as other:
        session = begun(llm, cache)
        tokens, entries, bitmap = session.num_tokens, session.kv_entries, session.kv_map()
        assert session.kv_bytes > 0
        demote_session(llm, session)
        assert session.num_tokens == tokens and session.kv_bytes == 0
        assert not session.kv_entries.any() and not session.kv_map().any()
        assert session.kv_map().shape == bitmap.shape
        session.save(tmp_path / "s")
        assert torch.equal(session.kv_entries, entries) and torch.equal(session.kv_map(), bitmap)
        demote_session(llm, session)
        loaded = other.load_session(tmp_path / "s")
        assert torch.equal(loaded.kv_entries, entries)
        expected = more(loaded)
        assert more(session) == expected
        demote_session(llm, session)
        assert answered_again(session) == answered_again(loaded)
        demote_session(llm, session)
        session.clear()
        assert session.num_tokens == 0 and no_span(llm.engine)


def test_a_demoted_session_that_was_lost_is_saved_without_lanes(model, tmp_path):
    with load(model, tiers=TierConfig(hot="4MiB", warm="16MiB")) as llm, load(model) as other:
        session = begun(llm)
        demote_session(llm, session)
        llm.engine.storage.tiers.drop(session._lanes.swapped.handles[0])
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        assert loaded.num_tokens == session.num_tokens == 0
        assert loaded.send(MORE[0], PARAMS).token_ids == session.send(MORE[0], PARAMS).token_ids


def test_a_demoted_session_that_finds_no_room_says_what_would_help_and_is_kept(model, tmp_path):
    with load(model, tiers=TierConfig(hot="4MiB", warm="16MiB")) as llm:
        session = begun(llm)
        page_bytes = llm.engine.store.pool.page_bytes
        held = session.kv_bytes // page_bytes
    with load(model, tiers=TierConfig(hot=(held + 5) * page_bytes, warm="16MiB")) as llm:
        session = begun(llm)
        demote_session(llm, session)
        pieces = llm.chat_session("Be brief.").stream("word " * 8, PARAMS)
        next(pieces)
        with pytest.raises(SessionError, match="raise --kv-hot"):
            session.save(tmp_path / "s")
        pieces.close()
        assert session.num_tokens and not (tmp_path / "s").exists()
        session.save(tmp_path / "s")
