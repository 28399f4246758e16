"""Greedy output does not depend on how the work was arranged, and every request ends once."""

from __future__ import annotations

import pytest
import torch
from tiny import TINY, Collector, alone, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.config import TierConfig
from minikv.errors import ConfigError
from minikv.kernels.reference import ReferenceBackend
from minikv.sampling import SamplingParams
from minikv.scheduler.request import FinishEvent, Lanes

PROMPTS = [prompt(n, seed=n) for n in (3, 17, 1, 40, 8, 64, 5, 29)]
LANES = TINY.num_layers * TINY.num_kv_heads


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def expected(decoder):
    """What each prompt gives with an engine of its own."""
    outputs = [alone(ids, greedy(20), decoder) for ids in PROMPTS]
    assert len({tuple(o) for o in outputs}) > 4, "the tiny model must not answer everything alike"
    return outputs


def run_all(engine, prompts=PROMPTS, params=None):
    ids = [engine.add(p, params or greedy(20))[0] for p in prompts]
    collector = drain(engine)
    assert set(collector.finished) == set(ids)
    return [collector.tokens[i] for i in ids]


def test_batch_matches_single(decoder, expected):
    assert run_all(tiny_engine(decoder)) == expected


def test_reference_backend_gives_the_same_ids(expected):
    assert run_all(tiny_engine(tiny_decoder(ReferenceBackend()))) == expected


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("spare", [0, 16, 500])
def test_chunk_size_changes_nothing(decoder, expected, chunk, spare):
    engine = tiny_engine(decoder, prefill_chunk=chunk, max_seqs=8, max_batch_tokens=max(8, chunk) + spare)
    assert run_all(engine) == expected


def test_preemption_changes_nothing(decoder, expected):
    # The longest request needs 21 pages a lane, all of them together far more than there are.
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(30 * LANES)))
    assert run_all(engine) == expected
    assert engine.scheduler.num_preemptions > 0


def test_a_batch_limit_below_the_number_of_requests_changes_nothing(decoder, expected):
    assert run_all(tiny_engine(decoder, max_seqs=2, prefill_chunk=9, max_batch_tokens=9)) == expected


def test_staggered_arrivals_change_nothing(decoder, expected):
    engine = tiny_engine(decoder, prefill_chunk=16, max_batch_tokens=24)
    collector, ids = Collector(), []
    for p in PROMPTS:
        ids.append(engine.add(p, greedy(20))[0])
        for _ in range(3):
            collector.take(engine.step())
    drain(engine, collector)
    assert [collector.tokens[i] for i in ids] == expected


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_aborting_a_neighbour_changes_nothing(decoder, expected, steps):
    engine = tiny_engine(decoder, prefill_chunk=8, max_batch_tokens=20)
    ids = [engine.add(p, greedy(20))[0] for p in PROMPTS]
    collector = Collector()
    for _ in range(steps):
        collector.take(engine.step())
    for victim in (ids[1], ids[3], ids[7]):
        engine.abort(victim)
        engine.abort(victim)
    drain(engine, collector)
    assert [collector.reason(ids[i]) for i in (1, 3, 7)] == ["abort"] * 3
    for i in (0, 2, 4, 5, 6):
        assert collector.tokens[ids[i]] == expected[i]
    assert engine.store.pool.bytes_in_use == 0


def test_real_model_gives_the_same_ids_alone_batched_chunked_and_preempted(smollm):
    from minikv.config import EngineConfig
    from minikv.engine import Engine

    text = (
        "The keeper climbed the stairs at dusk, counted the barrels of oil, and wrote the number in the log. "
        "A ship of three masts passed to the north. At midnight the wind turned; by four the rain had come. "
        "She trimmed the wick, wound the clock, and waited for the boat that brought letters and flour."
    )
    ids = smollm.tokenizer.encode(text)
    prompts = [ids[start : start + n] for start, n in ((0, 30), (7, 31), (20, 30), (3, 5), (0, len(ids)))]
    model = smollm.engine.model

    def outputs(prompts=prompts, **options):
        engine = Engine(model, EngineConfig(**options))
        return run_all(engine, prompts, greedy(12)), engine

    one_by_one = [outputs([p])[0][0] for p in prompts]
    assert outputs()[0] == one_by_one
    assert outputs(prefill_chunk=7, max_batch_tokens=32)[0] == one_by_one
    page = 32 * (2 * 64 * 4 + 8)
    tight, engine = outputs(tiers=TierConfig(hot=(90 * 3 + 1) * page))
    assert tight == one_by_one
    assert engine.scheduler.num_preemptions > 0


def test_sampled_output_does_not_depend_on_batch_mates(decoder):
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=15, ignore_eos=True) for i in range(8)]
    single = [alone(p, s, decoder) for p, s in zip(PROMPTS, params, strict=True)]
    engine = tiny_engine(decoder, prefill_chunk=8, max_batch_tokens=20)
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    ids = {i: engine.add(PROMPTS[i], params[i])[0] for i in order}
    tokens = drain(engine).tokens
    assert [tokens[ids[i]] for i in range(8)] == single


def test_sampling_goes_on_from_the_same_random_state_after_preemption(decoder):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    single = [alone(p, params, decoder) for p in PROMPTS]
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(30 * LANES)))
    assert run_all(engine, PROMPTS, params) == single
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("hot", [None, hot_bytes(12 * LANES)])
def test_n_completions_equal_n_single_runs_with_following_seeds(decoder, hot):
    ids = prompt(21, seed=5)
    params = SamplingParams(temperature=1.0, seed=11, n=4, max_tokens=10, ignore_eos=True)
    single = [
        alone(ids, SamplingParams(temperature=1.0, seed=11 + i, max_tokens=10, ignore_eos=True), decoder)
        for i in range(4)
    ]
    engine = tiny_engine(decoder, prefill_chunk=8, tiers=TierConfig(hot=hot))
    requests = engine.add(ids, params)
    collector = drain(engine)
    assert [collector.tokens[r] for r in requests] == single
    if hot is None:
        reused = [collector.finished[r].request.num_reused for r in requests]
        assert reused == [0, 21, 21, 21], "the prompt must be computed once"


def test_more_completions_than_sequences_still_share_the_prompt(decoder):
    engine = tiny_engine(decoder, max_seqs=2)
    requests = engine.add(prompt(21, seed=5), greedy(6, n=5))
    collector = drain(engine)
    assert len({tuple(collector.tokens[r]) for r in requests}) == 1
    reused = sorted(collector.finished[r].request.num_reused for r in requests)
    assert reused == [0, 0, 0, 21, 21], "two at a time: every second one copies"


def test_completions_take_the_place_of_idle_lanes(decoder):
    engine, lanes = tiny_engine(decoder, max_seqs=2), Lanes()
    turn(engine, lanes, prompt(5))
    requests = engine.add(prompt(21, seed=5), greedy(6, n=2))
    collector = drain(engine)
    assert [collector.finished[r].request.num_reused for r in requests] == [0, 21]
    assert lanes.seq is None


def test_siblings_go_on_when_the_request_they_wait_for_is_aborted(decoder):
    engine = tiny_engine(decoder, prefill_chunk=4)
    requests = engine.add(prompt(30), greedy(5, n=3))
    collector = Collector()
    collector.take(engine.step())
    engine.abort(requests[0])
    drain(engine, collector)
    assert [collector.reason(r) for r in requests] == ["abort", "length", "length"]
    assert collector.tokens[requests[1]] == alone(prompt(30), greedy(5), decoder)


# How requests end


def test_end_of_sequence_token_ends_a_request_with_stop(decoder):
    first = alone(prompt(9), greedy(1), decoder)[0]
    engine = tiny_engine(decoder)
    (request,) = engine.add(prompt(9), SamplingParams(stop_token_ids=[first], max_tokens=50))
    collector = drain(engine)
    assert collector.reason(request) == "stop"
    assert collector.tokens[request] == [first]


def test_context_end_is_reached_exactly_and_said():
    decoder = tiny_decoder(max_context=32)
    engine = tiny_engine(decoder)
    (request,) = engine.add(prompt(20), greedy(100))
    event = drain(engine).finished[request]
    assert event.reason == "context"
    assert "context of 32" in event.message
    # The last token sampled sees a full context; it needs no place in the cache itself.
    assert event.request.num_output == 13


def test_a_prompt_as_long_as_the_context_still_gives_a_token():
    engine = tiny_engine(tiny_decoder(max_context=32))
    (request,) = engine.add(prompt(32), greedy(100))
    collector = drain(engine)
    assert (collector.reason(request), len(collector.tokens[request])) == ("context", 1)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "empty"),
        (prompt(257), "257 tokens and the context is 256"),
        ([5, 97], "Token id 97 is outside the model's vocabulary of 97"),
        ([-1], "Token id -1"),
    ],
)
def test_an_impossible_prompt_is_an_error_of_its_own_request(decoder, expected, ids, words):
    engine = tiny_engine(decoder)
    bad = engine.add(ids, greedy())[0]
    good = engine.add(PROMPTS[0], greedy(20))[0]
    collector = drain(engine)
    assert collector.reason(bad) == "error"
    assert words in collector.finished[bad].message
    assert collector.tokens[good] == expected[0]


def test_a_bad_token_id_with_a_penalty_is_an_error_too(decoder, expected):
    engine = tiny_engine(decoder)
    bad = engine.add([5, 10**6], greedy(repetition_penalty=1.3))[0]
    good = engine.add(PROMPTS[0], greedy(20))[0]
    collector = drain(engine)
    assert "1000000" in collector.finished[bad].message
    assert collector.tokens[good] == expected[0]


def test_a_bias_on_an_unknown_token_is_an_error_of_its_own_request(decoder):
    engine = tiny_engine(decoder)
    (bad,) = engine.add(prompt(3), SamplingParams(logit_bias={500: 1.0}))
    event = drain(engine).finished[bad]
    assert event.reason == "error"
    assert "500" in event.message


def test_a_prompt_larger_than_the_pool_names_the_bytes_needed_and_had(decoder):
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(5 * LANES)))
    (request,) = engine.add(prompt(21), greedy())
    event = drain(engine).finished[request]
    assert event.reason == "error"
    assert "need 13.1 KiB" not in event.message
    page = 4 * (2 * 16 * 4 + 8)
    assert f"{6 * LANES * page / 1024:.1f} KiB" in event.message
    assert f"{5 * LANES * page / 1024:.1f} KiB" in event.message


def test_a_lone_request_that_outgrows_the_pool_ends_with_context_and_a_hint(decoder):
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(5 * LANES)))
    (request,) = engine.add(prompt(10), greedy(100))
    event = drain(engine).finished[request]
    assert event.reason == "context"
    assert "--kv-hot" in event.message
    assert event.request.num_output == 11
    assert engine.store.pool.bytes_in_use == 0


def test_two_requests_that_outgrow_the_pool_together_both_get_as_far_as_alone(decoder):
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(5 * LANES)))
    requests = [engine.add(prompt(10, seed=s), greedy(100))[0] for s in range(2)]
    collector = drain(engine)
    assert [collector.reason(r) for r in requests] == ["context", "context"]
    assert [len(collector.tokens[r]) for r in requests] == [11, 11]


def test_a_failing_step_ends_its_requests_with_an_error_and_the_engine_goes_on(decoder, expected):
    class Failing:
        config = decoder.config
        calls = 0

        def forward(self, batch):
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("a kernel broke\nwith details")
            return decoder.forward(batch)

    engine = tiny_engine(Failing())
    (broken,) = engine.add(PROMPTS[3], greedy(20))
    event = drain(engine).finished[broken]
    assert event.reason == "error"
    assert event.message == "The step failed: RuntimeError: a kernel broke"
    assert run_all(engine, PROMPTS[:2]) == expected[:2]


def test_logits_that_are_not_numbers_end_one_request_only(decoder, expected):
    class Broken:
        config = decoder.config

        def forward(self, batch):
            logits = decoder.forward(batch).clone()
            if len(logits) > 1:
                logits[0] = float("nan")
            return logits

    engine = tiny_engine(Broken())
    first = engine.add(PROMPTS[0], greedy(20))[0]
    second = engine.add(PROMPTS[1], greedy(20))[0]
    collector = drain(engine)
    assert collector.reason(first) == "error"
    assert collector.tokens[second] == expected[1]


def test_two_engines_in_one_process_do_not_disturb_each_other(expected):
    engines = [tiny_engine(tiny_decoder()), tiny_engine(tiny_decoder(seed=9))]
    ids = [[e.add(p, greedy(20))[0] for p in PROMPTS] for e in engines]
    collectors = [Collector(), Collector()]
    while any(e.has_work for e in engines):
        for engine, collector in zip(engines, collectors, strict=True):
            collector.take(engine.step())
    assert [collectors[0].tokens[i] for i in ids[0]] == expected
    assert [collectors[1].tokens[i] for i in ids[1]] != expected


# Lanes that outlive a request


def turn(engine, lanes, ids, count=6):
    (request,) = engine.add(ids, greedy(count), lanes=lanes)
    collector = drain(engine)
    return collector.tokens[request], collector.finished[request].request


def test_a_second_turn_computes_only_what_is_new(decoder):
    engine, lanes = tiny_engine(decoder), Lanes()
    first, request = turn(engine, lanes, prompt(15))
    assert request.num_reused == 0
    longer = prompt(15) + first + prompt(7, seed=2)
    second, request = turn(engine, lanes, longer)
    # The last sampled token of a turn has no keys and values yet.
    assert request.num_reused == 15 + len(first) - 1
    assert second == alone(longer, greedy(6), decoder)


def test_a_turn_that_departs_from_the_past_reuses_the_common_part(decoder):
    engine, lanes = tiny_engine(decoder), Lanes()
    turn(engine, lanes, prompt(30))
    other = prompt(30)[:19] + prompt(8, seed=4)
    tokens, request = turn(engine, lanes, other)
    assert request.num_reused in (19, 20)
    assert tokens == alone(other, greedy(6), decoder)
    again, request = turn(engine, lanes, other)
    assert (again, request.num_reused) == (tokens, len(other) - 1)


def test_idle_lanes_give_way_to_requests_and_are_computed_again(decoder):
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(12 * LANES)))
    lanes = Lanes()
    first, _ = turn(engine, lanes, prompt(15))
    assert engine.store.pool.bytes_in_use > 0
    other = prompt(40, seed=8)
    assert run_all(engine, [other], greedy(6)) == [alone(other, greedy(6), decoder)]
    assert engine.scheduler.num_reclaimed == 1
    assert lanes.seq is None
    longer = prompt(15) + first + [5]
    tokens, request = turn(engine, lanes, longer)
    assert (request.num_reused, tokens) == (0, alone(longer, greedy(6), decoder))


def test_more_conversations_than_sequences_share_by_least_recent_use(decoder):
    engine = tiny_engine(decoder, max_seqs=2)
    all_lanes = [Lanes() for _ in range(3)]
    for lanes in all_lanes:
        turn(engine, lanes, prompt(5))
    assert [lanes.seq is None for lanes in all_lanes] == [True, False, False]


def test_lanes_are_not_given_up_for_a_request_that_cannot_start_anyway(decoder):
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(20 * LANES)))
    lanes = Lanes()
    first, _ = turn(engine, lanes, prompt(34))
    (other,) = engine.add(prompt(30, seed=9), greedy(6))
    collector = Collector()
    collector.take(engine.step())
    (request,) = engine.add(prompt(34) + first + prompt(9, seed=3), greedy(4), lanes=lanes)
    collector.take(engine.step())
    assert other not in collector.finished
    drain(engine, collector)
    assert collector.finished[request].request.num_reused == 34 + len(first) - 1


def test_a_failed_turn_does_not_leave_its_lanes_behind(decoder):
    class Broken:
        config = decoder.config
        broken = True

        def forward(self, batch):
            logits = decoder.forward(batch).clone()
            return logits.fill_(float("nan")) if self.broken else logits

    model = Broken()
    engine, lanes = tiny_engine(model), Lanes()
    (request,) = engine.add(prompt(15), greedy(), lanes=lanes)
    assert drain(engine).reason(request) == "error"
    assert (lanes.seq, lanes.token_ids) == (None, [])
    model.broken = False
    tokens, later = turn(engine, lanes, prompt(20))
    assert later.num_reused == 0
    assert tokens == alone(prompt(20), greedy(6), decoder)


def test_dynamic_rope_gives_the_same_ids_with_and_without_reuse():
    from minikv.models.config import RopeConfig

    rope = RopeConfig("dynamic", factor=4.0, original_context=32)
    decoder = tiny_decoder(rope=rope, max_context=128)
    engine, lanes = tiny_engine(decoder), Lanes()
    first, _ = turn(engine, lanes, prompt(12))
    short = prompt(12) + first + prompt(5, seed=2)
    second, request = turn(engine, lanes, short)
    assert request.num_reused > 0
    assert second == alone(short, greedy(6), decoder)
    long = short + second + prompt(30, seed=3)
    third, request = turn(engine, lanes, long)
    assert request.num_reused == 0
    assert third == alone(long, greedy(6), decoder)


def test_abandoned_lanes_are_freed_by_the_next_step(decoder):
    engine, lanes = tiny_engine(decoder), Lanes()
    turn(engine, lanes, prompt(15))
    lanes.abandoned = True
    engine.step()
    assert engine.store.pool.bytes_in_use == 0


def test_a_preempted_and_aborted_turn_leaves_empty_lanes(decoder):
    engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(12 * LANES)))
    lanes = Lanes()
    first, _ = turn(engine, lanes, prompt(15))
    (older,) = engine.add(prompt(10, seed=4), greedy(30))
    (request,) = engine.add(prompt(15) + first + [5], greedy(30), lanes=lanes)
    collector = Collector()
    while engine.scheduler.num_preemptions == 0:
        collector.take(engine.step())
    engine.abort(request)
    drain(engine, collector)
    assert collector.reason(older) == "length"
    assert (lanes.seq, lanes.token_ids, lanes.busy) == (None, [], False)


def test_released_lanes_free_their_pages(decoder):
    engine, lanes = tiny_engine(decoder), Lanes()
    turn(engine, lanes, prompt(15))
    engine.release(lanes)
    engine.release(lanes)
    assert engine.store.pool.bytes_in_use == 0


def test_lanes_in_use_are_refused_to_a_second_request(decoder):
    engine, lanes = tiny_engine(decoder), Lanes()
    engine.add(prompt(5), greedy(), lanes=lanes)
    with pytest.raises(ConfigError, match="one request at a time"):
        engine.add(prompt(5), greedy(), lanes=lanes)
    with pytest.raises(ConfigError, match="while a request uses them"):
        engine.release(lanes)
    drain(engine)


def test_a_pool_too_small_for_one_page_per_lane_is_refused_with_the_least_size(decoder):
    with pytest.raises(ConfigError, match=r"needs at least 2\.7 KiB"):
        tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(LANES - 1)))


def test_a_longer_context_than_the_models_is_refused(decoder):
    with pytest.raises(ConfigError, match="more than this model's context of 256"):
        tiny_engine(decoder, max_context=300)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_kv_gives_the_same_ids_however_it_is_chunked(decoder, dtype):
    whole = run_all(tiny_engine(decoder, kv_dtype=dtype))
    chunked = run_all(tiny_engine(decoder, kv_dtype=dtype, prefill_chunk=7, max_batch_tokens=16))
    assert whole == chunked


def test_finish_events_come_once_even_for_requests_that_never_ran(decoder):
    engine = tiny_engine(decoder)
    (request,) = engine.add(prompt(5), greedy())
    engine.abort(request)
    events = engine.step()
    assert [type(e) for e in events] == [FinishEvent]
    assert not engine.has_work
    assert engine.step() == []
