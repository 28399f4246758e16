"""One contract for every tier and every form, and the ways in which tiers elsewhere corrupted what they held
(T1 to T8), as far as they concern storage."""

from __future__ import annotations

import threading

import pytest
from tiering import EXACT, KV_DTYPES, MODEL, ROPE, entries, same, span

from minikv.cache.tiers.cold import ColdTier
from minikv.cache.tiers.cold_file import FRAME_BYTES
from minikv.cache.tiers.encode import Encoder
from minikv.cache.tiers.span import FORMS, owner_key
from minikv.cache.tiers.tiers import Tiers
from minikv.cache.tiers.warm import WarmTier
from minikv.config import TierConfig
from minikv.errors import ConfigError

KINDS = ("warm", "cold", "both", "background", "only cold")
SIZE = span().nbytes


@pytest.fixture
def make(tmp_path):
    """Makes a tier of a kind with room for about `spans` spans, and closes it in the end."""
    made = []

    def tier(kind, spans=6, size=SIZE):
        room, path = spans * size, tmp_path / f"{len(made)}.cold"
        if kind == "warm":
            made.append(WarmTier(room))
        elif kind == "cold":
            made.append(ColdTier(path, room))
        elif kind == "only cold":
            made.append(Tiers(None, ColdTier(path, room)))
        else:
            made.append(Tiers(WarmTier(room // 2), ColdTier(path, room), background=kind == "background"))
        return made[-1]

    yield tier
    for tier in made:
        tier.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_every_tier_gives_back_every_byte_of_every_form(make, kind, form, dtype):
    encoder = EXACT if form == "exact" else Encoder(MODEL, ROPE, 0.1, (form,))
    spans = [
        span(str(n), n, encoder, lengths=(150, 80), dtype=dtype, rank=3, merged=n % 2 == 0) for n in range(4)
    ]
    raw = span(lengths=(150, 80), dtype=dtype).nbytes
    tier = make(kind, 12, raw)
    handles = [tier.write(one) for one in spans]
    tier.check()
    assert len(set(handles)) == 4
    for one, handle in [*zip(spans, handles, strict=True)] * 2:
        assert handle.owner == one.owner and handle.nbytes == one.nbytes <= raw
        found = tier.read(handle)
        assert found == one and found.to_bytes() == one.to_bytes()
        rows = encoder.decode(found)
        if form == "exact":
            assert same(rows, encoder.decode(one))
        assert found.header.error <= (0 if form == "exact" else 0.1)
    assert sum(one.nbytes for one in spans) <= tier.nbytes <= tier.limit
    tier.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_span_is_gone_and_the_others_stay(make, kind):
    tier = make(kind)
    spans = [span(str(n), n) for n in range(4)]
    handles = [tier.write(one) for one in spans]
    tier.drop(handles[1])
    tier.drop(handles[1])  # forgotten already
    tier.check()
    assert [tier.read(handle) for handle in handles] == [spans[0], None, spans[2], spans[3]]
    for handle in handles:
        tier.drop(handle)
    tier.check()
    assert all(tier.read(handle) is None for handle in handles)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ceiling_holds_at_every_step_and_what_does_not_fit_is_refused(make, kind):
    tier = make(kind)
    held = {}
    for n in range(40):
        one = span(str(n), n, lengths=(1 + n % 7, 3))
        handle = tier.write(one)
        assert tier.nbytes <= tier.limit
        if handle is not None:
            held[handle] = one
        if n % 3 == 2 and held:
            tier.drop(gone := next(iter(held)))
            del held[gone]
        tier.check()
    assert 0 < len(held) < 27
    assert all(tier.read(handle) == one for handle, one in held.items())
    huge = span(lengths=(1000,))
    assert tier.write(huge) is None
    assert all(tier.read(handle) == one for handle, one in held.items())
    assert tier.nbytes <= tier.limit


@pytest.mark.parametrize("kind", KINDS)
def test_a_pinned_span_stays_until_it_is_unpinned_as_often(make, kind):
    tier = make(kind)
    one = span("pinned")
    handle = tier.write(one)
    tier.pin(handle)
    tier.pin(handle)
    for n in range(12):
        tier.write(span(str(n)))
    assert tier.read(handle) == one
    with pytest.raises(AssertionError, match="pinned"):
        tier.drop(handle)
    tier.unpin(handle)
    with pytest.raises(AssertionError, match="pinned"):
        tier.drop(handle)
    tier.unpin(handle)
    tier.check()
    tier.drop(handle)
    assert tier.read(handle) is None


# Warm alone


def test_warm_evicts_clean_spans_the_least_recently_used_first():
    warm = WarmTier(3 * SIZE)
    spans = [span(str(n)) for n in range(5)]
    first, second, third = (warm.write(one, clean=True) for one in spans[:3])
    warm.read(first)
    warm.pin(second)
    fourth = warm.write(spans[3])  # not clean
    assert warm.evicted == [third]
    assert warm.write(spans[4]) is not None
    assert warm.evicted == [third, first]
    assert warm.write(spans[2]) is None  # one is pinned and the others are nowhere else
    assert warm.read(second) == spans[1] and warm.read(fourth) == spans[3]
    warm.check()


# Both tiers


def slowed(cold):
    """Makes writes to a cold tier wait for an event, and says when one has begun."""
    go, begun, append = threading.Event(), threading.Event(), cold._file.append

    def late(data, live=True):
        begun.set()
        assert go.wait(10)
        return append(data, live)

    cold._file.append = late
    return go, begun


def test_what_warm_has_no_room_for_goes_to_cold_and_comes_back(make):
    tier = make("both", spans=10)  # half of it warm
    spans = [span(str(n), n) for n in range(8)]
    handles = [tier.write(one) for one in spans]
    tier.check()
    assert tier.counters.demotions >= 3 and tier.warm.nbytes <= 5 * SIZE
    assert [tier.read(handle) for handle in handles] == spans
    report = tier.report()
    assert report["cold_hits"] == report["promotions"] > 0
    assert report["promoted_bytes"] == report["promotions"] * SIZE
    assert report["demoted_bytes"] == report["demotions"] * SIZE
    assert report["warm_hits"] + report["cold_hits"] == 8 and report["misses"] == 0
    assert report["warm_bytes"] + report["cold_bytes"] == tier.nbytes


def test_t1_a_span_holds_what_was_there_when_it_was_made():
    rows = entries()
    made = span()
    for tensor in rows.rows:
        if tensor is not None:
            tensor.zero_()
    assert same(EXACT.decode(made), entries())
    found = EXACT.decode(made)
    found.rows.keys.zero_()
    assert same(EXACT.decode(made), entries())


def test_t2_what_is_being_saved_stays_in_memory_until_the_file_has_it(tmp_path):
    cold = ColdTier(tmp_path / "cold", 40 * SIZE)
    tier = Tiers(WarmTier(4 * SIZE), cold, background=True)
    go, begun = slowed(cold)
    spans = [span(str(n), n) for n in range(4)]
    handles = [tier.write(one) for one in spans]
    assert begun.wait(10)
    # Its room goes to nobody else while the copy is in flight, and readers get the copy in memory.
    assert not tier.warm.make_room(SIZE)
    assert [tier.read(handle) for handle in handles] == spans
    go.set()
    handles.append(tier.write(span("4", 4)))
    assert [tier.read(handle) for handle in handles] == [*spans, span("4", 4)]
    tier.check()
    tier.close()


def test_t2_a_span_dropped_while_it_is_saved_leaves_nothing_behind(tmp_path):
    cold = ColdTier(tmp_path / "cold", 40 * SIZE)
    tier = Tiers(WarmTier(2 * SIZE), cold, background=True)
    go, begun = slowed(cold)
    handles = [tier.write(span(str(n), n)) for n in range(2)]
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    for handle in handles:
        tier.drop(handle)
    tier.check()
    assert len(tier.warm) == len(cold) == 0 and tier.warm.nbytes == 0
    tier.close()


def test_t3_room_for_what_is_being_read_is_reserved_until_it_is_there(tmp_path):
    cold = ColdTier(tmp_path / "cold", 40 * SIZE)
    tier = Tiers(WarmTier(2 * SIZE), cold, background=True)
    spans = [span(str(n), n) for n in range(6)]
    handles = [tier.write(one) for one in spans]
    assert tier.flush()
    tier.fetch(handles[0])
    tier.fetch(handles[1])
    assert tier.warm.nbytes == 2 * SIZE
    tier.fetch(handles[2])  # no room: it is read when it is asked for
    late = tier.write(span("late"))  # and a write finds none either, but in cold
    assert tier.warm.nbytes <= tier.warm.limit
    assert [tier.read(handle) for handle in handles] == spans
    assert tier.read(late) == span("late")
    tier.fetch(handles[0])
    tier.drop(handles[0])
    tier.release(handles[1])
    tier.check()
    assert tier.read(handles[0]) is None
    tier.close()


def test_t5_a_handle_never_gives_another_owners_rows(tmp_path):
    cold = ColdTier(tmp_path / "cold", 40 * SIZE)
    handles = [cold.write(span(str(n), seed=n)) for n in range(3)]
    data = (tmp_path / "cold").read_bytes()
    size = FRAME_BYTES + SIZE
    # One whole, valid record in the place of another: only what was written there will do.
    with (tmp_path / "cold").open("r+b") as file:
        file.seek(len(data) - 2 * size)
        file.write(data[-size:])
    assert cold.read(handles[0]) == span("0", seed=0)
    assert cold.read(handles[1]) is None
    assert cold.read(handles[2]) == span("2", seed=2)
    assert cold.counters.damaged == 1
    cold.check()
    cold.close()


def test_t5_only_spans_of_the_same_key_and_fingerprint_are_found(make):
    tier = make("both", 20)
    other = Encoder(b"other".ljust(32), ROPE)
    mine = [tier.write(span("mine", layer)) for layer in range(3)]
    for n in range(8):
        tier.write(span("mine", n, encoder=other))
        tier.write(span("theirs", n))
    assert sorted(tier.find(owner_key("mine"), MODEL), key=lambda h: h.owner.layer) == mine
    assert tier.find(owner_key("nobody"), MODEL) == []


@pytest.mark.parametrize("background", [False, True])
def test_t6_a_span_leaves_memory_only_when_the_file_has_it(tmp_path, background):
    cold = ColdTier(tmp_path / "cold", 40 * SIZE)
    tier = Tiers(WarmTier(3 * SIZE), cold, background)
    cold._file.append = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    spans = [span(str(n), n) for n in range(6)]
    handles = [tier.write(one) for one in spans]
    tier.check()
    # Nowhere to go: refused, and what was there is there.
    assert [handle is not None for handle in handles] == [True] * 3 + [False] * 3
    assert [tier.read(handle) for handle in handles[:3]] == spans[:3]
    assert tier.counters.refused == 3 and cold.counters.faults > 0
    assert not tier.flush()
    del cold._file.append
    tier.drop(handles[0])
    assert tier.write(spans[3]) is not None and tier.write(spans[4]) is not None
    assert [tier.read(handle) for handle in handles[1:3]] == spans[1:3]
    tier.check()
    tier.close()


def test_t8_writes_end_when_nothing_can_move(make):
    tier = make("background", spans=8)
    handles = []
    while (handle := tier.write(span(str(len(handles))))) is not None:
        tier.pin(handle)
        handles.append(handle)
        assert len(handles) < 20
    assert tier.write(span("more")) is None
    assert all(tier.read(handle) is not None for handle in handles)
    tier.check()


def test_both_ways_of_writing_leave_the_same(tmp_path):
    found = []
    for background in (False, True):
        cold = ColdTier(tmp_path / str(background), 12 * SIZE)
        tier = Tiers(WarmTier(3 * SIZE), cold, background)
        handles = [tier.write(span(str(n), n, lengths=(n % 5 + 1, 2))) for n in range(20)]
        for handle in handles[::4]:
            if handle is not None:
                tier.drop(handle)
        read = [None if handle is None else tier.read(handle) for handle in handles]
        tier.check()
        tier.flush()
        found.append((read, tier.cold.nbytes, sorted(h.owner.layer for h in cold._records)))
        tier.close()
    assert found[0][0] == found[1][0]
    assert found[0][2] == found[1][2]


# What has no owner


def test_a_released_span_is_found_again_as_long_as_nothing_needs_its_room(make):
    tier = make("both", spans=10)
    doc = [tier.write(span("document", layer)) for layer in range(3)]
    assert tier.flush()
    for handle in doc:
        tier.release(handle)
    tier.check()
    again = tier.find(owner_key("document"), MODEL)
    assert [tier.read(handle) for handle in again] == [span("document", layer) for layer in range(3)]
    assert tier.find(owner_key("document"), MODEL) == again  # a second owner
    for handle in again:
        tier.release(handle)
        assert tier.read(handle) is not None
        tier.release(handle)
    tier.check()
    kept = [tier.write(span(str(n), n)) for n in range(30)]
    tier.check()
    assert tier.cold.counters.outdated > 0
    assert len(tier.find(owner_key("document"), MODEL)) < 3
    assert all(tier.read(handle) is not None for handle in kept if handle is not None)
    tier.check()


@pytest.mark.parametrize("background", [False, True])
def test_a_span_released_before_it_is_saved_has_no_owner_in_the_file(tmp_path, background):
    cold = ColdTier(tmp_path / "cold", 9 * SIZE)
    tier = Tiers(WarmTier(4 * SIZE), cold, background)
    for n in range(4):
        tier.release(tier.write(span(str(n))))
    tier.flush()
    for n in range(4, 11):
        assert tier.write(span(str(n))) is not None
    tier.check()
    assert cold.counters.outdated > 0
    tier.close()


def test_a_released_span_of_memory_alone_goes_when_its_room_is_needed():
    tier = Tiers(WarmTier(3 * SIZE))
    handles = [tier.write(span(str(n))) for n in range(3)]
    assert tier.write(span("3")) is None
    tier.release(handles[0])
    assert tier.find(owner_key("0"), MODEL) == [handles[0]]
    tier.release(handles[0])
    assert tier.write(span("3")) is not None
    assert tier.find(owner_key("0"), MODEL) == [] and tier.read(handles[0]) is None
    assert tier.read(handles[1]) == span("1")
    tier.check()
    tier.close()


# Configuration


def test_ceilings_and_the_path_are_read_from_sizes():
    tiers = TierConfig(warm="1MiB", cold="a:b/kv.cold:2GiB")
    assert tiers.warm_bytes == 1 << 20 and tiers.cold_file == ("a:b/kv.cold", 2 << 30)
    assert TierConfig().warm_bytes is None and TierConfig().cold_file is None


def test_tiers_are_made_as_configured(tmp_path):
    assert Tiers.of(TierConfig(hot="1MiB")) is None
    warm = Tiers.of(TierConfig(warm=3 * SIZE))
    assert warm.cold is None and warm.limit == 3 * SIZE
    both = Tiers.of(TierConfig(warm="1MiB", cold=f"{tmp_path}/a:b:2MiB"))
    handle = both.write(span())
    assert both.flush() and both.read(handle) == span() and (tmp_path / "a:b").exists()
    assert both.limit == 3 << 20
    with pytest.raises(ConfigError, match="Another process"):
        Tiers.of(TierConfig(cold=f"{tmp_path}/a:b:2MiB"))
    both.close()


@pytest.mark.parametrize("cold", ["kv.cold", ":1GiB", "kv.cold:", "kv.cold:much", 5, "", "a\0b:1GiB"])
def test_a_cold_tier_without_path_or_size_is_refused(cold):
    with pytest.raises(ConfigError, match="kv_cold"):
        TierConfig(cold=cold)


def test_a_warm_tier_of_no_size_is_refused():
    with pytest.raises(ConfigError, match="kv_warm"):
        TierConfig(warm=0)


@pytest.mark.parametrize("options", [{"warm": "2"}, {"warm": 999}, {"cold": "kv.cold:2"}])
def test_a_tier_too_small_for_anything_is_refused_and_lacks_a_unit(options):
    with pytest.raises(ConfigError, match=r"must be at least 1 kB, not .*; give a unit"):
        TierConfig(**options)
