"""Files that cannot be loaded: one sentence each, and nothing has changed, whatever is in them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import struct
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from cli_tools import TEMPLATE, write_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from session_tools import PARAMS, begun, forge, keep, load, more

from minikv import LLM, CacheConfig, ConfigError, MinikvError, SessionError, TierConfig
from minikv.cli.transcript import save_transcript


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


@pytest.fixture(scope="module")
def one(model):
    with load(model) as llm:
        yield llm


@pytest.fixture(scope="module")
def merged(one, tmp_path_factory) -> Path:
    """A session with everything in it: merged entries, records of every kind, logits."""
    path = tmp_path_factory.mktemp("sessions") / "merged"
    session = begun(one, keep("gracekv", 40, decode_slack=3))
    session.save(path)
    session.close()
    return path


@pytest.fixture(scope="module")
def judged(one, tmp_path_factory) -> Path:
    """A session whose policy records moments of the queries."""
    path = tmp_path_factory.mktemp("sessions") / "judged"
    session = begun(one, keep("expected", 40))
    session.save(path)
    session.close()
    return path


@pytest.fixture
def file(merged, tmp_path) -> Path:
    return Path(shutil.copy(merged, tmp_path / "talk"))


def refusal(llm: LLM, path: object) -> str:
    """Why a file cannot be loaded: a sentence, and neither a page nor a sequence is gone."""
    before = llm.kv_bytes_in_use, llm.engine.store.num_free_seqs
    with pytest.raises(SessionError) as caught:
        llm.load_session(path)  # type: ignore[arg-type]
    llm.engine.store.check()
    assert (llm.kv_bytes_in_use, llm.engine.store.num_free_seqs) == before
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence and str(path)[:20] in sentence
    return sentence


def test_a_bit_flipped_anywhere_is_found(one, file):
    data = bytearray(file.read_bytes())
    (header,) = struct.unpack("<Q", data[:8])
    places = [
        *range(0, 8 + header, 7),
        *random.Random(1).sample(range(8 + header, len(data)), 150),
        len(data) - 1,
    ]
    for place in places:
        data[place] ^= 1 << place % 8
        file.write_bytes(data)
        refusal(one, file)
        data[place] ^= 1 << place % 8
    file.write_bytes(data)
    one.load_session(file).close()


def test_a_file_cut_off_anywhere_or_with_more_behind_it_is_refused(one, file):
    data = file.read_bytes()
    for length in [*range(0, 60, 5), *range(60, len(data), len(data) // 60), len(data) - 1]:
        file.write_bytes(data[:length])
        refusal(one, file)
    file.write_bytes(data + b"\0")
    assert "behind its end" in refusal(one, file)


def test_files_of_other_kinds_are_refused(one, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_transcript(tmp_path / "transcript", [{"role": "user", "content": "x"}], "m")
    save_file({"lanes.keys": torch.zeros(3)}, tmp_path / "tensors")
    (tmp_path / "pickle").write_bytes(pickle.dumps({"format": "minikv-session"}))
    (tmp_path / "text").write_text('{"__metadata__":{"format":"minikv-session"', encoding="utf-8")
    shutil.copy(model / "model.safetensors", tmp_path / "weights")
    (tmp_path / "nothing").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, sentence in {
        "transcript": "transcript is not a session saved by minikv.",
        "tensors": "tensors is not a session saved by minikv.",
        "pickle": "pickle is not a session saved by minikv.",
        "text": "text is not a session saved by minikv.",
        "weights": "weights is not a session saved by minikv.",
        "nothing": "nothing is empty.",
        "folder": "folder is a directory.",
        "pipe": "pipe is not a regular file.",
        "/dev/null": "/dev/null is not a regular file.",
        "absent": "Cannot read absent: no such file or directory.",
        "a" * 300: f"Cannot read {'a' * 300}: file name too long.",
    }.items():
        assert refusal(one, name) == sentence
    with pytest.raises(SessionError, match="no name can hold a NUL"):
        one.load_session("a\0b")
    monkeypatch.setattr(os, "open", denied)
    assert refusal(one, "text") == "Cannot read text: permission denied."


def denied(*arguments, **options):
    raise PermissionError(13, "Permission denied")


def test_a_closed_llm_says_so(model, merged):
    llm = load(model)
    session = llm.load_session(merged)
    llm.close()
    for call in (lambda: llm.load_session(merged), lambda: session.save(merged)):
        with pytest.raises(ConfigError, match="closed"):
            call()


def test_a_file_of_a_later_version_is_refused_by_that(one, file):
    data = file.read_bytes().replace(b'"format_version":"1"', b'"format_version":"2"', 1)
    file.write_bytes(data)
    assert refusal(one, file).endswith(
        "has version '2' of the session format, and this minikv reads version 1."
    )


def test_a_session_of_another_model_tokenizer_template_or_kv_dtype_is_refused_by_name(one, model, file):
    for key, words in {
        "fingerprint": "another model than this one",
        "tokenizer_hash": "another tokenizer of",
        "template_hash": "another chat template of",
    }.items():
        forge(file, metadata={key: "0" * 64})
        assert words in refusal(one, file)
        forge(file, metadata={key: one.session_identity[key]})
    forge(file, metadata={"fingerprint": "0" * 64, "rope": "0" * 64})
    assert "another model with another RoPE" in refusal(one, file)
    forge(file, metadata={key: one.session_identity[key] for key in ("fingerprint", "rope")})
    with load(model, cache=CacheConfig(kv_dtype="int8")) as other:
        assert "holds KV entries of type float32, and those of this model are int8" in refusal(other, file)


def test_a_session_is_refused_where_the_template_is_really_another(tmp_path, file):
    other = write_tiny_model(tmp_path / "m", 512, TEMPLATE + " ")
    with load(other) as llm:
        assert "another chat template" in refusal(llm, file)


def test_a_refused_file_leaves_the_current_session_and_all_others_as_they_were(one, merged, file):
    forge(file, lambda body: body["course"].update(done=0))
    kept, expected = (one.load_session(merged) for _ in range(2))
    refusal(one, file)
    assert kept.num_tokens == expected.num_tokens > 0
    assert more(kept) == more(expected)
    kept.close()
    expected.close()


# Files that were made up, with checksums that fit


def test_a_file_that_claims_huge_sizes_is_refused_unread(one, file, tmp_path):
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    body = json.loads(data[8 : 8 + length])
    for name in ("lanes.keys", "lanes.ids", "session.ids", "conversation", "recorder.1.spread.rows"):
        claimed = json.loads(json.dumps(body))
        start, end = claimed[name]["data_offsets"]
        rows = claimed[name]["shape"][0]
        claimed[name]["shape"][0] = rows * (1 << 30) // max(1, (end - start) // 64)
        more_bytes = (end - start) // rows * claimed[name]["shape"][0] - (end - start)
        for entry in (entry for key, entry in claimed.items() if key != "__metadata__"):
            entry["data_offsets"] = [n + more_bytes * (n > start) for n in entry["data_offsets"]]
        header = json.dumps(claimed, separators=(",", ":")).encode()
        file.write_bytes(_signed(header))
        os.truncate(file, file.stat().st_size + max(e["data_offsets"][1] for e in list(claimed.values())[1:]))
        started = time.perf_counter()
        refusal(one, file)
        assert time.perf_counter() - started < 1
    file.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
    assert "header is too long" in refusal(one, file)


def _signed(header: bytes) -> bytes:
    """A header with its length and a checksum that fits."""
    header += b" " * (-len(header) % 8)
    whole = struct.pack("<Q", len(header)) + header
    blank = re.sub(rb'"checksum":"\w{64}"', b'"checksum":"' + b"0" * 64 + b'"', whole, count=1)
    digest = hashlib.sha256(blank).hexdigest().encode()
    return blank.replace(b'"checksum":"' + b"0" * 64, b'"checksum":"' + digest, 1)


def _set(name: str, *places: object):
    """A change of a tensor: places and the value there."""
    *index, value = places

    def change(tensors: dict) -> None:
        tensors[name][tuple(index) if index else ...] = value

    return change


TENSORS = {
    "a lane longer than its tokens": _set("lanes.lengths", 0, 0, 5000),
    "a lane of negative length": _set("lanes.lengths", 0, 0, -1),
    "a lane that took an entry from another": _set("lanes.lengths", torch.tensor([[1, 0], [0, 0]])),
    "no lengths": lambda tensors: tensors.pop("lanes.lengths"),
    "no keys": lambda tensors: tensors.pop("lanes.keys"),
    "keys of another type": lambda t: t.update({"lanes.keys": t["lanes.keys"].double()}),
    "scales of an int8 cache": lambda t: t.update({"lanes.key_scales": t["lanes.log_mass"]}),
    "a position past the end": _set("lanes.positions", 3, 4000),
    "a negative position": _set("lanes.positions", 0, -4),
    "positions out of order": _set("lanes.positions", 2, 0),
    "an entry for no token": _set("lanes.counts", 0, 0),
    "entries for too many tokens": _set("lanes.counts", 0, 2**31 - 1),
    "a mass that is no number": _set("lanes.log_mass", 0, float("nan")),
    "an infinite mass": _set("lanes.log_mass", 0, float("inf")),
    "a key that is no number": _set("lanes.keys", 3, 0, float("nan")),
    "an endless value": _set("lanes.values", 0, 0, float("inf")),
    "a token that is not there": _set("lanes.ids", 0, 5000),
    "a negative token": _set("session.ids", 0, -1),
    "tokens of another type": lambda t: t.update({"lanes.ids": t["lanes.ids"].long()}),
    "a token fewer": lambda t: t.update({"lanes.ids": t["lanes.ids"][:-1]}),
    "more tokens than the context": lambda t: t.update({"lanes.ids": torch.ones(600, dtype=torch.int32)}),
    "logits of another model": lambda t: t.update({"prompt_logits": torch.zeros(5)}),
    "tensors that nobody knows": lambda t: t.update({"weights": torch.zeros(5)}),
    "text that is no JSON": _set("conversation", 3, 0),
    "text that is nested too deep": lambda t: t.update(
        {"conversation": torch.full((500_000,), ord("["), dtype=torch.uint8)}
    ),
    "records of no turn": lambda t: t.update({"recorder.77.numbers": torch.ones(3, dtype=torch.int64)}),
    "records without a number": lambda t: t.update({"recorder.x.numbers": torch.ones(3, dtype=torch.int64)}),
    "records of another policy": lambda t: t.update({"recorder.1.surprisal": torch.zeros(5)}),
    "records without their positions": lambda t: t.pop("recorder.1.window.positions"),
    "records without their numbers": lambda t: t.pop("recorder.1.numbers"),
    "a stride of zero": _set("recorder.1.numbers", 0, 0),
    "a spread that cannot be": _set("recorder.1.numbers", 1, 3),
    "parts that are not all": _set("recorder.1.window.parts", 0, 9),
    "empty parts": lambda t: t.update({"recorder.1.window.parts": torch.zeros(0, dtype=torch.int64)}),
    "records out of order": _set("recorder.1.window.positions", 0, 300),
    "a spread out of order": _set("recorder.1.spread.positions", 0, 300),
    "a spread without its rows": lambda t: t.pop("recorder.1.spread.rows"),
    "a window of another shape": lambda t: t.update(
        {"recorder.1.window.queries": t["recorder.1.window.queries"][:, :2].clone()}
    ),
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS.keys())
def test_made_up_tensors_are_refused(one, file, change):
    forge(file, tensors=change)
    refusal(one, file)


JUDGED = {
    "moments of another shape": lambda t: t.update(
        {"recorder.1.moments.sum": t["recorder.1.moments.sum"][:1]}
    ),
    "moments of a negative count": _set("recorder.1.numbers", 2, -5),
    "moments of more rows than wait": _set("recorder.1.numbers", 2, 999),
    "moments without their sums": lambda t: t.pop("recorder.1.moments.sum"),
}


@pytest.mark.parametrize("change", JUDGED.values(), ids=JUDGED.keys())
def test_made_up_moments_are_refused(one, judged, tmp_path, change):
    path = Path(shutil.copy(judged, tmp_path / "talk"))
    forge(path, tensors=change)
    refusal(one, path)


def _course(**changes):
    return lambda body: body["course"].update(changes)


def _turn(**changes):
    return lambda body: body["course"]["turns"][1].update(changes)


BODIES = {
    "no messages": lambda body: body.pop("messages"),
    "messages that are text": lambda body: body.update(messages="hello"),
    "messages without a role": lambda body: body.update(messages=[{"content": "x"}]),
    "messages that are numbers": lambda body: body.update(messages=[1, 2]),
    "messages the template refuses": lambda body: body["messages"].append({"role": "system", "content": "x"}),
    "arguments that are none": lambda body: body.update(template_args=[]),
    "arguments in the way of others": lambda body: body.update(template_args={"messages": []}),
    "arguments in the way, and no messages": lambda body: body.update(
        template_args={"messages": 1}, messages=[]
    ),
    "text that is a number": lambda body: body.update(rendered=5),
    "no cache": lambda body: body.update(cache=None),
    "a cache of later times": lambda body: body["cache"].update(colour="red"),
    "a policy that is not there": lambda body: body["cache"].update(policy="best"),
    "a budget that is none": lambda body: body["cache"].update(budget=-1),
    "a budget too small": lambda body: body["cache"].update(budget="1KiB"),
    "a profile that is not there": lambda body: body["cache"].update(policy="compresskv", profile="/no/such"),
    "a profile that is a device": lambda body: body["cache"].update(policy="compresskv", profile="/dev/zero"),
    "sinks past all memory": lambda body: body["cache"].update(sinks=1 << 70),
    "pinned tokens past all memory": _turn(pinned=[[1, 1 << 70]]),
    "room past all memory": _course(compressions=[[0, 10, 1 << 70]]),
    "no course": lambda body: body.pop("course"),
    "no turns": _course(turns=[]),
    "turns that are numbers": _course(turns=[1, 2]),
    "a turn that begins late": lambda body: body["course"]["turns"][0].update(start=3),
    "a turn before its time": _turn(start=-1),
    "a turn after the end": _turn(start=4000),
    "a turn that begins with another": _turn(start=0),
    "a turn with half a token": _turn(start=3.5),
    "a turn with an endless prompt": _turn(num_prompt=1 << 40),
    "content before its turn": _turn(content=[0, 40]),
    "content past the prompt": _turn(content=[100, 400]),
    "content of one number": _turn(content=[100]),
    "pinned tokens that are text": _turn(pinned=["ab"]),
    "pinned tokens backwards": _turn(pinned=[[9, 3]]),
    "compressions of no turn": _course(compressions=[[7, 10, 0]]),
    "compressions after the end": _course(compressions=[[0, 4000, 0]]),
    "compressions with negative room": _course(compressions=[[0, 10, -3]]),
    "compressions backwards": lambda body: body["course"]["compressions"].reverse(),
    "compressions that are text": _course(compressions=["abc"]),
    "more done than was": _course(done=99),
    "less done than was": _course(done=0),
    "a peak past all memory": _course(peak_entries=1 << 39),
    "a negative peak": _course(peak_entries=-1),
    "pages of no entries": _course(page_size=0),
    "a merge past the end": lambda body: body.update(merged_end=4000),
    "pages that are text": lambda body: body.update(held_entries="x"),
}


@pytest.mark.parametrize("change", BODIES.values(), ids=BODIES.keys())
def test_made_up_contents_are_refused(one, file, change):
    forge(file, change)
    refusal(one, file)


VALUES = st.sampled_from(
    [None, True, 0, 1, -1, 7, 63, 10**6, 2**70, 0.5, "", "x", [], [1], [[0, 1]], {}, {"a": 1}]
)


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_stands_in_the_contents_a_file_is_refused_or_can_be_gone_on_with(
    one, merged, tmp_path, data
):
    path = Path(shutil.copy(merged, tmp_path / "talk"))

    def change(body: dict) -> None:
        target: dict | list = body
        while True:
            keys = sorted(target) if isinstance(target, dict) else list(range(len(target)))
            key = data.draw(st.sampled_from(keys))
            inner = target[key]  # type: ignore[index]
            if isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
                target = inner
                continue
            target[key] = data.draw(VALUES)  # type: ignore[index]
            return

    forge(path, change)
    try:
        session = one.load_session(path)
    except SessionError:
        one.engine.store.check()
        return
    with suppress(MinikvError):
        session.send("Go on", PARAMS)
    one.engine.store.check()
    session.close()


# Where there is no room


def test_idle_lanes_of_others_make_way_and_a_session_too_large_is_refused(one, model, tmp_path):
    begun(one).save(tmp_path / "s")
    needed = one.load_session(tmp_path / "s").kv_bytes
    page = one.engine.store.pool.page_bytes
    with load(model, tiers=TierConfig(hot=needed + 5 * page)) as llm:
        current = llm.load_session(tmp_path / "s")
        expected = more(one.load_session(tmp_path / "s"))
        second = llm.load_session(tmp_path / "s")
        assert (current.num_tokens, second.num_tokens > 0) == (0, True)
        assert more(second)[0] == expected[0]
        assert current.messages and more(current)[0][0] == expected[0][0]
    with load(model, tiers=TierConfig(hot=needed - 3 * page)) as llm:
        assert "raise --kv-hot" in refusal(llm, tmp_path / "s")
    with load(model, max_seqs=1) as llm:
        current = llm.load_session(tmp_path / "s")
        assert llm.load_session(tmp_path / "s").num_tokens > 0
        assert current.num_tokens == 0
    with load(model, max_context=100) as llm:
        assert "and the context is 100; raise max_context" in refusal(llm, tmp_path / "s")


def test_a_session_is_refused_while_running_requests_need_the_room(one, model, tmp_path):
    begun(one).save(tmp_path / "s")
    with load(model, max_seqs=1) as llm:
        stream = llm.stream("Once upon a time", PARAMS)
        next(stream)
        assert "raise --kv-hot" in refusal(llm, tmp_path / "s")
        assert list(stream)[-1].finish_reason == "length"
        assert llm.load_session(tmp_path / "s").num_tokens > 0


def test_a_compressed_session_is_refused_where_its_prompt_could_not_be_computed_again(one, model, tmp_path):
    session = begun(one, keep("snapkv", 40))
    session.save(tmp_path / "s")
    page = one.engine.store.pool.page_bytes
    with load(model, tiers=TierConfig(hot=session.kv_bytes + 3 * page)) as llm:
        assert "a KV cache that took at most" in refusal(llm, tmp_path / "s")
    session.close()


def test_a_file_that_fails_while_lanes_are_filled_leaves_no_page_behind(one, merged, monkeypatch):
    from minikv.sessions.container import Container

    real, calls = Container.read_rows, []

    def fails_late(self, name, start, stop):
        calls.append(name)
        if name == "lanes.keys" and calls.count(name) == 2:
            raise OSError(5, "Input/output error")
        return real(self, name, start, stop)

    monkeypatch.setattr(Container, "read_rows", fails_late)
    assert "input/output error" in refusal(one, merged)
    monkeypatch.undo()
    one.load_session(merged).close()


def test_a_session_with_a_budget_that_does_not_hold_here_is_refused(one, model, tmp_path):
    session = begun(one, keep("snapkv", "80KiB"))
    session.save(tmp_path / "s")
    session.close()
    with load(model, cache=CacheConfig(page_size=256)) as llm:
        assert "does not go here: A budget of 80.0 KiB is too little" in refusal(llm, tmp_path / "s")
