"""Staged prompts where room, records or company run out on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import cli_tools
import pytest
from demoting import Talk, demoting
from keeping import keep, run
from session_tools import begun, load, more
from session_tools import keep as keep_in_session
from test_staging import LANES, LAYERS, engine_of, staged
from test_staging_prefixes import BLOCK, SMALL, asked, expected
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder

from minikv import CacheConfig, TierConfig
from minikv.scheduler import prefix


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder(num_layers=LAYERS)


def small_tiers(warm):
    return TierConfig(hot=hot_bytes(15 * LANES), warm=warm)


def ask(talk, size, seed, cache=None):
    """A further turn, which may end without a reply."""
    talk.history += prompt(size, seed=seed)
    (request,) = talk.engine.add(talk.history, greedy(7), lanes=talk.lanes, cache=cache or talk.cache)
    collector = drain(talk.engine)
    talk.history += collector.tokens.get(request, [])
    return collector.finished[request]


@pytest.mark.parametrize("warm", ["90KiB", "110KiB", "130KiB", "150KiB"])
def test_a_conversation_whose_tiers_run_full_goes_on_with_what_it_has(decoder, warm):
    talk = Talk(engine_of(decoder, None, tiers=small_tiers(warm)), demoting())
    for seed, size in enumerate((40, 23, 23, 5)):
        assert ask(talk, size, seed).reason == "length"
    assert staged(talk.engine) and talk.lanes.course.below.lost


@pytest.mark.parametrize("warm", range(150, 176, 4))
def test_tiers_that_run_full_with_the_last_rows_say_so(decoder, warm):
    engine = engine_of(decoder, None, tiers=replace(small_tiers(f"{warm}KiB"), prefixes=False))
    _, finish = run(engine, prompt(102), demoting())
    assert finish.reason == "length" or (finish.reason, "--kv-warm" in finish.message) == ("context", True)
    assert engine.store.pool.num_free == engine.store.pool.num_pages
    assert engine.storage.tiers.nbytes == 0


def test_a_staged_turn_that_is_taken_back_while_it_waits_leaves_the_conversation(decoder):
    talk = Talk(engine_of(decoder, 15 * LANES), demoting())
    talk.ask(0, 61)
    engine, known = talk.engine, len(talk.lanes.token_ids)
    (request,) = engine.add(talk.history + prompt(40, seed=9), greedy(4), lanes=talk.lanes, cache=talk.cache)
    for _ in range(3):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0], {})
    engine.abort(request)
    drain(engine)
    assert len(talk.lanes.token_ids) == known and talk.lanes.are_below
    assert talk.ask(1)[1].num_reused == known


def test_lanes_that_a_request_waits_for_stay_its_own_when_they_leave_the_pool(decoder):
    engine = engine_of(decoder, 40 * LANES, max_seqs=2)
    talk = Talk(engine, demoting())
    talk.ask(0, 61)
    for seed in range(2):
        engine.add(prompt(30, seed=seed), greedy(40))
        engine.step()
    ids = talk.history + prompt(23, seed=1)
    engine.add(ids, greedy(4), lanes=talk.lanes, cache=talk.cache)
    engine.step()
    assert talk.lanes.seq is None and talk.lanes.busy
    drain(engine)
    engine.release(talk.lanes)
    assert engine.store.pool.num_free == engine.store.pool.num_pages and engine.storage.tiers.nbytes == 0


def test_a_staged_prompt_is_computed_again_for_a_turn_of_another_kind(decoder):
    talk = Talk(engine_of(decoder, 24 * LANES), demoting())
    talk.ask(0, 121)
    talk.engine.scheduler._give_up(talk.lanes)
    talk.lanes.lose()
    assert ask(talk, 10, 3, keep("snapkv", 14)).reason == "length"
    assert staged(talk.engine) == 1


@pytest.mark.parametrize(
    ("cache", "size", "pages"), [(demoting(), 101, 19), (keep("sekv", 24), 141, 30)], ids=["snapkv", "sekv"]
)
def test_siblings_of_a_staged_prompt_are_computed_again(decoder, cache, size, pages):
    engine, collector = engine_of(decoder, pages * LANES), Collector()
    requests = engine.add(prompt(size, seed=5), greedy(9, n=2), cache=cache)
    while len(engine.scheduler.running) < 2:
        collector.take(engine.step())
    engine.scheduler.swap.demote = lambda seq: None  # the tiers are full
    engine.scheduler._preempt(engine.scheduler.running[-1], {})
    drain(engine, collector)
    assert len({tuple(collector.tokens[request]) for request in requests}) == 1
    assert all(collector.reason(request) == "length" for request in requests)


def test_a_damaged_file_is_no_more_than_a_shorter_beginning(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix, "BLOCK_TOKENS", BLOCK)
    cache = demoting("snapkv")
    for seed in range(4):
        path = tmp_path / str(seed)
        tiers = TierConfig(hot=SMALL.hot, cold=f"{path}:8MiB")
        engine = engine_of(decoder, None, tiers=tiers, prefill_chunk=16)
        run(engine, asked(0), cache)
        engine.close()
        data, chance = bytearray(path.read_bytes()), random.Random(seed)
        used = len(data.rstrip(b"\0"))
        for _ in range(8):
            data[chance.randrange(used // 10, used)] ^= 0xFF
        path.write_bytes(data)
        engine = engine_of(decoder, None, tiers=tiers, prefill_chunk=16)
        tokens, finish = run(engine, asked(1), cache)
        assert (tokens, finish.reason) == (expected(decoder, 1, cache), "length")
        engine.close()


def test_a_session_whose_first_prompt_was_staged_is_computed_again_where_it_is_loaded(tmp_path, monkeypatch):
    config = cli_tools.hf_config
    monkeypatch.setattr(cli_tools, "hf_config", lambda **given: config(**given) | {"num_hidden_layers": 6})
    model = cli_tools.write_tiny_model(tmp_path / "tiny", max_context=512)
    options = {"tiers": TierConfig(hot="200KiB", warm="16MiB"), "prefill_chunk": 16}
    options["cache"] = CacheConfig(page_size=8)
    question = "word and other things to say here. " * 6
    with load(model, **options) as one, load(model, **options) as other:
        cache = keep_in_session("snapkv", 24, evicted="demote", page_size=8)
        session = begun(one, cache, questions=[question])
        assert one.tier_stats["prompts_staged"] == 1
        session.save(tmp_path / "s")
        replies = []
        for llm, talk in ((one, session), (other, other.load_session(tmp_path / "s"))):
            llm.engine.scheduler._give_up(talk._lanes)
            talk._lanes.lose()
            replies.append(more(talk))
        assert replies[0] == replies[1]
