"""Spans that zoom in, in the engine: what sequences see, what they hold, and that nothing else changes it."""

from __future__ import annotations

import pytest
import torch
from keeping import LANES, PAGE_BYTES, keep, pages, run
from tiny import Collector, drain, greedy, prompt, tiny_decoder, tiny_engine

from minikv.cache.spans.routing import Zooming
from minikv.config import CacheConfig, TierConfig
from minikv.errors import ConfigError
from minikv.kernels.reference import ReferenceBackend
from minikv.kernels.torch_cpu import TorchBackend
from minikv.scheduler.request import Lanes
from minikv.scheduler.retention import Retention

WARM = TierConfig(warm="64MiB")


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def sekv(budget=24, **options):
    return keep("sekv", budget, **options)


def engine_of(decoder, **options):
    return tiny_engine(decoder, **({"tiers": WARM} | options))


def said(engine, ids, cache, count=20, lanes=None):
    return run(engine, ids, cache, greedy(count), lanes=lanes)[0]


def test_a_request_ends_with_nothing_left_below_or_in_the_pool(decoder):
    engine = engine_of(decoder)
    assert len(said(engine, prompt(90), sekv(), 80)) == 80
    assert engine.storage.tiers.nbytes == 0
    assert engine.store.pool.num_free == engine.store.pool.num_pages
    assert engine.zoomed.rows > 0


def test_a_budget_that_holds_everything_changes_nothing(decoder):
    ids = prompt(60)
    full = said(tiny_engine(decoder), ids, CacheConfig())
    for budget in (1.0, 100):
        assert said(engine_of(decoder), ids, sekv(budget)) == full
    assert said(engine_of(decoder), prompt(8), sekv(0.1)) == said(
        tiny_engine(decoder), prompt(8), CacheConfig()
    )


def test_without_a_tier_below_it_is_refused(decoder):
    engine = tiny_engine(decoder)
    with pytest.raises(ConfigError, match="policy sekv needs a tier below the pool"):
        engine.add(prompt(60), greedy(), cache=sekv())
    with pytest.raises(ConfigError, match="sekv keeps everything below"):
        sekv(evicted="demote")


@pytest.mark.parametrize("budget", [24, 0.3, pages(60)])
def test_pages_stay_within_the_budget_while_decoding(decoder, budget):
    engine = engine_of(decoder)
    engine.add(prompt(100), greedy(100), cache=sekv(budget))
    held = []
    while engine.has_work:
        engine.step()
        if engine.scheduler.running:
            live = engine.scheduler.running[0]
            held.append((live.num_computed, engine.store.bytes_of(live.seq) // PAGE_BYTES))
    after = [count for computed, count in held if computed > 100]
    if budget == pages(60):
        assert max(after) <= 60
    else:
        entries = 24 if budget == 24 else 0.3 * 200
        # Tokens wait in the window until there are 64, and lanes and areas end within a page.
        assert max(after) * 4 <= (entries + 64 + 8) * LANES


def test_batched_requests_say_what_each_says_alone(decoder):
    prompts = [prompt(n, seed=n) for n in (90, 47, 120, 64)]
    caches = [sekv(), CacheConfig(), sekv(0.3), keep("snapkv", 20)]
    alone = [said(engine_of(decoder), ids, cache, 30) for ids, cache in zip(prompts, caches, strict=True)]
    for chunk in (512, 16):
        engine = engine_of(decoder, prefill_chunk=chunk, max_seqs=4)
        requests = [
            engine.add(ids, greedy(30), cache=cache)[0] for ids, cache in zip(prompts, caches, strict=True)
        ]
        collector = drain(engine)
        assert [collector.tokens[r] for r in requests] == alone


@pytest.mark.parametrize("steps", [1, 4, 9, 30])
def test_a_preempted_request_says_the_same(decoder, steps):
    expected = said(engine_of(decoder), prompt(90), sekv(), 80)
    engine = engine_of(decoder)
    (request,) = engine.add(prompt(90), greedy(80), cache=sekv())
    collector = Collector()
    for _ in range(steps):
        collector.take(engine.step())
    engine.scheduler._preempt(engine.scheduler.running[0], {})
    assert engine.storage.tiers.nbytes == 0
    drain(engine, collector)
    assert collector.tokens[request] == expected


def talk(engine, cache, steps=None, turns=3):
    lanes, history, replies = Lanes(), [], []
    for turn in range(turns):
        history += prompt(40 if turn else 90, seed=turn)
        (request,) = engine.add(history, greedy(9), lanes=lanes, cache=cache)
        collector = Collector()
        if steps is not None and turn:
            for _ in range(steps):
                collector.take(engine.step())
            if engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[0], {})
        drain(engine, collector)
        replies.append(collector.tokens[request])
        history += replies[-1]
    return replies, lanes


@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_a_preempted_turn_says_the_same(decoder, steps):
    assert talk(engine_of(decoder), sekv(), steps)[0] == talk(engine_of(decoder), sekv())[0]


def test_idle_lanes_hold_no_area_and_see_their_spans(decoder):
    engine = engine_of(decoder)
    _, lanes = talk(engine, sekv(), turns=2)
    assert engine.store.areas[lanes.seq] is None
    slots, valid = engine.store.slots(lanes.seq)
    assert engine.store.pool.log_mass.view(-1)[slots][valid].isfinite().all()
    counts = engine.store.counts(lanes.seq)
    assert (counts.sum(-1) == len(lanes.token_ids)).all()
    engine.release(lanes)
    assert engine.storage.tiers.nbytes == 0


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_with_every_span_zoomed_in_a_conversation_is_the_full_caches(backend, monkeypatch):
    """One softmax over exact rows, in later prompts and in replies, and across what is sealed on the way."""
    decoder = tiny_decoder(TorchBackend() if backend == "torch" else ReferenceBackend())
    monkeypatch.setattr(Retention, "zoomed", lambda self, num_tokens: (60, 240))
    monkeypatch.setattr("minikv.cache.policies.sekv.Zooming", lambda rows: Zooming(rows, least=0.0))

    def logits(cache, tiers):
        engine, lanes, history, seen = tiny_engine(decoder, tiers=tiers), Lanes(), [], []
        forward = engine._forward
        engine._forward = lambda plan: seen.append(forward(plan)) or seen[-1]
        for turn in range(3):
            history += prompt(50, seed=turn)
            (request,) = engine.add(history, greedy(9), lanes=lanes, cache=cache)
            collector = drain(engine)
            history += collector.tokens[request]
        return history, torch.cat([rows for rows, *_ in seen if len(rows)]), engine

    ids, full, _ = logits(CacheConfig(), TierConfig())
    same, zoomed, engine = logits(sekv(20, decode_slack=4), WARM)
    assert engine.zoomed.rows > 0 and same == ids
    torch.testing.assert_close(zoomed, full, rtol=1e-4, atol=2e-4)


def test_siblings_share_a_prompt(decoder):
    engine = engine_of(decoder, max_seqs=4)
    requests = engine.add(prompt(90), greedy(80, n=3), cache=sekv())
    collector = drain(engine)
    expected = said(engine_of(decoder), prompt(90), sekv(), 80)
    assert all(collector.tokens[r] == expected for r in requests)
    assert engine.storage.tiers.nbytes == 0


def test_without_room_below_it_goes_on_with_its_summaries(decoder, caplog):
    engine = engine_of(decoder, tiers=TierConfig(warm="1KiB"))
    said(engine, prompt(5), None, 1)
    assert len(said(engine, prompt(90), sekv(), 40)) == 40
    assert engine.zoomed.rows == 0
    (message,) = [record.message for record in caplog.records if "was demoted" in record.message]
    assert message.startswith(
        "What was demoted of request 1 is given up: the warm and cold tiers have no room"
    )


def test_an_aborted_request_leaves_nothing(decoder):
    engine = engine_of(decoder)
    (request,) = engine.add(prompt(90), greedy(50), cache=sekv())
    for _ in range(5):
        engine.step()
    engine.abort(request)
    drain(engine)
    assert engine.storage.tiers.nbytes == 0
    assert engine.store.pool.num_free == engine.store.pool.num_pages
