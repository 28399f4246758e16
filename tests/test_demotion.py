"""Demotion: what a policy drops or merges is kept below the pool, and chosen from again at the next turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from demoting import KINDS, WARM, Talk, demoting
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import LANES, keep
from tiny import drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.config import TierConfig
from minikv.scheduler.request import Lanes


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def full_rows(engine, lanes):
    """Keys, values and positions of all entries, lane after lane."""
    store = engine.store
    slots, valid = store.slots(lanes.seq)
    return store.pool.stored(slots[valid])


@pytest.mark.parametrize("policy", KINDS)
def test_a_turn_begins_with_everything_that_was_computed_before_it(decoder, policy):
    engine = tiny_engine(decoder, tiers=WARM)
    talk = Talk(engine, demoting(policy))
    talk.ask(1)
    held = engine.store.lengths[talk.lanes.seq].copy()
    assert held.sum() <= (14 + 6) * LANES
    below = talk.lanes.course.below
    assert below is not None and below.end == 23
    seen = []
    put_back = engine.scheduler.starting._put_back

    def spy(request, num_tokens):
        done = put_back(request, num_tokens)
        seen.append(engine.store.lengths[request.seq].copy())
        assert not engine.store.num_merged(request.seq) and not engine.store.has_mass[request.seq]
        return done

    engine.scheduler.starting._put_back = spy
    talk.ask(2)
    assert [lengths.tolist() for lengths in seen] == [torch.full((2, 2), 29).tolist()]
    assert engine.store.lengths[talk.lanes.seq].sum() <= (14 + 6) * LANES


def test_what_is_put_back_is_bit_for_bit_what_was_computed(decoder):
    whole, engine = tiny_engine(decoder), tiny_engine(decoder, tiers=WARM)
    lanes = Lanes()
    whole.add(prompt(40), greedy(1), lanes=lanes)
    drain(whole)
    expected = full_rows(whole, lanes)
    talk = Talk(engine, demoting("gracekv"))
    talk.ask(0, size=40, answer=1)
    below = talk.lanes.course.below
    seq = engine.store.open()
    assert below.fill(engine.store, seq, below.spans(40), 40)
    found = full_rows(engine, Lanes(seq=seq))
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    engine.store.close(seq)


@pytest.mark.parametrize("policy", KINDS)
@pytest.mark.parametrize("options", [{}, {"decode_slack": 3}], ids=str)
def test_the_second_answer_depends_on_how_little_is_kept_only_through_its_own_selection(
    decoder, policy, options
):
    """With room for all of the first turn, or for little of it, the second turn sees the same prompt."""
    said = []
    for budget in (14, 10_000):
        talk = Talk(tiny_engine(decoder, tiers=WARM), demoting(policy, budget, **options))
        talk.ask(1, answer=1)
        # Its question and all that was put back fit into the window and the budget.
        _, request = talk.ask(2, size=9, answer=1, cache=demoting(policy, 10_000, **options))
        assert request.num_reused == 24 - 1
        said.append(talk.history)
    assert said[0][-1] == said[1][-1]


@pytest.mark.parametrize("policy", KINDS)
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"decode_slack": 3}], ids=str)
def test_a_preempted_turn_says_the_same(decoder, policy, steps, options):
    def answers(steps):
        engine = tiny_engine(decoder, tiers=WARM, prefill_chunk=8)
        talk = Talk(engine, demoting(policy, **options))
        return [talk.ask(seed, steps=steps)[0] for seed in (1, 2, 3)]

    assert answers(steps) == answers(None)


@pytest.mark.parametrize("policy", KINDS)
def test_a_reclaimed_conversation_computes_nothing_of_its_past_again(decoder, policy):
    def answers(reclaimed):
        engine = tiny_engine(decoder, tiers=WARM)
        talk = Talk(engine, demoting(policy))
        said = [talk.ask(1)[0]]
        if reclaimed:
            engine.scheduler._reclaim(talk.lanes)
            assert engine.store.pool.num_free == engine.store.pool.num_pages
        answer, request = talk.ask(2)
        assert request.num_reused == 23 + 7 - 1
        return [*said, answer]

    assert answers(True) == answers(False)


@pytest.mark.parametrize("policy", KINDS)
def test_a_question_put_in_the_place_of_another_is_answered_as_if_that_had_never_been(decoder, policy):
    def answer(*seeds):
        talk = Talk(tiny_engine(decoder, tiers=WARM), demoting(policy))
        talk.ask(1)
        past = list(talk.history)
        for seed in seeds:
            talk.history = list(past)
            said, request = talk.ask(seed)
        return said, request.num_reused

    assert answer(2, 3) == answer(3)


@pytest.mark.parametrize("policy", ["snapkv", "expected", "gracekv"])
def test_without_room_below_a_conversation_goes_on_as_if_it_dropped(decoder, policy, caplog):
    engine = tiny_engine(decoder, tiers=TierConfig(warm="1KiB"))
    talk, plain = Talk(engine, demoting(policy)), Talk(tiny_engine(decoder), keep(policy, 14))
    assert [talk.ask(s)[0] for s in (1, 2, 3)] == [plain.ask(s)[0] for s in (1, 2, 3)]
    (said,) = [record.message for record in caplog.records if "was demoted" in record.message]
    assert said == (
        "What was demoted of the conversation of request 0 is given up: the warm and cold tiers have no room "
        "for it; raise --kv-warm or --kv-cold."
    )
    assert engine.storage.tiers.nbytes == 0


@pytest.mark.parametrize("damage", ["drop", "flip"])
def test_a_conversation_whose_spans_are_lost_goes_on_with_what_it_has(decoder, damage, tmp_path):
    path = tmp_path / "kv.cold"
    engine = tiny_engine(decoder, tiers=TierConfig(cold=f"{path}:8MiB"))
    talk = Talk(engine, demoting())
    talk.ask(1)
    if damage == "drop":
        engine.storage.tiers.drop(talk.lanes.course.below._parts[0].handles[0])
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    said, request = talk.ask(2)
    assert len(said) == 7 and request.num_reused == 29
    assert talk.lanes.course.below.lost
    talk.ask(3)


def test_everything_that_was_demoted_is_forgotten_with_the_conversation(decoder):
    engine = tiny_engine(decoder, tiers=WARM)
    talk = Talk(engine, demoting())
    talk.ask(1)
    talk.ask(2)
    assert engine.storage.tiers.nbytes > 0
    engine.release(talk.lanes)
    assert engine.storage.tiers.nbytes == 0


def test_a_pool_that_cannot_hold_everything_goes_on_with_what_is_there(decoder):
    small = TierConfig(hot=hot_bytes(14 * LANES), warm="64MiB")
    talk = Talk(tiny_engine(decoder, tiers=small), demoting(budget=12))
    requests = [talk.ask(seed)[1] for seed in (1, 2, 3, 4)]
    assert talk.engine.scheduler.num_restored == 1  # 60 tokens would not fit beside what they need
    assert [r.num_reused for r in requests] == [0, 29, 59, 89]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 6), st.sampled_from(["say", "again", "reclaim"])),
        max_size=8,
    ),
    st.sampled_from(KINDS),
    st.sampled_from([None, "40KiB", "64MiB"]),
)
def test_random_conversations_end_with_nothing_left_below(moves, policy, warm):
    engine = tiny_engine(tiers=replace(WARM, warm=warm or "4KiB"))
    talks = [Talk(engine, demoting(policy)) for _ in range(3)]
    for who, steps, what in moves:
        talk = talks[who]
        talk.disturb(what)
        said, _ = talk.ask(who + steps, size=9, answer=3, steps=steps or None)
        assert len(said) == 3
    for talk in talks:
        engine.release(talk.lanes)
    assert engine.storage.tiers.nbytes == 0
    assert engine.store.pool.num_free == engine.store.pool.num_pages
