"""Sessions whose entries were demoted: the file holds them too."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_tools import write_tiny_model
from session_tools import PARAMS, begun, forge, keep, load, more

from minikv import CacheConfig, SamplingParams, SessionError, TierConfig
from minikv.cache.tiers.span import Span
from minikv.cache.tiers.storage import Storage
from minikv.cli.chat import take_line
from minikv.cli.chat_files import Keeper, loaded
from minikv.cli.chat_state import ChatState
from minikv.cli.interrupts import Interrupts
from minikv.cli.tier_lines import tier_lines
from minikv.config import format_size
from minikv.sessions.lanes import SavedLanes

TIERS = TierConfig(hot="4MiB", warm="16MiB")
CACHES = [keep(name, 24, evicted="demote") for name in ("snapkv", "expected", "gracekv")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.policy)
def test_a_loaded_session_chooses_again_among_all_that_was_demoted(model, tmp_path, cache):
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS) as other:
        session = begun(one, cache)
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        restored = other.engine.scheduler
        assert more(loaded) == more(session)
        assert restored.num_restored == 2
        loaded.close()
        assert other.engine.storage.tiers.nbytes == 0


def test_a_chat_says_what_its_tiers_hold_and_what_it_saves(model, tmp_path):
    with load(model, tiers=TIERS) as llm:
        session = begun(llm, CACHES[0])
        assert 0 < session.kv_bytes < session.demoted_bytes == llm.tier_stats["warm_bytes"]
        assert re.search(r"\([0-9.]+ KiB and [0-9.]+ KiB demoted\)", loaded(session, tmp_path))
        more(session)
        lines = tier_lines(llm)
        assert lines[0].startswith("warm tier: ") and len(lines) == 2
        assert "turns begun with all that was demoted" in lines[1]


def test_a_session_saved_while_its_lanes_were_given_up_computes_nothing_again(model, tmp_path):
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS) as other:
        session = begun(one, CACHES[0])
        one.engine.scheduler._reclaim(session._lanes)
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        assert more(loaded) == more(session)


def test_a_loaded_session_that_is_wholly_below_makes_way_and_is_freed_when_dropped(model, tmp_path):
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS) as other:
        session = begun(one, CACHES[0])
        one.engine.scheduler._reclaim(session._lanes)
        session.save(tmp_path / "s")
        again = other.load_session(tmp_path / "s")
        assert again.kv_bytes == 0 < again.demoted_bytes
        assert other.engine.scheduler.swap.demoted == [again._lanes]
        del again
        other.generate("x", SamplingParams(max_tokens=1))
        assert other.engine.scheduler.swap.demoted == [] and other.engine.storage._own == set()


def test_without_room_for_what_was_demoted_nothing_is_loaded(model, tmp_path):
    with load(model, tiers=TIERS) as one:
        begun(one, CACHES[0]).save(tmp_path / "s")
    with load(model, tiers=TierConfig(hot="4MiB", warm="2KiB")) as other:
        with pytest.raises(SessionError, match="no room; raise --kv-warm"):
            other.load_session(tmp_path / "s")
        assert other.kv_bytes_in_use == 0 and other.engine.storage.tiers.nbytes == 0
    with load(model) as other, pytest.raises(SessionError, match="needs a tier below the pool"):
        other.load_session(tmp_path / "s")


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"weights": "q8"}], ids=["backend", "weights"])
def test_a_demoted_session_goes_on_with_other_kernels_and_weights(model, tmp_path, options):
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS, **options) as other:
        session = begun(one, CACHES[0])
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        known = session.num_tokens
        assert more(loaded)[0][1] == known
        assert other.engine.scheduler.num_restored == 2
        loaded.save(tmp_path / "t")
        assert one.load_session(tmp_path / "t").num_tokens == loaded.num_tokens


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.policy)
def test_a_question_in_the_place_of_one_that_was_saved_is_answered_as_in_memory(model, tmp_path, cache):
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS) as other:
        session = begun(one, cache)
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        for turn, back in (("How old is it, then?", 2), ("And who lives there?", 4)):
            more(session)
            more(loaded)
            replies = []
            for talk in (session, loaded):
                talk.set_messages(talk.messages[:-back])
                reply = talk.send(turn, PARAMS)
                replies.append((reply.token_ids, reply.usage))
            assert replies[0] == replies[1]
        assert more(loaded) == more(session)


def test_a_loaded_session_goes_back_to_where_its_last_turn_began_as_in_memory(model, tmp_path):
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS) as other:
        session = begun(one, CACHES[0])
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        turns = [talk._lanes.course.turns for talk in (session, loaded)]
        restored = [[turn.restored for turn in course] for course in turns]
        assert restored[0] == restored[1] == [False, True]
        for own, saved in zip(*turns, strict=True):
            for kept, read in ((own.before, saved.before), (own.recorder, saved.recorder)):
                assert (kept is None) == (read is None)
                if kept is not None:
                    states = kept.state(), read.state()
                    assert states[0].keys() == states[1].keys()
                    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        replies = []
        for llm, talk in ((one, session), (other, loaded)):
            talk.set_messages(talk.messages[:3])
            before = llm.engine.scheduler.num_restored
            reply = talk.send("Something quite different, then: how old is it?", PARAMS)
            replies.append((reply.token_ids, reply.usage, llm.engine.scheduler.num_restored - before))
        assert replies[0] == replies[1] and replies[0][2] == 1


def test_a_session_that_says_nothing_of_what_was_put_back_is_loaded(model, demoted, tmp_path):
    path = Path(shutil.copy(demoted, tmp_path / "talk"))

    def older(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith("before.")]:
            del tensors[name]

    forge(path, lambda body: [turn.pop("restored") for turn in body["course"]["turns"]], older)
    with load(model, tiers=TIERS) as llm:
        assert llm.load_session(path).num_tokens


def test_a_demoted_session_of_another_kv_dtype_is_refused_by_that(model, tmp_path):
    with load(model, tiers=TIERS) as one:
        begun(one, CACHES[0]).save(tmp_path / "s")
    with load(model, tiers=TIERS, cache=CacheConfig(kv_dtype="float16")) as other:
        with pytest.raises(SessionError, match="KV entries of type float32"):
            other.load_session(tmp_path / "s")


def test_what_a_loaded_session_loses_is_said_of_its_file(model, demoted, caplog):
    with load(model, tiers=TIERS) as llm:
        session = llm.load_session(demoted)
        below = session._lanes.course.below
        llm.engine.storage.tiers.drop(below._parts[0].handles[0])
        more(session)
    (said,) = [record.message for record in caplog.records if "was demoted" in record.message]
    assert said == f"What was demoted of the session {demoted} is given up: it cannot be read any more."


def test_a_session_whose_spans_were_lost_demotes_what_is_left_and_can_be_saved_again(model, tmp_path):
    with load(model, tiers=TierConfig(hot="4MiB", warm="20KiB")) as one:
        session = begun(one, CACHES[2])
        assert session._lanes.course.below.lost
        session.save(tmp_path / "s")
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS) as other:
        session = one.load_session(tmp_path / "s")
        more(session)
        assert session.demoted_bytes
        session.save(tmp_path / "t")
        loaded = other.load_session(tmp_path / "t")
        assert more(loaded) == more(session)


@pytest.mark.parametrize("fails", [(SavedLanes, "fill"), (Storage, "keep")], ids=["lanes", "spans"])
def test_a_session_that_cannot_be_read_to_its_end_leaves_nothing_in_the_tiers(
    model, tmp_path, monkeypatch, fails
):
    with load(model, tiers=TIERS) as llm:
        session = begun(llm, CACHES[0])
        session.save(tmp_path / "s")
        session.close()
        where, name = fails
        real, calls = getattr(where, name), []

        def broken(self, *arguments):
            calls.append(name)
            if where is SavedLanes or len(calls) == 3:
                raise OSError(5, "Input/output error")
            return real(self, *arguments)

        monkeypatch.setattr(where, name, broken)
        with pytest.raises(SessionError, match="input/output error"):
            llm.load_session(tmp_path / "s")
        assert calls and llm.engine.storage.tiers.nbytes == llm.kv_bytes_in_use == 0
        monkeypatch.undo()
        llm.load_session(tmp_path / "s").close()


# A session of which nothing is in the pool


@pytest.fixture(params=["demotes", "swapped"])
def wholly_below(model, request):
    """A chat whose session has been reclaimed."""
    with load(model, tiers=TIERS) as llm:
        session = begun(llm, CACHES[0] if request.param == "demotes" else None)
        llm.engine.scheduler._reclaim(session._lanes)
        yield ChatState(llm, session, PARAMS, lambda _: "", Interrupts())


def test_a_session_wholly_below_the_pool_holds_its_tokens(wholly_below):
    session, known = wholly_below.session, len(wholly_below.session._lanes.token_ids)
    assert (session.num_tokens, session.kv_bytes) == (known, 0) and known > 100
    assert session.demoted_bytes == wholly_below.llm.tier_stats["warm_bytes"] > 0
    assert not session.kv_entries.any() and session.kv_map().shape[-1] == known
    assert more(session)[0][1] == known
    session.clear()
    assert (session.num_tokens, session.demoted_bytes) == (0, 0)


def test_kv_says_that_all_of_a_session_is_demoted(wholly_below, capsys):
    session = wholly_below.session
    for line in ("/kv", "/kv 1"):
        take_line(wholly_below, line)
        text = capsys.readouterr().err
        size = format_size(session.demoted_bytes)
        assert f"All {session.num_tokens} tokens are demoted: {size} in the tiers below the KV pool." in text
        assert "empty" not in text and "held for" not in text and "entries" not in text.split("Policy")[0]
    session.send("And now?", PARAMS)
    take_line(wholly_below, "/kv")
    text = capsys.readouterr().err
    assert "held for" in text and "All" not in text
    assert ("Demoted: " in text) == bool(session.demoted_bytes)


def test_a_session_wholly_below_is_saved_and_loaded_as_what_it_is(wholly_below, tmp_path, capsys):
    state, known = wholly_below, wholly_below.session.num_tokens
    state.session.save(tmp_path / "s")
    size = format_size(state.session.demoted_bytes or state.session.kv_bytes)
    expected = more(state.session)
    take_line(state, f"/load {tmp_path / 's'}")
    assert f"the KV cache of {known} tokens ({size}" in capsys.readouterr().err
    assert state.session.num_tokens == known
    assert more(state.session) == expected


def test_a_session_that_was_reclaimed_has_not_changed_for_its_file(wholly_below, tmp_path):
    state = wholly_below
    state.session_file = tmp_path / "s"
    state.session.send("And now?", PARAMS)
    keeper = Keeper(state)
    state.llm.engine.scheduler._reclaim(state.session._lanes)
    keeper.keep()
    assert not state.session_file.exists()
    state.session.send("And then?", PARAMS)
    keeper.keep()
    assert state.session_file.exists()


# Files that were made up, with checksums that fit


@pytest.fixture(scope="module")
def demoted(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sessions") / "demoted"
    with load(model, tiers=TIERS) as llm:
        begun(llm, CACHES[0]).save(path)
    return path


@pytest.fixture(scope="module")
def current(model):
    """An LLM with a session at hand."""
    with load(model, tiers=TIERS) as llm:
        yield llm, begun(llm, CACHES[0])


def spans_of(tensors: dict) -> list[Span]:
    data = bytes(tensors["below.data"].numpy())
    ends = tensors["below.sizes"].cumsum(0).tolist()
    return [Span.from_bytes(data[s:e]) for s, e in zip([0, *ends[:-1]], ends, strict=True)]


def span_change(change: Callable[[Span], Span], place: int = 0) -> Callable[[dict], None]:
    """A change of one of the spans of a file."""

    def apply(tensors: dict) -> None:
        spans = spans_of(tensors)
        spans[place] = change(spans[place])
        data = [span.to_bytes() for span in spans]
        tensors["below.sizes"] = torch.tensor([len(part) for part in data])
        tensors["below.data"] = torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8)

    return apply


def body(change: Callable[[bytes], bytes], place: int = 0) -> Callable[[dict], None]:
    return span_change(lambda span: Span.of(span.header, change(span.body)), place)


def says(**fields: object) -> Callable[[dict], None]:
    """Another header before the same body."""
    return span_change(lambda span: Span(replace(span.header, **fields), span.body))


def written(at: int, form: str, *numbers: float) -> Callable[[dict], None]:
    """Numbers written over the body of a span."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        struct.pack_into(form, changed, at % len(data), *numbers)
        return bytes(changed)

    return body(change)


def without_a_token(span: Span) -> Span:
    """Each lane one row shorter, as a whole record."""
    dim, lanes = span.header.head_dim, span.header.num_lanes
    count = span.header.num_rows // lanes
    numbers = torch.frombuffer(bytearray(span.body[4 * lanes :]), dtype=torch.float32)
    positions, keys, values = numbers.split([lanes * count, lanes * count * dim, lanes * count * dim])
    kept = [
        part.view(lanes, count, -1)[:, 1:].reshape(-1).numpy().tobytes() for part in (positions, keys, values)
    ]
    lengths = struct.pack(f"<{lanes}i", *[count - 1] * lanes)
    header = replace(span.header, num_rows=span.header.num_rows - lanes)
    return Span.of(header, lengths + b"".join(kept))


def with_counts(span: Span) -> Span:
    """Entries that stand for a token each, where that needs not be said."""
    at = 4 * (span.header.num_lanes + span.header.num_rows)
    ones = struct.pack("<i", 1) * span.header.num_rows
    return Span.of(replace(span.header, has_counts=True), span.body[:at] + ones + span.body[at:])


def lanes_without(tensors: dict) -> None:
    """The last token is gone from every lane, and has not been demoted."""
    lengths = tensors["lanes.lengths"]
    ends = lengths.reshape(-1).long().cumsum(0)
    stays = torch.ones(int(ends[-1]), dtype=torch.bool)
    stays[ends - 1] = False
    for name in [name for name in tensors if name.startswith("lanes.") and len(tensors[name]) == len(stays)]:
        tensors[name] = tensors[name][stays]
    tensors["lanes.lengths"] = lengths - 1


SPANS = {
    "a body of three bytes": body(lambda data: data[:3]),
    "a body cut short": body(lambda data: data[:-8]),
    "a body cut off in its lengths": body(lambda data: data[:4]),
    "a body with more behind it": body(lambda data: data + b"\0" * 8),
    "another number of rows": says(num_rows=7),
    "rows past all memory": says(num_rows=2**32 - 1),
    "a body of another kind": says(key_form="raw", value_form="raw"),
    "values of another kind": says(value_form="raw"),
    "factors that are none": says(key_form="lowrank"),
    "values of factors that are none": says(value_form="lowrank"),
    "small numbers that are none": says(value_form="int8"),
    "counts that are not there": says(has_counts=True),
    "counts where nothing was merged": span_change(with_counts),
    "masses that are not there": says(has_mass=True),
    "a merge where nothing was merged": says(merged_end=5),
    "another length": says(num_tokens=1),
    "an error that is no number": says(error=float("nan")),
    "another layer": span_change(
        lambda span: Span(replace(span.header, owner=replace(span.owner, layer=1)), span.body)
    ),
    "lanes of negative length": written(0, "<2i", -1, 10**6),
    "no rows": span_change(
        lambda span: Span.of(replace(span.header, num_rows=0), b"\0" * 4 * span.header.num_lanes)
    ),
    "a lane that took a row from another": span_change(
        lambda span: Span.of(
            span.header,
            struct.pack("<2i", *(span.header.num_rows // 2 + n for n in (1, -1))) + span.body[8:],
        )
    ),
    "a negative position": written(8, "<i", -1),
    "a position past the end": written(8, "<i", 4000),
    "a position twice": written(8, "<2i", 0, 0),
    "a key that is no number": written(-4, "<f", float("nan")),
    "an endless value": written(-4, "<f", float("inf")),
    "a token that is not there": span_change(without_a_token),
    "a token that is not there, of a later part": span_change(without_a_token, -1),
    "a token that was neither kept nor demoted": lanes_without,
    "a part too few": lambda t: t.update({"below.parts": t["below.parts"][:-1]}),
    "parts of no spans": lambda t: t["below.parts"][:, 1].zero_(),
    "parts past the end": lambda t: t["below.parts"][:, 0].add_(1000),
}


@pytest.mark.parametrize("change", SPANS.values(), ids=SPANS.keys())
def test_made_up_spans_are_refused(current, demoted, tmp_path, change):
    llm, session = current
    path = Path(shutil.copy(demoted, tmp_path / "talk"))
    forge(path, tensors=change)
    before = llm.kv_bytes_in_use, llm.engine.storage.tiers.nbytes, session.num_tokens, session.demoted_bytes
    with pytest.raises(SessionError) as caught:
        llm.load_session(path)
    after = llm.kv_bytes_in_use, llm.engine.storage.tiers.nbytes, session.num_tokens, session.demoted_bytes
    assert after == before and min(before) > 0
    sentence = str(caught.value)
    assert sentence.startswith(str(path)) and sentence.endswith(".") and "\n" not in sentence
    llm.engine.store.check()


def _renamed(old: str, new: str) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _restored(place: int, value: object) -> Callable[[dict], None]:
    return lambda content: content["course"]["turns"][place].update(restored=value)


NOTHING = {"body": lambda content: None, "tensors": lambda tensors: None}
BEFORE = {
    "records from before the first turn": {"tensors": _renamed("before.1.", "before.0.")},
    "records from before no turn": {"tensors": _renamed("before.1.", "before.7.")},
    "records from before no number": {"tensors": _renamed("before.1.", "before.x.")},
    "records of no name": {"tensors": _renamed("before.1.numbers", "before.1")},
    "records that nobody makes": {"tensors": _renamed("before.1.numbers", "before.1.colours")},
    "records without their numbers": {"tensors": lambda t: t.pop("before.1.numbers")},
    "records without their positions": {"tensors": lambda t: t.pop("before.1.window.positions")},
    "records of another shape": {
        "tensors": lambda t: t.update(
            {"before.1.window.queries": t["before.1.window.queries"][:, :1].clone()}
        )
    },
    "a first turn that something was put back for": {"body": _restored(0, True)},
    "a turn that nothing was put back for": {"body": _restored(1, False)},
    "a turn that was put back by half": {"body": _restored(1, 1)},
}


@pytest.mark.parametrize("changes", BEFORE.values(), ids=BEFORE.keys())
def test_made_up_records_from_before_a_turn_are_refused(current, demoted, tmp_path, changes):
    path = Path(shutil.copy(demoted, tmp_path / "talk"))
    forge(path, **(NOTHING | changes))
    with pytest.raises(SessionError, match=r"damaged|other attention heads"):
        current[0].load_session(path)
    current[0].engine.store.check()


def test_spans_that_were_written_again_as_they_were_are_taken(current, demoted, tmp_path):
    path = Path(shutil.copy(demoted, tmp_path / "talk"))
    forge(path, tensors=span_change(lambda span: Span.of(span.header, span.body)))
    current[0].load_session(path).close()


def test_a_loaded_session_zooms_in_on_what_was_kept_below(model, tmp_path):
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS) as other:
        session = begun(one, keep("sekv", 48))
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        assert more(loaded) == more(session)
        assert other.engine.zoomed.rows > 0
        loaded.close()
        assert other.engine.storage.tiers.nbytes == 0
