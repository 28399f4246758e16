"""Prompts larger than the pool begin with what is found below it, and leave what others find."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from demoting import KINDS, demoting
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import keep, run
from tiny import drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.config import TierConfig
from minikv.scheduler import prefix
from minikv.scheduler.request import Lanes

BLOCK, LAYERS = 16, 6
LANES = 2 * LAYERS
DOCUMENT = prompt(90, seed=1)
SMALL = TierConfig(hot=hot_bytes(17 * LANES), warm="64MiB")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(prefix, "BLOCK_TOKENS", BLOCK)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder(num_layers=LAYERS)


def engine_of(decoder, tiers=SMALL, **options):
    return tiny_engine(decoder, tiers=tiers, **({"prefill_chunk": 16} | options))


def asked(seed):
    return DOCUMENT + prompt(7, seed=100 + seed)


def expected(decoder, seed, cache):
    return run(engine_of(decoder, TierConfig(warm="64MiB", prefixes=False)), asked(seed), cache)[0]


def staged(engine):
    return engine.scheduler.starting.num_staged


@pytest.mark.parametrize("policy", [*KINDS, "sekv"])
@pytest.mark.parametrize("chunk", [16, 5, 32])
def test_questions_on_one_document_compute_it_once(decoder, policy, chunk):
    cache = keep("sekv", 20) if policy == "sekv" else demoting(policy)
    engine = engine_of(decoder, replace(SMALL, hot=hot_bytes(24 * LANES)), prefill_chunk=chunk)
    for seed in range(3):
        tokens, finish = run(engine, asked(seed), cache)
        assert tokens == expected(decoder, seed, cache)
        assert finish.request.num_reused >= (2 * BLOCK if seed else 0)
    assert staged(engine) == 3 and engine.storage.report()["prefix_blocks"] == 8
    # One copy of the rows, which nobody owns now.
    rows = 8 * BLOCK * LANES * (2 * 16 * 4 + 4)
    assert (
        engine.storage.tiers.warm.nbytes <= (1.1 if policy in ("window", "snapkv", "adakv") else 2.5) * rows
    )
    assert engine.store.pool.num_free == engine.store.pool.num_pages


def test_a_small_pool_goes_on_from_what_a_large_one_left_and_the_other_way_round(decoder, tmp_path):
    cache = demoting("snapkv")
    sizes = [None, hot_bytes(17 * LANES)]
    for index, order in enumerate((sizes, sizes[::-1])):
        for seed, hot in enumerate(order):
            engine = engine_of(decoder, TierConfig(hot=hot, cold=f"{tmp_path / str(index)}:8MiB"))
            tokens, finish = run(engine, asked(seed), cache)
            assert tokens == expected(decoder, seed, cache)
            assert finish.request.num_reused == (5 * BLOCK if seed else 0)
            assert staged(engine) == (hot is not None)
            engine.close()


def test_conversations_keep_what_they_share_with_a_prefix(decoder):
    engine, cache = engine_of(decoder), demoting("adakv")
    large = engine_of(decoder, TierConfig(warm="64MiB", prefixes=False))
    said = []
    for talks_on in (large, engine):
        lanes, history, replies = Lanes(), asked(0), []
        for turn in range(3):
            (request,) = talks_on.add(history, greedy(5), lanes=lanes, cache=cache)
            replies.append(drain(talks_on).tokens[request])
            history += replies[-1] + prompt(9, seed=turn)
            if talks_on is engine:
                run(engine, asked(turn + 1), cache)  # finds it meanwhile, and gives it up again
                assert not lanes.course.below.lost
        talks_on.release(lanes)
        said.append(replies)
    assert said[0] == said[1]
    shared = engine.storage.tiers.nbytes
    for handle in list(engine.storage.tiers._places):
        assert engine.storage.tiers._places[handle].owners == 0
    assert shared > 0


def test_a_question_taken_back_into_a_shared_block_keeps_its_beginning(decoder):
    engine, lanes, cache = engine_of(decoder), Lanes(), demoting("snapkv")
    run(engine, asked(0), cache, greedy(5), lanes=lanes)
    engine.scheduler._reclaim(lanes)
    below = lanes.course.below
    assert lanes.are_below and below.all_whole
    below.cut(2 * BLOCK + 3, held=False)
    assert below.end == 2 * BLOCK + 3 and not below.lost
    rows = below.layer(0, 2 * BLOCK + 3)
    assert [end for _, end, _ in rows] == [BLOCK, 2 * BLOCK, 2 * BLOCK + 3]
    again, _ = run(engine, asked(1), cache)
    assert again == expected(decoder, 1, cache)


def test_rows_within_an_error_are_not_everybodys(decoder):
    engine = engine_of(decoder, replace(SMALL, error=0.05))
    for seed in range(2):
        assert run(engine, asked(seed), demoting("snapkv"))[1].request.num_reused == 0
    assert staged(engine) == 2 and engine.storage.tiers.nbytes == 0


@pytest.mark.parametrize(
    ("error", "pages", "running"), [(0, 24, [0, 2]), (0.05, 24, [0, 1, 2]), (0, 16, [0])], ids=str
)
def test_a_staged_prompt_waits_only_for_what_it_can_take_over(decoder, error, pages, running):
    """Not where its rows are within an error: it runs beside who publishes; nor in a pool without room for
    whole blocks: nobody who came later overtakes it."""
    tiers = replace(SMALL, hot=hot_bytes(pages * LANES), error=error)
    engine = engine_of(decoder, tiers, max_seqs=3)
    engine.add(DOCUMENT[: BLOCK + 1], greedy(1))
    (request,) = engine.add(asked(0), greedy(3), cache=demoting("snapkv"))
    engine.add(prompt(2), greedy(5))
    engine.scheduler.plan()
    assert [r.id for r in engine.scheduler.running] == running
    assert drain(engine).finished[request].request.shares == (pages == 24) and staged(engine) == 1


def test_tiers_that_hold_the_prompt_once_are_enough(decoder):
    """Blocks are part of what is below, not beside it; there is no room for a second copy."""
    rows = 97 * LANES * (2 * 16 * 4 + 8)
    engine = engine_of(decoder, replace(SMALL, warm=int(1.35 * rows)))
    for seed in range(2):
        tokens, finish = run(engine, asked(seed), demoting("snapkv"))
        assert tokens == expected(decoder, seed, demoting("snapkv")), finish.message
    other = prompt(100, seed=77)
    tokens, finish = run(engine, other, demoting("snapkv"))
    assert finish.reason == "length", finish.message


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 7)), max_size=6),
    st.sampled_from(["snapkv", "expected", "gracekv"]),
    st.sampled_from(["150KiB", "64MiB"]),
    st.integers(1, 33),
)
def test_random_prompts_with_common_beginnings_end_with_nothing_owned(asks, policy, warm, chunk):
    prefix.BLOCK_TOKENS = BLOCK
    engine = engine_of(
        tiny_decoder(num_layers=LAYERS), replace(SMALL, warm=warm), prefill_chunk=chunk, max_seqs=3
    )
    for seed, steps, size in asks:
        (request,) = engine.add(DOCUMENT + prompt(size, seed=seed), greedy(3), cache=demoting(policy))
        for _ in range(steps):
            engine.step()
        if steps % 3 == 2:
            engine.abort(request)
        elif steps % 3 == 1 and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[-1], {})
    drain(engine)
    assert not any(place.owners for place in engine.storage.tiers._places.values())
    assert engine.store.pool.num_free == engine.store.pool.num_pages
    assert torch.isfinite(engine.store.pool.log_mass[0]).all()
