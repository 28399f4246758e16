"""Preemption by demotion: sequences leave the pool whole, and go on as if they had never left."""

from __future__ import annotations

import logging
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import LANES, PROMPTS, keep, run
from swapping import CACHES, SAMPLED, caches, every_cache, make_tiers, nothing_left, preempted_often
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.config import TierConfig
from minikv.sampling import SamplingParams
from minikv.scheduler.request import Lanes, State


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture
def tiers(tmp_path):
    return partial(make_tiers, tmp_path)


# One request


@every_cache("kind", ["warm", "cold"])
@pytest.mark.parametrize("params", [greedy(12), SAMPLED], ids=["greedy", "sampled"])
def test_a_preempted_request_goes_on_as_it_was_and_computes_nothing_again(
    decoder, tiers, cache, params, kind
):
    expected, _ = run(tiny_engine(decoder, prefill_chunk=16), PROMPTS[0], cache, params)
    engine = tiny_engine(decoder, tiers=tiers(kind), prefill_chunk=16)
    tokens, rows = preempted_often(engine, PROMPTS[0], cache, params)
    assert tokens == expected
    assert rows == len(PROMPTS[0]) + len(expected) - 1
    counters = engine.storage.report()
    assert (
        counters["sequences_demoted"]
        == counters["sequences_restored"]
        == engine.scheduler.num_preemptions
        >= 6
    )
    assert nothing_left(engine)


@every_cache("dtype", [torch.int8, torch.float16])
def test_rounded_rows_come_back_as_they_were_rounded(decoder, tiers, cache, dtype):
    expected, _ = run(tiny_engine(decoder, kv_dtype=dtype), PROMPTS[0], cache)
    engine = tiny_engine(decoder, kv_dtype=dtype, tiers=tiers("warm"))
    tokens, rows = preempted_often(engine, PROMPTS[0], cache, greedy(12))
    assert tokens == expected and rows == len(PROMPTS[0]) + 11
    assert nothing_left(engine)


@caches
def test_tiers_too_small_for_a_sequence_mean_that_it_is_computed_again(decoder, tiers, cache, caplog):
    expected, _ = run(tiny_engine(decoder), PROMPTS[3], cache)
    engine = tiny_engine(decoder, tiers=tiers("none"))
    tokens, _rows = preempted_often(engine, PROMPTS[3], cache, greedy(12), every=4)
    assert tokens == expected
    assert engine.storage.num_swapped == 0
    assert nothing_left(engine)
    assert sum("--kv-warm or --kv-cold" in line for line in caplog.messages) == 1


def test_a_request_of_which_nothing_is_computed_needs_no_span(decoder, tiers):
    engine = tiny_engine(decoder, tiers=tiers("none"))
    engine.add(PROMPTS[0], greedy(2))
    engine.scheduler.plan()
    engine.scheduler._preempt(engine.scheduler.running[0], {})
    assert len(drain(engine).tokens[0]) == 2
    assert engine.storage.tiers.counters.refused == 0
    assert nothing_left(engine)


# In batches


@every_cache("kind", ["few", "warm", "cold", "both", "none"])
@pytest.mark.parametrize("params", [greedy(24), SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_in_a_small_pool_says_what_it_says_in_a_large_one(decoder, tiers, cache, kind, params):
    many = PROMPTS[:5]
    reference = tiny_engine(decoder, prefill_chunk=24)
    ids = [reference.add(each, params, cache=cache)[0] for each in many]
    expected = drain(reference).tokens
    assert reference.scheduler.num_preemptions == 0
    hot = hot_bytes(40 * LANES)
    engine = tiny_engine(decoder, tiers=tiers(kind, hot), prefill_chunk=24, max_seqs=4)
    assert [engine.add(each, params, cache=cache)[0] for each in many] == ids
    assert drain(engine).tokens == expected
    if cache is None:
        assert engine.scheduler.num_preemptions > 0
        assert (engine.storage.num_restored > 0) == (kind != "none")
    assert nothing_left(engine)


@pytest.mark.parametrize("cache", [None, keep("adakv", 0.4), keep("gracekv", 0.4)])
@pytest.mark.parametrize("kind", ["warm", "few"])
def test_completions_of_one_prompt_are_demoted_each_for_itself(decoder, tiers, cache, kind):
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=3, ignore_eos=True)
    reference = tiny_engine(decoder)
    ids = reference.add(PROMPTS[1], params, cache=cache)
    expected = drain(reference).tokens
    engine = tiny_engine(decoder, tiers=tiers(kind))
    assert engine.add(PROMPTS[1], params, cache=cache) == ids
    collector, scheduler = Collector(), engine.scheduler
    for step in range(400):
        if not engine.has_work:
            break
        collector.take(engine.step())
        if scheduler.running and step % 3 == 0:
            scheduler._preempt(scheduler.running[step % len(scheduler.running)], {})
    assert collector.tokens == expected
    assert engine.storage.num_restored > 0
    assert nothing_left(engine)


def test_the_log_says_once_what_a_full_pool_leads_to(decoder, tiers, caplog):
    caplog.set_level(logging.INFO, "minikv")
    engine = tiny_engine(decoder, tiers=tiers("warm"))
    preempted_often(engine, PROMPTS[0], None, greedy(6))
    levels = [(record.levelname, record.message.split(":")[1].split()[0]) for record in caplog.records]
    assert levels == [("WARNING", "preempting"), ("INFO", "demoting")]
    engine.close()


def test_reads_from_the_file_begin_before_there_is_room(decoder, tmp_path):
    hot = hot_bytes(40 * LANES)
    tiers = TierConfig(hot=hot, warm="60KiB", cold=f"{tmp_path / 'kv.cold'}:8MiB")
    engine = tiny_engine(decoder, tiers=tiers)
    fetched, fetch = [], engine.storage.tiers.fetch
    engine.storage.tiers.fetch = lambda handle: (fetched.append(handle), fetch(handle))
    for each in PROMPTS[:4]:
        engine.add(each, greedy(30))
    drain(engine)
    assert fetched and len(set(fetched)) == len(fetched)
    assert nothing_left(engine)


# Ends


@pytest.mark.parametrize("kind", ["warm", "cold", "both"])
@pytest.mark.parametrize("steps", [1, 2, 8, 12])
@pytest.mark.parametrize("in_conversation", [False, True])
def test_a_request_aborted_while_demoted_leaves_no_span(decoder, tiers, kind, steps, in_conversation):
    engine = tiny_engine(decoder, tiers=tiers(kind), prefill_chunk=32)
    lanes = Lanes() if in_conversation else None
    (request,) = engine.add(PROMPTS[3], greedy(12), lanes=lanes)
    for _ in range(steps):
        engine.step()
    computed = engine.scheduler.running[0].num_computed
    engine.scheduler._preempt(engine.scheduler.running[0], {})
    assert engine.storage.tiers.nbytes > 0
    engine.abort(request)
    assert drain(engine).reason(request) == "abort"
    if lanes is not None:
        # What was computed is the conversation's, as it is without preemption.
        assert len(lanes.token_ids) == computed and lanes.swapped is not None
        expected, _ = run(tiny_engine(decoder), [*PROMPTS[3], 5, 6])
        tokens, event = run(engine, [*PROMPTS[3], 5, 6], lanes=lanes)
        assert tokens == expected and event.request.num_reused == min(computed, len(PROMPTS[3]))
    assert nothing_left(engine, [lanes] if lanes else [])


def test_an_engine_closed_while_requests_are_demoted_leaves_no_span_in_its_file(decoder, tiers):
    engine = tiny_engine(decoder, tiers=tiers("cold"))
    engine.add(PROMPTS[0], greedy(12))
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0], {})
    engine.close()
    again = tiny_engine(decoder, tiers=tiers("cold"))
    assert nothing_left(again)


def lose(engine, how, path):
    """Spoil what is demoted."""
    tiers = engine.storage.tiers
    handles = list(engine.storage._own)
    tiers._settle(wait=True)
    match how:
        case "dropped":
            tiers.drop(handles[-1])
        case "flipped":
            data = bytearray(path.read_bytes())
            for place in range(0, len(data), 997):
                data[place] ^= 64
            path.write_bytes(data)
        case "cut":
            with path.open("r+b") as file:
                file.truncate(3000)
        case "unlinked":
            path.unlink()


@every_cache("how", ["flipped", "dropped", "cut", "unlinked"])
def test_what_is_lost_below_the_pool_is_computed_again(decoder, tiers, tmp_path, cache, how):
    expected, _ = run(tiny_engine(decoder), PROMPTS[0], cache)
    engine = tiny_engine(decoder, tiers=tiers("cold"))
    (request,) = engine.add(PROMPTS[0], greedy(12), cache=cache)
    collector = Collector()
    for _ in range(5):
        collector.take(engine.step())
    engine.scheduler._preempt(engine.scheduler.running[0], {})
    lose(engine, how, tmp_path / "kv.cold")
    engine.config = engine.config.__class__()  # a check would find the damage first
    drain(engine, collector)
    assert collector.tokens[request] == expected
    # A file that lost its name is still the file of who has it open.
    assert engine.storage.num_restored == (how == "unlinked")
    assert nothing_left(engine)


@pytest.mark.parametrize("failing", ["encode", "decode"])
def test_memory_that_is_short_while_a_sequence_moves_costs_a_recomputation_and_no_more(
    decoder, tiers, monkeypatch, failing
):
    expected, _ = run(tiny_engine(decoder), PROMPTS[0])
    engine = tiny_engine(decoder, tiers=tiers("warm"))
    kind, calls = type(engine.storage.exact), []
    work = getattr(kind, failing)

    def short(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return work(self, *args)

    monkeypatch.setattr(kind, failing, short)
    tokens, _ = preempted_often(engine, PROMPTS[0], None, greedy(12))
    assert tokens == expected and len(calls) > 2
    assert nothing_left(engine)


# Random schedules

SMALL = tiny_decoder(num_layers=1)
SPAN = 1 << 10
commands = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 60),
            st.integers(1, 12),
            st.sampled_from([1, 1, 2]),
            st.sampled_from(list(CACHES)),
        ),
        st.tuples(
            st.just("turn"),
            st.integers(1, 20),
            st.integers(1, 6),
            st.integers(0, 25),
            st.integers(0, 1),
            st.sampled_from(list(CACHES)),
        ),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("preempt"), st.integers(0, 3)),
        st.tuples(st.just("reclaim"), st.integers(0, 1)),
        st.tuples(st.just("lose"), st.integers(0, 9)),
        st.tuples(st.just("back"), st.integers(0, 1)),
        st.tuples(st.just("release"), st.integers(0, 1)),
    ),
    max_size=14,
)


class Schedule:
    """Runs commands on an engine, and knows what was asked of it."""

    def __init__(self, engine):
        self.engine = engine
        self.collector = Collector()
        self.asked = {}
        self.conversations = [(Lanes(), []), (Lanes(), [])]

    def do(self, command):
        engine, scheduler = self.engine, self.engine.scheduler
        match command:
            case ("add", length, tokens, n, cache):
                self.add(prompt(length, seed=len(self.asked)), tokens, cache, n=n)
            case ("turn", length, tokens, dropped, which, cache):
                lanes, history = self.conversations[which]
                if not lanes.busy:
                    del history[max(0, len(history) - dropped) :]
                    history += prompt(length, seed=len(self.asked))
                    self.add(history, tokens, cache, lanes=lanes)
            case ("step", count):
                for _ in range(count):
                    self.collector.take(engine.step())
            case ("abort", which) if self.asked:
                engine.abort(which % len(self.asked))
            case ("preempt", which) if scheduler.running:
                scheduler._preempt(scheduler.running[which % len(scheduler.running)], {})
            case ("reclaim", which) if self.conversations[which][0] in scheduler.idle:
                scheduler._reclaim(self.conversations[which][0])
            case ("lose", which) if engine.storage._own:
                handles = sorted(engine.storage._own, key=lambda handle: handle.number)
                engine.storage.tiers.drop(handles[which % len(handles)])
            case ("back", which) if not self.conversations[which][0].busy:
                engine.bring_back(self.conversations[which][0])
            case ("release", which) if not self.conversations[which][0].busy:
                engine.release(self.conversations[which][0])

    def add(self, ids, tokens, cache, n=1, **options):
        for request in self.engine.add(ids, greedy(tokens, n=n), cache=CACHES[cache], **options):
            self.asked[request] = (list(ids), tokens, CACHES[cache], options)


def check_waiting(engine):
    """Whoever waits with something below the pool has its spans, and nobody else has any."""
    scheduler = engine.scheduler
    held = [request.swapped for request in scheduler.waiting if request.swapped]
    held += [lanes.swapped for lanes in scheduler.swap.demoted]
    handles = [handle for swapped in held for handle in swapped.handles]
    assert len(handles) == len(set(handles)) and set(handles) == engine.storage._own
    assert all(r.swapped is None for r in scheduler.running)
    assert all(r.state is State.WAITING for r in scheduler.waiting)


@given(
    commands,
    st.integers(6, 40),
    st.sampled_from([3, 8, 64]),
    st.integers(1, 4),
    st.sampled_from([1, 8, 24, 400]),
    st.sampled_from([0, 12, 400]),
)
@settings(max_examples=150)
def test_random_schedules_with_small_tiers_end_with_no_page_and_no_span(
    schedule, pool, chunk, max_seqs, warm, cold
):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kv.cold"
        tiers = TierConfig(
            hot=hot_bytes(pool * 2), warm=warm * SPAN, cold=f"{path}:{cold * SPAN}" if cold else None
        )
        engine = tiny_engine(
            SMALL, tiers=tiers, prefill_chunk=chunk, max_batch_tokens=max(chunk, max_seqs), max_seqs=max_seqs
        )
        run = Schedule(engine)
        for command in schedule:
            run.do(command)
            check_waiting(engine)
        drain(engine, run.collector)
        assert set(run.collector.finished) == set(run.asked)
        for request, (ids, tokens, cache, options) in run.asked.items():
            event = run.collector.finished[request]
            assert event.reason != "error" or "pool" in event.message, event.message
            if event.reason == "length" and "lanes" not in options:
                # In a pool of that size: it may be what bounds a budget in bytes.
                alone = tiny_engine(SMALL, tiers=TierConfig(hot=tiers.hot), prefill_chunk=chunk)
                (other,) = alone.add(ids, greedy(tokens), cache=cache)
                assert drain(alone).tokens[other] == run.collector.tokens[request]
        assert nothing_left(engine, [lanes for lanes, _ in run.conversations])
