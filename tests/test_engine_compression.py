"""Compression in the engine changes nothing but what is kept, however the work is arranged."""

from __future__ import annotations

import pytest
import torch
from keeping import LANES, PAGE_BYTES, POLICIES, PROMPTS, check_ceiling, keep, kept_positions, pages, run
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.config import CacheConfig, EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.errors import ConfigError
from minikv.sampling import SamplingParams
from minikv.scheduler.request import Lanes


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


# What a budget does


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [1.0, 120, "1MiB"])
def test_a_budget_that_holds_the_prompt_changes_no_bit(decoder, policy, budget):
    plain, lanes = tiny_engine(decoder), Lanes()
    expected, _ = run(plain, PROMPTS[0], params=greedy(12), lanes=lanes)
    engine, kept = tiny_engine(decoder), Lanes()
    tokens, _ = run(engine, PROMPTS[0], keep(policy, budget), lanes=kept)
    assert tokens == expected
    for mine, theirs in zip(*(stored(e, x) for e, x in ((plain, lanes), (engine, kept))), strict=True):
        assert torch.equal(mine, theirs)


def stored(engine, lanes):
    slots, _ = engine.store.slots(lanes.seq)
    return (*engine.store.pool.read_rows(slots), engine.store.positions(lanes.seq))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_is_all_protected_is_left_alone(decoder, policy):
    positions = kept_positions(decoder, prompt(8), keep(policy, 0.1))
    assert (positions == torch.arange(8)).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_entries_that_stay_are_as_many_as_the_budget_in_order_and_protected_ones_among_them(decoder, policy):
    cache = keep(policy, 0.3, pinned=((30, 34),))
    positions = kept_positions(decoder, PROMPTS[0], cache)
    assert int((positions >= 0).sum()) == round(0.3 * 90 * LANES)
    for lane in positions.flatten(0, 1):
        held = lane[lane >= 0].tolist()
        assert held == sorted(set(held))
        assert {0, 1, 30, 31, 32, 33, 86, 87, 88, 89} <= set(held)


def test_entries_per_lane_and_a_fraction_are_the_same_thing(decoder):
    by_fraction = kept_positions(decoder, PROMPTS[0], keep(budget=0.3))
    by_entries = kept_positions(decoder, PROMPTS[0], keep(budget=27))
    assert torch.equal(by_fraction, by_entries)


def test_what_is_dropped_is_reported_and_frees_its_pages(decoder):
    engine = tiny_engine(decoder)
    _, event = run(engine, PROMPTS[3], keep(budget=20), greedy(1))
    request = event.request
    assert request.full_kv_bytes == 30 * LANES * PAGE_BYTES
    assert request.kv_bytes == 5 * LANES * PAGE_BYTES
    _, event = run(engine, PROMPTS[3], None, greedy(1))
    assert event.request.kv_bytes == event.request.full_kv_bytes == 30 * LANES * PAGE_BYTES


def test_policy_full_records_nothing_and_compresses_nothing(decoder):
    class Watching:
        config, rope = decoder.config, decoder.rope
        captured = 0

        def forward(self, batch):
            self.captured += batch.capture_rows is not None
            return decoder.forward(batch)

    model = Watching()
    engine = tiny_engine(model)
    run(engine, PROMPTS[0])
    assert model.captured == 0
    engine.model = model = Watching()
    run(engine, PROMPTS[0], keep(), greedy(1))
    assert model.captured == 1


def test_freed_pages_serve_another_request_in_the_same_step(decoder):
    # The long prompt takes the whole pool; the short one can only start once it has been compressed.
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(32 * LANES)), prefill_chunk=64)
    (long,) = engine.add(PROMPTS[3], greedy(8), cache=keep(budget=0.1))
    (short,) = engine.add(PROMPTS[0], greedy(4))
    first_tokens = {}
    for step in range(100):
        for event in engine.step():
            first_tokens.setdefault(event.request_id, step)
        if not engine.has_work:
            break
    assert first_tokens[short] < first_tokens[long] + 4


def test_siblings_fork_lanes_that_are_compressed_already(decoder):
    # Full lanes of the prompt fit the pool once, compressed ones four times over.
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(34 * LANES)))
    requests = engine.add(PROMPTS[3], greedy(6, n=4), cache=keep(budget=0.1))
    collector = drain(engine)
    assert [collector.finished[r].request.num_reused for r in requests] == [0, 120, 120, 120]


# However the work is arranged


def alone(decoder, ids, cache, params=None, **options):
    engine = tiny_engine(decoder)
    return run(engine, ids, cache, params, **options)[0]


def everyone(budget=0.2):
    """A cache configuration per prompt, all different."""
    return [
        keep("snapkv", budget),
        keep("window", 15),
        None,
        keep("adakv", budget, decode_slack=3),
        keep("expected", 0.5),
        keep("compresskv", pages(24)),
        keep("adakv:expected", pages(30), prefill="streaming"),
    ]


@pytest.fixture(scope="module")
def each_alone(decoder):
    outputs = [alone(decoder, p, c, greedy(20)) for p, c in zip(PROMPTS, everyone(), strict=True)]
    full = [alone(decoder, p, None, greedy(20)) for p in PROMPTS]
    assert sum(a != b for a, b in zip(outputs, full, strict=True)) > 3, "compression must be felt"
    return outputs


def run_all(engine, caches):
    ids = [engine.add(p, greedy(20), cache=c)[0] for p, c in zip(PROMPTS, caches, strict=True)]
    collector = drain(engine)
    assert engine.store.pool.bytes_in_use == 0
    return [collector.tokens[i] for i in ids]


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 16, "max_batch_tokens": 40}, {"max_seqs": 3}])
def test_a_batch_of_different_policies_equals_each_alone(decoder, each_alone, options):
    chunk = options.get("prefill_chunk", 512)
    expected = each_alone if chunk == 512 else each_alone[:6]
    assert run_all(tiny_engine(decoder, **options), everyone())[: len(expected)] == expected


def test_preemption_under_policies_changes_nothing(decoder, each_alone):
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(34 * LANES)))
    assert run_all(engine, everyone()) == each_alone
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_keeps_the_same_entries_as_one_shot(decoder, policy, chunk):
    whole = kept_positions(decoder, PROMPTS[0], keep(policy))
    engine = {"prefill_chunk": chunk, "max_seqs": 4, "max_batch_tokens": max(chunk, 4)}
    assert torch.equal(kept_positions(decoder, PROMPTS[0], keep(policy), **engine), whole)


@pytest.mark.parametrize("policy", ["snapkv", "adakv", "expected"])
@pytest.mark.parametrize("slack", [None, 2])
def test_four_completions_equal_four_single_runs_with_following_seeds(decoder, policy, slack):
    cache = keep(policy, 0.2, decode_slack=slack)
    params = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True}
    single = [alone(decoder, PROMPTS[0], cache, SamplingParams(seed=7 + i, **params)) for i in range(4)]
    engine = tiny_engine(decoder, prefill_chunk=32)
    requests = engine.add(PROMPTS[0], SamplingParams(seed=7, n=4, **params), cache=cache)
    collector = drain(engine)
    assert [collector.tokens[r] for r in requests] == single


# Ceilings


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [LANES, 3 * LANES + 1, 9 * LANES + 2])
@pytest.mark.parametrize("chunk", [9])
def test_a_byte_budget_holds_at_every_step_of_a_streaming_request(decoder, policy, count, chunk):
    engine = tiny_engine(decoder, prefill_chunk=chunk)
    cache = keep(policy, pages(count), prefill="streaming", recent=2, sinks=1)
    (request,) = engine.add(PROMPTS[3], greedy(60), cache=cache)
    collector = check_ceiling(engine, count)
    assert len(collector.tokens[request]) == 60


def test_a_byte_budget_holds_while_an_exact_request_decodes(decoder):
    engine = tiny_engine(decoder)
    (request,) = engine.add(PROMPTS[3], greedy(60), cache=keep("snapkv", pages(24)))
    collector = Collector()
    collector.take(engine.step())
    assert len(collector.tokens[request]) == 1
    check_ceiling(engine, 24, collector)
    assert len(collector.tokens[request]) == 60


def test_the_budget_in_entries_bounds_a_streaming_prompt_to_budget_and_chunk(decoder):
    engine = tiny_engine(decoder, prefill_chunk=16)
    engine.add(PROMPTS[3], greedy(1), cache=keep("snapkv", 20, prefill="streaming"))
    while engine.has_work:
        engine.step()
        assert int(engine.store.lengths.sum()) <= (20 + 16) * LANES


@pytest.mark.parametrize("ranges", [((0, 60),), ((10, 40), (30, 70), (100, 500)), ()])
@pytest.mark.parametrize("window", [6, 50])
def test_a_streaming_prompt_is_admitted_with_what_it_comes_to_hold(decoder, ranges, window):
    engine = tiny_engine(decoder, prefill_chunk=16)
    cache = keep("snapkv", 20, prefill="streaming", window=window)
    engine.add(PROMPTS[3], greedy(1), cache=cache, pinned=ranges)
    peak, admitted = 0, None
    while engine.has_work:
        engine.step()
        peak = max(peak, engine.store.pages_of(0))
        for request in engine.scheduler.running:
            admitted = engine.scheduler.room.most(request)
    assert peak <= admitted < engine.store.pages_for(len(PROMPTS[3]))


def test_a_recent_window_longer_than_the_prompt_gives_way_to_the_budget(decoder):
    positions = kept_positions(decoder, PROMPTS[0], keep("snapkv", 10, recent=500))
    assert (positions >= 0).sum() == 10 * LANES
    assert set(positions[0, 0].tolist()) == {0, 1, *range(len(PROMPTS[0]) - 8, len(PROMPTS[0]))}


def test_a_window_longer_than_the_prompt_does_not_switch_compression_off(decoder):
    positions = kept_positions(decoder, PROMPTS[0], keep("snapkv", 10, window=500, sinks=500))
    assert (positions >= 0).sum() == 10 * LANES


def test_a_streaming_prompt_larger_than_the_pool_runs(decoder):
    hot = hot_bytes(12 * LANES)
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot), prefill_chunk=16)
    exact, event = run(engine, PROMPTS[3], keep("snapkv", 12))
    assert (exact, event.reason) == (None, "error")
    assert "--kv-prefill streaming" in event.message
    _, event = run(engine, PROMPTS[3])
    assert "--kv-policy" in event.message
    tokens, event = run(engine, PROMPTS[3], keep("snapkv", 12, prefill="streaming"))
    assert (len(tokens), event.reason) == (12, "length")


def test_decoding_with_slack_stays_within_it(decoder):
    engine, seen = tiny_engine(decoder), []
    engine.add(PROMPTS[0], greedy(60), cache=keep("snapkv", 20, decode_slack=5))
    while engine.has_work:
        engine.step()
        seen.append(int(engine.store.lengths.sum()) / LANES)
    assert max(seen) <= 25
    assert seen.count(20) > 5
    engine.add(PROMPTS[0], greedy(60), cache=keep("snapkv", 20))
    while engine.has_work:
        engine.step()
        seen.append(int(engine.store.lengths.sum()) / LANES)
    assert max(seen) == 20 + 58, "without slack a decoding sequence is left alone"


def test_pinned_tokens_stay_through_every_compression(decoder):
    engine, lanes = tiny_engine(decoder), Lanes()
    cache = keep("window", 20, prefill="streaming", decode_slack=3)
    run(engine, PROMPTS[3], cache, greedy(30), lanes=lanes, pinned=((40, 46),))
    for lane in engine.store.positions(lanes.seq).flatten(0, 1):
        assert set(range(40, 46)) <= set(lane.tolist())


def test_more_pinned_tokens_than_the_budget_stay_and_the_request_still_ends(decoder):
    engine, lanes = tiny_engine(decoder, prefill_chunk=16), Lanes()
    cache = keep("window", 10, prefill="streaming", decode_slack=3)
    tokens, _ = run(engine, PROMPTS[3], cache, greedy(30), lanes=lanes, pinned=((20, 60),))
    assert len(tokens) == 30
    for lane in engine.store.positions(lanes.seq).flatten(0, 1):
        assert set(range(20, 60)) <= set(lane.tolist())


def test_a_budget_of_one_entry_and_one_of_the_whole_context_are_told_apart(decoder):
    engine = tiny_engine(decoder)
    held = []
    for budget in (1.0, 1, 1.0):
        _, event = run(engine, PROMPTS[0], keep("snapkv", budget), greedy(1))
        held.append(event.request.kv_bytes / event.request.full_kv_bytes)
    assert held[0] == held[2] == 1.0
    assert held[1] < 0.1


# What cannot be


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (keep(budget="100B"), "too little for this model, which needs at least 2.1 KiB"),
        (CacheConfig(kv_dtype="float16"), "kv_dtype float16 is not what this model was loaded with"),
        (CacheConfig(page_size=8), "page_size 8 is not what this model was loaded with, which is 4"),
    ],
)
def test_a_configuration_that_the_engine_cannot_serve_is_refused_at_once(decoder, cache, words):
    engine = tiny_engine(decoder)
    with pytest.raises(ConfigError, match=words):
        engine.add(PROMPTS[0], greedy(), cache=cache)
    assert not engine.has_work


def test_pinned_tokens_past_a_byte_budget_end_their_request_with_the_least_possible(decoder, each_alone):
    engine = tiny_engine(decoder)
    (bad,) = engine.add(PROMPTS[3], greedy(), cache=keep(budget=pages(2 * LANES)), pinned=((0, 50),))
    (good,) = engine.add(PROMPTS[0], greedy(20), cache=everyone()[0])
    collector = drain(engine)
    assert collector.reason(bad) == "error"
    assert "must be at least" in collector.finished[bad].message
    assert collector.tokens[good] == each_alone[0]


def test_malformed_pinned_ranges_are_refused(decoder):
    with pytest.raises(ConfigError, match="token ranges"):
        tiny_engine(decoder).add(PROMPTS[0], greedy(), cache=keep(), pinned=((5, 5),))


# The compiled kernels and a real model

TEXT = (
    "The keeper climbed the stairs at dusk, counted the barrels of oil, and wrote the number in the log. "
    "A ship of three masts passed to the north. At midnight the wind turned; by four the rain had come. "
    "She trimmed the wick, wound the clock, and waited for the boat that brought letters and flour. "
)


@pytest.mark.slow
def test_real_model_under_policies_gives_the_same_ids_alone_batched_chunked_and_preempted(smollm):
    ids = smollm.tokenizer.encode(TEXT * 5)
    model, loaded = smollm.engine.model, smollm.engine.store.pool
    caches = [CacheConfig(policy=policy, budget=0.25) for policy in POLICIES]
    caches += [CacheConfig(policy="snapkv", budget="4MiB"), None]
    prompts = [ids[7 * i : 7 * i + 300] for i in range(len(caches))]

    def outputs(which, preempt_after=0, **options):
        engine = Engine(
            model,
            EngineConfig(debug_checks=True, **options),
            loaded.dtype,
            loaded.page_size,
            keys_transposed=loaded.keys_transposed,
        )
        requests = [engine.add(prompts[i], greedy(12), cache=caches[i])[0] for i in which]
        collector = Collector()
        for _ in range(preempt_after):
            collector.take(engine.step())
        for victim in engine.scheduler.running[1:] if preempt_after else ():
            engine.scheduler._preempt(victim, {})
        drain(engine, collector)
        return [collector.tokens[r] for r in requests]

    everything = range(len(caches))
    one_by_one = [outputs([i])[0] for i in everything]
    assert outputs(everything) == one_by_one
    assert outputs(everything, prefill_chunk=37, max_batch_tokens=100) == one_by_one
    assert (
        outputs(everything, preempt_after=10, tiers=TierConfig(hot=40 * 90 * loaded.page_bytes)) == one_by_one
    )
