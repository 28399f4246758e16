"""The slash commands of `minikv chat`, and what a chat keeps when a turn fails or is stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tools import write_tiny_model

from minikv import LLM, SamplingParams
from minikv.cli.chat import take_line
from minikv.cli.chat_commands import COMMANDS, LeaveChat
from minikv.cli.chat_state import ChatState
from minikv.cli.interrupts import Interrupts
from minikv.cli.transcript import load_transcript, save_transcript
from minikv.errors import SessionError

STATS = r"(\d+) new prompt tokens?, (\d+) reused, (\d+) tok"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny", max_context=4096)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_seqs=4) as llm:
        yield llm


@pytest.fixture
def chat(llm: LLM) -> Iterator[ChatState]:
    """A chat whose prompt gives no lines; `state.read_line` is replaced where a test needs some."""

    def nothing(prompt: str) -> str:
        raise EOFError

    session = llm.chat_session()
    yield ChatState(llm, session, SamplingParams(max_tokens=8, ignore_eos=True), nothing, Interrupts())
    session.close()


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_help_names_every_command(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    take_line(chat, "/help")
    text = said(capsys)
    assert all(f"/{name} " in text for name in COMMANDS)


@pytest.mark.parametrize(
    "line",
    [
        "/",
        "/no-such-thing",
        "/stats",
        "/regen",
        "/read",
        "/read ''",
        "/read /",
        "/save",
        "/save /no/such/folder/talk.json",
        "/load",
        "/load no-such-file",
        "/set nonsense 1",
        "/set temperature",
        "/set temperature -1",
        "/set temperature nan",
        "/set n 2",
        "/set logprobs 3",
        "/set max_tokens 0",
        "/set logit_bias x",
        "/set stop [1]",
        "/kv",
        "/system",
        "/HELP",
        "/multi",
    ],
)
def test_no_command_raises_or_takes_more_than_one_line_of_error(
    chat: ChatState, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    take_line(chat, line)
    errors = [text for text in said(capsys).splitlines() if text.startswith("minikv: ")]
    assert len(errors) <= 1
    chat.send("hi")
    assert chat.last is not None


def test_exit_leaves_and_an_empty_line_does_nothing(chat: ChatState) -> None:
    take_line(chat, "   ")
    assert chat.last is None
    with pytest.raises(LeaveChat):
        take_line(chat, "/exit")


def test_text_after_a_blank_may_begin_with_a_slash(chat: ChatState) -> None:
    take_line(chat, " /etc is a folder")
    assert chat.session.messages[0]["content"] == "/etc is a folder"


def test_settings_change_the_next_turn(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    take_line(chat, "/set max-tokens 3")
    take_line(chat, "hello")
    assert chat.last is not None
    assert len(chat.last.token_ids) == 3
    take_line(chat, "/set")
    text = said(capsys)
    assert "max_tokens = 3" in text
    assert "ignore_eos = on" in text
    assert "seed = none" in text


def test_regen_replaces_the_last_reply(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    take_line(chat, "hello")
    first = chat.session.messages
    take_line(chat, "/regen")
    assert chat.session.messages == first
    assert "temperature 0" in said(capsys)
    take_line(chat, "/set temperature 5")
    take_line(chat, "/regen")
    assert len(chat.session.messages) == 2
    assert chat.session.messages[0] == first[0]
    assert chat.session.messages[1] != first[1]


def test_system_message_is_set_shown_and_removed(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    take_line(chat, "/system Be brief.")
    assert chat.session.messages == [{"role": "system", "content": "Be brief."}]
    take_line(chat, "/system")
    assert "Be brief." in said(capsys)
    take_line(chat, "hello")
    take_line(chat, "/clear")
    assert chat.session.messages == [{"role": "system", "content": "Be brief."}]
    take_line(chat, "/system none")
    assert chat.session.messages == []


def test_read_puts_documents_before_the_question(chat: ChatState, tmp_path: Path) -> None:
    named = tmp_path / "two words.txt"
    named.write_text("A document.\n", encoding="utf-8")
    (tmp_path / "other.txt").write_text("Another.\n", encoding="utf-8")
    take_line(chat, f'/read "{named}" What\'s in it?')
    assert chat.session.messages[0]["content"] == "A document.\n\nWhat's in it?"
    take_line(chat, f"/read {tmp_path}/other.txt")
    take_line(chat, "/read " + str(named).replace(" ", "\\ "))
    assert len(chat.session.messages) == 2
    take_line(chat, "And now?")
    assert chat.session.messages[2]["content"] == "Another.\n\nA document.\n\nAnd now?"
    take_line(chat, "Fine.")
    assert chat.session.messages[4]["content"] == "Fine."


def test_a_document_that_is_too_long_does_not_spoil_later_turns(
    chat: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("word " * 3000, encoding="utf-8")
    take_line(chat, f"/read {tmp_path}/a.txt")
    take_line(chat, "What is it?")
    assert chat.session.messages == []
    assert "is dropped" in said(capsys)
    take_line(chat, "Short?")
    assert chat.session.messages[0]["content"] == "Short?"


class InterruptedAfterFivePieces:
    """Ctrl-C at the fifth look of each turn."""

    def __init__(self) -> None:
        self._looks = 0

    @property
    def requested(self) -> bool:
        self._looks += 1
        return self._looks >= 5

    @requested.setter
    def requested(self, value: bool) -> None:
        self._looks = 0


def test_ctrl_c_while_the_prompt_is_read_takes_the_message_back(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("word " * 250, encoding="utf-8")
    params = SamplingParams(max_tokens=2)
    with LLM(str(model), prefill_chunk=1) as llm, Interrupts(insist=False) as interrupts:
        state = ChatState(llm, llm.chat_session(), params, lambda _: "", interrupts)
        take_line(state, f"/read {tmp_path}/a.txt")
        state.interrupts = InterruptedAfterFivePieces()  # type: ignore[assignment]
        take_line(state, "What is it?")
        answer = said(capsys)
        assert "the message is taken back" in answer
        assert "is dropped" in answer
        assert state.session.messages == []
        assert 0 < state.session.num_tokens < 20
        state.interrupts = interrupts
        take_line(state, f"/read {tmp_path}/a.txt")
        take_line(state, "What is it now?")
        assert state.session.messages[0]["content"].startswith("word word")


def test_files_that_cannot_be_read_are_one_sentence(
    chat: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "huge.txt").write_bytes(b"a" * 10_000_000)
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "empty").write_bytes(b"")
    for name, sentence in (
        ("huge.txt", "KiB that the model's context can hold"),
        ("binary", "is not a text file"),
        ("empty", "is empty"),
        ("absent", "no such file"),
        (".", "is a directory"),
        ("a\0b", "cannot hold a NUL"),
    ):
        take_line(chat, f"/read {tmp_path / name} Why?")
        (line,) = said(capsys).splitlines()
        assert line.startswith("minikv: ")
        assert sentence in line
    assert chat.session.messages == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/read ~nosuchuser/x Why?", "no such file"),
        ("/save ~nosuchuser/x", "no such file"),
        ("/load ~nosuchuser/x", "no such file"),
        ("/read /dev/zero", "not a regular file"),
        ("/load /dev/zero", "not a regular file"),
        ("/save /dev/null", "not a regular file"),
        ("/save " + "b" * 300, "name too long"),
        ("/read " + "b" * 300, "name too long"),
        ("/system \udcff", "not UTF-8"),
        ("/set stop " + "[" * 3000, "must be"),
    ],
)
def test_strange_arguments_are_one_sentence(
    chat: ChatState, line: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    take_line(chat, line)
    (answer,) = said(capsys).splitlines()
    assert answer.startswith("minikv: ")
    assert sentence in answer


def test_several_lines_can_be_given_up(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["one", "", "two", "/end"])
    chat.read_line = lambda prompt: next(lines)
    take_line(chat, "/multi")
    assert chat.session.messages[0]["content"] == "one\n\ntwo"

    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    chat.read_line = interrupted
    take_line(chat, "/multi")
    assert "Nothing was sent." in said(capsys)
    assert len(chat.session.messages) == 2


def test_kv_and_stats_tell_what_is_held(chat: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    take_line(chat, "hello")
    take_line(chat, "/kv")
    text = said(capsys)
    tokens = chat.session.num_tokens
    assert f"for {tokens} tokens" in text
    assert f"layers 0-1: {tokens} entries in each of 2 lanes" in text
    take_line(chat, "more")
    take_line(chat, "/stats")
    text = said(capsys)
    assert re.search(STATS, text)
    assert "First token after" in text
    assert "were still in the KV cache" in text


def test_saved_conversation_goes_on_where_it_was(
    chat: ChatState, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "talk.json"
    take_line(chat, "/system Be brief.")
    take_line(chat, "hello")
    take_line(chat, f"/save {path}")
    before = chat.session.messages
    take_line(chat, "/clear")
    take_line(chat, f"/load {path}")
    assert chat.session.messages == before
    take_line(chat, "and on")
    assert chat.session.messages[:3] == before
    take_line(chat, f"/save {path}")  # over an earlier conversation
    assert len(load_transcript(path)[0]) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]
    assert "minikv: " not in said(capsys)


def test_save_does_not_replace_a_file_of_another_kind(
    chat: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    take_line(chat, "hello")
    take_line(chat, f"/save {notes}")
    assert "is not a session saved by minikv, so it is not replaced" in said(capsys)
    take_line(chat, f"/save {notes.rename(tmp_path / 'notes.json')}")
    assert "not a conversation saved by minikv" in said(capsys)
    notes = tmp_path / "notes.json"
    assert notes.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 99},
        {"messages": "text"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
    ],
)
def test_damaged_conversation_is_refused_and_nothing_changes(
    chat: ChatState, tmp_path: Path, change: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "talk.json"
    take_line(chat, "hello")
    before = chat.session.messages
    save_transcript(path, before, "m")
    body = json.loads(path.read_text(encoding="utf-8")) | change
    path.write_text(json.dumps(body), encoding="utf-8")
    capsys.readouterr()
    take_line(chat, f"/load {path}")
    (line,) = said(capsys).splitlines()
    assert line.startswith(f"minikv: {path}")
    assert chat.session.messages == before


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b"[" * 100_000])
def test_file_that_is_no_conversation_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(data)
    with pytest.raises(SessionError, match="not a conversation saved by minikv"):
        load_transcript(path)


def test_template_that_refuses_a_turn_leaves_the_chat_usable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{% for m in messages %}{% if 'magic' in m['content'] %}{{ raise_exception('No magic') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    with LLM(str(write_tiny_model(tmp_path / "m", template=template))) as llm:
        state = ChatState(llm, llm.chat_session(), SamplingParams(max_tokens=2), lambda _: "", Interrupts())
        take_line(state, "magic")
        assert "No magic" in said(capsys)
        take_line(state, "plain")
        assert [m["content"] for m in state.session.messages][:1] == ["plain"]
