"""Spans that zoom in, beside all else that is below the pool: swapping, prefixes, demoting, sessions."""

from __future__ import annotations

import pytest
from cli_tools import write_tiny_model
from demoting import demoting
from keeping import LANES, keep, pages
from session_tools import begun, load, more
from session_tools import keep as keep_in_session
from swapping import make_tiers, no_span, nothing_left, preempted_often
from tiny import Collector, drain, greedy, prompt, tiny_decoder, tiny_engine

from minikv.cache.tiers.below import Below
from minikv.cache.tiers.tiers import Tiers
from minikv.config import TierConfig
from minikv.scheduler import prefix
from minikv.scheduler.request import Lanes

WARM = TierConfig(warm="64MiB")
SEKV = keep("sekv", 24)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


def said(engine, ids, cache, count=20, lanes=None):
    (request,) = engine.add(ids, greedy(count), lanes=lanes, cache=cache)
    return drain(engine).tokens[request]


def talk(engine, cache, turns=4, between=lambda lanes: None, caches=()):
    """Replies of a conversation, with something done after each turn. caches: of single turns."""
    lanes, history, replies, reused = Lanes(), [], [], []
    for turn in range(turns):
        history += prompt(40 if turn else 90, seed=turn)
        own = caches[turn] if caches else cache
        (request,) = engine.add(history, greedy(9), lanes=lanes, cache=own)
        collector = drain(engine)
        replies.append(collector.tokens[request])
        reused.append(collector.finished[request].request.num_reused)
        history += replies[-1]
        between(lanes)
    return replies, reused, lanes


def reclaim(engine):
    def away(lanes):
        if lanes.seq is not None:
            engine.scheduler._reclaim(lanes)

    return away


def test_of_two_requests_the_one_that_zooms_is_computed_again(decoder):
    """Each alone, and both preempted in one pool, the other one of them with its lanes copied."""
    prompts, caches = (prompt(90), prompt(70, seed=5)), (SEKV, keep("snapkv", 20))
    alone = [
        said(tiny_engine(decoder, tiers=WARM), ids, cache, 30)
        for ids, cache in zip(prompts, caches, strict=True)
    ]
    engine = tiny_engine(decoder, tiers=WARM, max_seqs=2)
    ids = [engine.add(p, greedy(30), cache=c)[0] for p, c in zip(prompts, caches, strict=True)]
    collector = Collector()
    for _ in range(3):
        for _ in range(4):
            collector.take(engine.step())
        for request in list(engine.scheduler.running):
            zooms, moved = engine.store.has_area(request.seq), engine.storage.num_swapped
            assert zooms == (request.retention.cache is SEKV)
            engine.scheduler._preempt(request, {})
            assert engine.storage.num_swapped == moved + (not zooms)
            assert (request.swapped is None) == zooms and (request.num_computed == 0) == zooms
    drain(engine, collector)
    assert [collector.tokens[r] for r in ids] == alone
    assert nothing_left(engine)


@pytest.mark.parametrize("every", [1, 3])
def test_a_prompt_that_is_preempted_before_it_has_spans_is_copied(decoder, every):
    expected = said(tiny_engine(decoder, tiers=WARM, prefill_chunk=16), prompt(120), SEKV, 5)
    engine = tiny_engine(decoder, tiers=WARM, prefill_chunk=16)
    tokens, _ = preempted_often(engine, prompt(120), SEKV, greedy(5), every)
    assert tokens == expected and engine.storage.num_restored > 0
    assert nothing_left(engine)


def test_idle_lanes_leave_the_pool_whole_and_zoom_in_when_they_are_back(decoder):
    expected, reused, _ = talk(tiny_engine(decoder, tiers=WARM), SEKV)
    engine = tiny_engine(decoder, tiers=WARM)
    replies, again, lanes = talk(engine, SEKV, between=reclaim(engine))
    assert (replies, again) == (expected, reused)
    assert engine.zoomed.rows > 0 and engine.storage.num_restored == 3 and engine.scheduler.num_restored == 0
    assert lanes.swapped is not None and lanes.course.below.nbytes > 0
    assert nothing_left(engine, [lanes])


def test_what_a_request_zooms_in_does_not_make_way(decoder):
    """Lanes of another conversation do; they are computed again."""
    one, other = tiny_engine(decoder, tiers=WARM, max_seqs=2), tiny_engine(decoder, tiers=WARM, max_seqs=2)
    expected = [talk(one, SEKV, 2)[0], said(one, prompt(90, seed=9), SEKV, 60)]
    idle = Lanes()
    history = prompt(90, seed=0)
    history += said(other, history, SEKV, 9, idle)
    reclaim(other)(idle)
    (request,) = other.add(prompt(90, seed=9), greedy(60), cache=SEKV)
    collector = Collector()
    for _ in range(5):
        collector.take(other.step())
    live = other.scheduler.running[0]
    assert live.course.below.nbytes > 0
    assert other.scheduler.swap._make_way() and not other.scheduler.swap._make_way()
    assert not live.course.below.lost and live.course.below.nbytes == other.storage.tiers.nbytes
    drain(other, collector)
    assert collector.tokens[request] == expected[1]
    assert said(other, history + prompt(40, seed=1), SEKV, 9, idle) == expected[0][1]
    assert nothing_left(other, [idle])


@pytest.mark.parametrize("chunk", [512, 24])
@pytest.mark.parametrize("streaming", [False, True])
def test_with_a_prefix_store_answers_are_the_same(decoder, monkeypatch, chunk, streaming):
    monkeypatch.setattr(prefix, "BLOCK_TOKENS", 8)
    cache = keep("sekv", 48, prefill="streaming" if streaming else "exact")
    document = prompt(100, seed=1)
    prompts = [document + prompt(7, seed=100 + n) for n in range(3)]
    plain = tiny_engine(decoder, tiers=TierConfig(warm="64MiB", prefixes=False), prefill_chunk=chunk)
    expected = [said(plain, ids, cache, 30) for ids in prompts]
    engine = tiny_engine(decoder, tiers=WARM, prefill_chunk=chunk)
    assert [said(engine, ids, cache, 30) for ids in prompts] == expected
    assert engine.storage.prefixes.prefix_hits == 2
    assert engine.zoomed.rows == plain.zoomed.rows > 0
    assert not engine.storage._own and engine.store.pool.bytes_in_use == 0


def test_an_aborted_request_and_a_released_conversation_leave_nothing(decoder):
    engine = tiny_engine(decoder, tiers=WARM)
    (request,) = engine.add(prompt(90), greedy(50), cache=SEKV)
    for _ in range(5):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0], {})
    engine.abort(request)
    drain(engine)
    assert no_span(engine)
    # In a conversation what was said until then stays, and is spoken on from.
    lanes = Lanes()
    (request,) = engine.add(prompt(90), greedy(50), lanes=lanes, cache=SEKV)
    collector = Collector()
    for _ in range(5):
        collector.take(engine.step())
    engine.abort(request)
    drain(engine, collector)
    assert lanes.seq is not None and lanes.course.below.nbytes == engine.storage.tiers.nbytes > 0
    assert not engine.store.has_area(lanes.seq)
    assert len(said(engine, lanes.token_ids + prompt(9, seed=2), SEKV, 9, lanes)) == 9
    reclaim(engine)(lanes)
    assert nothing_left(engine, [lanes])


def test_turns_that_zoom_and_turns_that_demote_go_on_from_one_another(decoder):
    """A turn that demotes gets back all that a turn before it zoomed in; one that drops forgets it."""
    demotes, drops = demoting(), keep("snapkv", 20)
    for caches in ((SEKV, demotes, SEKV, SEKV), (demotes, SEKV, demotes, SEKV), (SEKV, drops, SEKV, drops)):
        engine = tiny_engine(decoder, tiers=WARM)
        expected, _, lanes = talk(engine, None, caches=caches)
        below = lanes.course.below
        assert (below is None) == (drops in caches)
        assert nothing_left(engine, [lanes])
        engine = tiny_engine(decoder, tiers=WARM)
        replies, _, lanes = talk(engine, None, caches=caches, between=reclaim(engine))
        assert replies == expected
        assert nothing_left(engine, [lanes])


def test_lanes_that_another_policy_left_shorter_go_on_under_a_budget_in_bytes(decoder):
    """They hold no span yet, and are more than lanes get beside an area."""
    engine = tiny_engine(decoder, tiers=WARM)
    replies, _, lanes = talk(
        engine, None, turns=2, caches=(keep("snapkv", 20), keep("sekv", pages(20 * LANES)))
    )
    assert [len(reply) for reply in replies] == [9, 9]
    assert nothing_left(engine, [lanes])


@pytest.mark.parametrize(
    "other", [keep("gracekv", 20, refit=True), keep("snapkv", 60)], ids=["gracekv", "snapkv"]
)
def test_another_policy_drops_spans_that_it_cannot_zoom_in(decoder, other):
    engine = tiny_engine(decoder, tiers=WARM)
    _, _, lanes = talk(engine, None, turns=2, caches=(keep("sekv", 60), other))
    slots, valid = engine.store.slots(lanes.seq)
    assert float(engine.store.pool.log_mass.view(-1)[slots[valid]].min()) > -1e29
    assert nothing_left(engine, [lanes])


def test_a_reply_that_is_asked_for_again_is_the_same(decoder):
    """The lanes are cut back to the question; what is zoomed in begins anew."""
    for away in (False, True):
        engine, lanes, ids = tiny_engine(decoder, tiers=WARM), Lanes(), prompt(90)
        first = said(engine, ids, SEKV, 30, lanes)
        zoomed = engine.zoomed.rows
        if away:
            engine.scheduler._reclaim(lanes)
        (request,) = engine.add(ids, greedy(30), lanes=lanes, cache=SEKV)
        collector = drain(engine)
        assert collector.tokens[request] == first
        assert collector.finished[request].request.num_reused == 90
        assert engine.zoomed.rows == 2 * zoomed > 0
        assert nothing_left(engine, [lanes])


def test_a_turn_of_another_policy_sees_no_area_when_it_is_computed_again(decoder):
    caches = (SEKV, keep("snapkv", 40), SEKV)
    expected = talk(tiny_engine(decoder, tiers=WARM), None, 3, caches=caches)[0]
    engine = tiny_engine(decoder, tiers=WARM)

    def lose(lanes):
        engine.scheduler._reclaim(lanes)
        engine.scheduler.swap._make_way()

    assert talk(engine, None, 3, between=lose, caches=caches)[0] == expected


def test_a_session_that_was_demoted_is_saved_and_zooms_in_where_it_is_loaded(model, tmp_path):
    cache, tiers = keep_in_session("sekv", 40), TierConfig(hot="4MiB", warm="16MiB")
    with load(model, tiers=tiers) as one, load(model, tiers=tiers) as other:
        session = begun(one, cache)
        one.engine.scheduler._reclaim(session._lanes)
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        assert loaded._lanes.course.below.nbytes == session._lanes.course.below.nbytes > 0
        assert more(loaded) == more(session)
        assert other.engine.zoomed.rows > 0
        loaded.close()
        assert other.engine.storage.tiers.nbytes == 0


def test_a_copy_of_what_is_below_is_lost_where_memory_is_short(decoder, monkeypatch):
    expected = said(tiny_engine(decoder, tiers=WARM), prompt(90), SEKV, 30)
    engine = tiny_engine(decoder, tiers=WARM, max_seqs=4)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(Below, "resume", fail)
    ids = engine.add(prompt(90), greedy(30, n=2), cache=SEKV)
    collector = drain(engine)
    assert collector.tokens[ids[0]] == expected and len(collector.tokens[ids[1]]) == 30
    assert nothing_left(engine)


@pytest.mark.parametrize("kind", ["cold", "both", "few"])
def test_rows_come_back_from_the_cold_tier_and_the_next_layers_are_fetched_ahead(
    decoder, kind, tmp_path, monkeypatch
):
    expected = said(tiny_engine(decoder, tiers=WARM), prompt(90), SEKV, 40)
    engine = tiny_engine(decoder, tiers=make_tiers(tmp_path, kind))
    fetched, fetch = [], Tiers.fetch

    def noted(self, handle):
        fetched.append(handle)
        fetch(self, handle)

    monkeypatch.setattr(Tiers, "fetch", noted)
    (request,) = engine.add(prompt(90), greedy(40), cache=SEKV)
    collector = Collector()
    collector.take(engine.step())
    parts = engine.scheduler.running[0].course.below.whole_parts()
    wanted = {handles[layer] for _, _, handles in parts for layer in range(decoder.config.num_layers)}
    drain(engine, collector)
    assert collector.tokens[request] == expected and engine.zoomed.rows > 0
    assert wanted <= set(fetched)
    assert nothing_left(engine)
    engine.close()
