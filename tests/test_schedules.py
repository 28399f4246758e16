"""Random schedules of add, step and abort: every request ends once and every page comes home."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.config import TierConfig
from minikv.scheduler.request import Lanes

DECODER = tiny_decoder(num_layers=1)

commands = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 40), st.integers(1, 12), st.sampled_from([1, 1, 1, 2, 3])),
        st.tuples(st.just("turn"), st.integers(1, 20), st.integers(1, 6), st.integers(0, 1)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("release"), st.integers(0, 1)),
    ),
    max_size=20,
)


def run_schedule(schedule, pages, chunk, max_seqs):
    """Run commands on a tight pool; `step` checks the cache each time."""
    engine = tiny_engine(
        DECODER,
        tiers=TierConfig(hot=hot_bytes(pages * DECODER.config.num_kv_heads)),
        prefill_chunk=chunk,
        max_batch_tokens=max(chunk, max_seqs),
        max_seqs=max_seqs,
    )
    collector, added = Collector(), []
    conversations = [(Lanes(), []), (Lanes(), [])]
    for command in schedule:
        match command:
            case ("add", length, tokens, n):
                added += engine.add(prompt(length, seed=len(added)), greedy(tokens, n=n))
            case ("turn", length, tokens, which):
                lanes, history = conversations[which]
                if not lanes.busy:
                    history += prompt(length, seed=len(added))
                    added += engine.add(history, greedy(tokens), lanes=lanes)
            case ("step", count):
                for _ in range(count):
                    collector.take(engine.step())
            case ("abort", which) if added:
                engine.abort(added[which % len(added)])
            case ("release", which) if not conversations[which][0].busy:
                engine.release(conversations[which][0])
    drain(engine, collector)
    for lanes, _ in conversations:
        engine.release(lanes)
    engine.store.check()
    assert set(collector.finished) == set(added)
    assert engine.store.pool.bytes_in_use == 0
    assert engine.store.num_free_seqs == max_seqs
    return collector


arrangements = (st.integers(2, 14), st.sampled_from([1, 3, 8, 64]), st.integers(1, 5))


@given(commands, *arrangements)
@settings(max_examples=1000)
def test_random_schedules_end_with_all_pages_free(schedule, pages, chunk, max_seqs):
    run_schedule(schedule, pages, chunk, max_seqs)
