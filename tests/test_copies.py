"""Copies beside the computation, on a stream that is late: nothing is read before it is there."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from demoting import Talk, demoting
from hypothesis import given
from hypothesis import strategies as st
from keeping import LANES, PROMPTS, keep, run
from late_stream import LateEvent, LateStream, bytes_of, exercise, numbers
from swapping import make_tiers, nothing_left, preempted_often
from tiny import drain, greedy, hot_bytes, tiny_decoder, tiny_engine

from minikv.cache import copies as module
from minikv.cache.copies import Copies, Ring, copies_for
from minikv.cache.entries import Places
from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool
from minikv.cache.tiers.encode import Encoder
from minikv.cache.tiers.late import LateSpan, span_of
from minikv.cache.tiers.span import Owner, Span
from minikv.cache.tiers.tiers import Tiers
from minikv.config import TierConfig

OWNER = Owner(b"k" * 16, 0)
MODEL = b"m" * 32


# The ring


@given(st.lists(st.one_of(st.integers(1, 700), st.floats(0, 1)), max_size=80))
def test_places_that_are_in_use_never_overlap(orders):
    ring, held = Ring(1024), []
    for order in orders:
        if isinstance(order, int):
            place = ring.take(order)
            if place is not None:
                assert place.start >= 0 and place.start + order <= place.stop <= ring.size
                assert all(place.stop <= other.start or other.stop <= place.start for other in held)
                held.append(place)
        elif held:
            ring.give_back(held.pop(int(order * (len(held) - 1))))
        assert ring.in_use == len(held)
    for place in held:
        ring.give_back(place)
    assert ring.take(1024) is not None


def test_a_ring_goes_round_and_is_full_in_between():
    ring = Ring(256)
    first, second = ring.take(128), ring.take(64)
    assert ring.take(128) is None  # 64 are left at the end
    ring.give_back(second)
    assert ring.take(128) is None  # the one before it is in use
    ring.give_back(first)
    assert [ring.take(n).start for n in (128, 64, 64)] == [0, 128, 192]
    assert ring.take(1) is None
    assert Ring(256).take(257) is None


def test_a_place_at_the_front_is_taken_while_the_end_is_in_use():
    ring = Ring(256)
    first, end = ring.take(128), ring.take(128)
    ring.give_back(first)
    assert ring.take(64).start == 0
    assert (ring.take(64).start, ring.take(64)) == (64, None)
    ring.give_back(end)


# Copies


@pytest.mark.parametrize("seed", range(8))
def test_everything_arrives_as_it_was_when_it_was_sent(seed):
    stream = LateStream(seed)
    copies = Copies(stream, 1 << 20)
    assert exercise(copies) == copies.num_refused == 0
    assert stream.num_ended == copies.num_begun == 60


@pytest.mark.parametrize("seed", range(8))
def test_a_ring_that_is_short_refuses_and_never_spoils(seed):
    copies = Copies(LateStream(seed), 384)
    refused = exercise(copies, 200)
    assert 0 < refused == copies.num_refused < 200
    assert copies.num_begun == 200 - refused


class NoWait(LateEvent):
    """Faulty: the host does not wait."""

    def wait(self):
        pass


class NoHold(LateEvent):
    """Faulty: what computes does not wait."""

    def hold_compute(self):
        pass


class TooEarly(LateEvent):
    """Faulty: says that it is done although it is not, as if nobody had asked."""

    def done(self):
        return True


class Forgetful(Copies):
    """Faulty: what a copy reads is not held."""

    def _leave(self, place, sources):
        arriving = super()._leave(place, sources)
        arriving.flight.held.clear()
        return arriving


@pytest.mark.parametrize("fault", [NoWait, NoHold, TooEarly, Forgetful])
def test_a_missing_wait_is_noticed(fault):
    """Of the tests here: each fault has to make them fail."""
    stream = LateStream(3)
    if fault is not Forgetful:
        stream.event = fault
    copies = (Forgetful if fault is Forgetful else Copies)(stream, 4096)
    with pytest.raises(AssertionError):
        exercise(copies, 200)


def test_what_nobody_takes_keeps_its_place_until_it_is_done():
    copies = Copies(LateStream(), 128)
    arriving = copies.leave(128, lambda: [numbers(32, 0)])
    event = arriving.flight.event
    event.polls = 3
    del arriving
    gc.collect()
    assert copies.come([numbers(32, 1)]) is None and not event.seen
    copies.sweep()
    assert copies.come([numbers(32, 1)]) is not None and event.seen


def test_what_has_arrived_leaves_the_ring_before_it_is_taken():
    copies = Copies(LateStream(), 128)
    arriving = copies.leave(128, lambda: [numbers(32, 0)])
    arriving.flight.event.polls = 0
    (came,) = copies.come([numbers(32, 1)])
    assert torch.equal(came, numbers(32, 1)) and torch.equal(arriving.take()[0], numbers(32, 0))


def test_a_copy_that_cannot_begin_leaves_no_place_behind(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    copies = Copies(LateStream(), 128)
    with pytest.raises(torch.OutOfMemoryError):
        copies.leave(128, fail)
    monkeypatch.setattr(copies._stream, "into", fail)
    with pytest.raises(torch.OutOfMemoryError):
        copies.come([numbers(32, 0)])
    assert copies._ring.in_use == copies.num_flying == 0


# Spans


def store_with(dtype: torch.dtype, transposed: bool = False, count: int = 37) -> tuple[LaneStore, int]:
    pool = PagePool(60, 8, 32, dtype, poison=True, keys_transposed=transposed)
    store = LaneStore(pool, 2, 2, 2, 128)
    seq = store.open()
    assert store.reserve(seq, count)
    slots = torch.from_numpy(store.next_slots(seq, count))
    pool.write_rows(slots, *torch.randn(2, *slots.shape, 32, generator=torch.Generator().manual_seed(0)))
    pool.write_entries(slots, torch.arange(count))
    store.append(seq, count)
    return store, seq


def places_of(store: LaneStore, seq: int, merged: bool = False) -> Places:
    length = int(store.lengths[seq, 1].max())
    places = store.places(seq, 1, torch.ones(2, length, dtype=torch.bool))
    if merged:
        places.counts[::3] = 2
    return places


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_a_late_span_is_byte_for_byte_the_one_that_was_waited_for(dtype, transposed, merged):
    store, seq = store_with(dtype, transposed)
    places = places_of(store, seq, merged)
    expected = span_of(store, seq, places, Encoder(MODEL), OWNER, 40)
    assert type(expected) is Span
    store.pool.copies = Copies(LateStream(), 1 << 20)
    late = span_of(store, seq, places, Encoder(MODEL), OWNER, 40)
    assert isinstance(late, LateSpan)
    store.close(seq)  # which poisons the pages
    assert (late.nbytes, late.owner) == (expected.nbytes, expected.owner)
    assert store.pool.copies.num_flying == 1  # nobody has looked yet
    assert late.to_bytes() == expected.to_bytes()
    assert store.pool.copies.num_flying == 0
    late.verify()


def test_what_cannot_be_told_without_its_rows_is_waited_for():
    store, seq = store_with(torch.float32)
    store.pool.copies = Copies(LateStream(), 1 << 20)
    places = places_of(store, seq)
    assert type(span_of(store, seq, places, Encoder(MODEL, most_error=0.1), OWNER, 40)) is Span
    store.has_mass[seq] = True
    assert type(span_of(store, seq, places, Encoder(MODEL), OWNER, 40)) is Span
    assert store.pool.copies.num_begun == 0


def test_another_thread_may_be_the_first_to_look():
    store, seq = store_with(torch.float16)
    expected = span_of(store, seq, places_of(store, seq), Encoder(MODEL), OWNER, 40)
    store.pool.copies = Copies(LateStream(), 1 << 20)
    spans = [span_of(store, seq, places_of(store, seq), Encoder(MODEL), OWNER, 40) for _ in range(8)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda span: span.to_bytes(), spans * 3))
    assert set(found) == {expected.to_bytes()}


# The engine


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def with_copies(engine, seed=0, nbytes=1 << 20):
    """An engine with late copies. To check after a step is to wait for them: every other seed does not."""
    engine.config = replace(engine.config, debug_checks=seed % 2 == 0)
    engine.store.pool.copies = Copies(LateStream(seed), nbytes)
    return engine


CACHES = {
    "full": None,
    "snapkv": keep("snapkv", 16),
    "gracekv": keep("gracekv", 0.3),
    "slack": keep("adakv", 0.4, decode_slack=3),
}


@pytest.mark.parametrize("kind", ["warm", "both", "few"])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_preempted_request_says_what_it_would_have_said(decoder, tmp_path, cache, kind):
    expected, _ = run(tiny_engine(decoder, prefill_chunk=16), PROMPTS[0], cache)
    for seed, nbytes in ((0, 1 << 20), (1, 24 << 10)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        engine = tiny_engine(decoder, tiers=make_tiers(folder, kind), prefill_chunk=16)
        tokens, _ = preempted_often(with_copies(engine, seed, nbytes), PROMPTS[0], cache, greedy(12))
        assert tokens == expected
        assert engine.tier_stats["copies_beside"] > 4
        assert (engine.tier_stats["copies_refused"] > 0) == (nbytes < 1 << 20)
        assert nothing_left(engine)


def test_many_requests_in_a_small_pool_say_what_they_say_alone(decoder, tmp_path):
    expected = [run(tiny_engine(decoder), ids, params=greedy(40))[0] for ids in PROMPTS]
    tiers = make_tiers(tmp_path, "both", hot=hot_bytes(45 * LANES))
    engine = with_copies(tiny_engine(decoder, tiers=tiers, prefill_chunk=32), 5, 64 << 10)
    requests = [engine.add(ids, greedy(40))[0] for ids in PROMPTS]
    collector = drain(engine)
    assert [collector.tokens[request] for request in requests] == expected
    assert engine.scheduler.num_preemptions and engine.tier_stats["copies_beside"]
    assert nothing_left(engine)


def test_a_conversation_that_demotes_says_what_it_would_have_said(decoder):
    said = []
    for beside in (False, True):
        engine = tiny_engine(decoder, tiers=TierConfig(warm="8MiB"))
        talk = Talk(with_copies(engine, 1) if beside else engine, demoting("snapkv", 14))
        said.append([talk.ask(seed, steps=3)[0] for seed in range(4)])
    assert said[0] == said[1]
    assert engine.tier_stats["copies_beside"] > 8


@pytest.mark.parametrize("nbytes", [1 << 20, 24 << 10])
@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_that_is_staged_says_what_it_would_have_said(seed, nbytes):
    """What a chunk leaves is on its way while the next one is written to the same pages."""
    decoder, said = tiny_decoder(num_layers=6), []
    for beside in (False, True):
        engine = tiny_engine(decoder, tiers=TierConfig(hot=hot_bytes(180), warm="8MiB"), prefill_chunk=8)
        talk = Talk(with_copies(engine, seed, nbytes) if beside else engine, demoting("snapkv", 14))
        said.append([talk.ask(turn, size)[0] for turn, size in enumerate((61, 30))])
    assert said[0] == said[1]
    assert engine.tier_stats["prompts_staged"] == 2 and engine.tier_stats["copies_beside"] > 8


# Who has them


def test_the_ring_is_a_part_of_the_warm_tier(monkeypatch):
    monkeypatch.setattr(module, "CudaStream", lambda device: LateStream())
    copies = copies_for(torch.device("cuda"), 1 << 20)
    assert copies is not None and copies.nbytes == 1 << 18
    tiers = Tiers.of(TierConfig(warm="1MiB"), taken=copies.nbytes)
    assert tiers.limit + copies.nbytes == 1 << 20
    assert copies_for(torch.device("cuda"), 1 << 40).nbytes == 256 << 20


def test_the_cpu_and_an_engine_without_a_warm_tier_have_none(decoder):
    assert copies_for(torch.device("cpu"), 1 << 20) is None
    assert copies_for(torch.device("cuda"), None) is None
    assert tiny_engine(decoder, tiers=TierConfig(warm="1MiB")).store.pool.copies is None


def test_where_no_memory_can_be_pinned_copies_wait(monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("pin_memory failed")

    stream = LateStream()
    monkeypatch.setattr(stream, "pinned", refuse)
    monkeypatch.setattr(module, "CudaStream", lambda device: stream)
    assert copies_for(torch.device("cuda"), 1 << 30) is None
    assert "No host memory can be pinned" in caplog.text


def test_bytes_of_a_tensor_are_its_own():
    tensor = torch.zeros(3)
    bytes_of(tensor).fill_(0xFF)
    assert tensor.isnan().all()
