"""`minikv chat --session`, and `/save` and `/load` of whole sessions."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tools import at_terminal, error_of, invoke, write_tiny_model

from minikv import LLM, CacheConfig, SamplingParams
from minikv.cli.chat import take_line
from minikv.cli.chat_files import Keeper
from minikv.cli.chat_state import ChatState
from minikv.cli.interrupts import Interrupts

READY = r"\x1b\[\?2004h"
STATS = r"(\d+) new prompt tokens?, (\d+) reused, (\d+) tok"
SHORT = ("--max-tokens", 8, "--ignore-eos")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny", max_context=4096)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_seqs=4) as llm:
        yield llm


@pytest.fixture
def chat(llm: LLM) -> Iterator[ChatState]:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    state = ChatState(llm, llm.chat_session(), params, lambda prompt: "", Interrupts())
    yield state
    state.session.close()


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


# Commands


def test_a_saved_session_is_gone_on_with_without_computing_it_again(
    chat: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "talk.session"
    take_line(chat, "/set policy snapkv 40")
    take_line(chat, "hello, how do you do in this fine weather by the sea?")
    tokens = chat.session.num_tokens
    take_line(chat, f"/save {path}")
    assert f"Saved 2 messages and the KV cache of {tokens} tokens (" in said(capsys)
    before = chat.session.messages
    take_line(chat, "/clear")
    take_line(chat, "/set policy full")
    take_line(chat, f"/load {path}")
    assert f"from {path}, under policy snapkv with budget 40." in said(capsys)
    assert (chat.session.messages, chat.session.num_tokens) == (before, tokens)
    take_line(chat, "and on")
    assert chat.last is not None and chat.last.result is not None
    assert chat.last.result.usage.reused_tokens == tokens
    assert os.listdir(tmp_path) == ["talk.session"]


def test_a_file_that_cannot_be_loaded_leaves_the_conversation_and_its_cache(
    chat: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "talk"
    take_line(chat, "hello")
    take_line(chat, f"/save {path}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before, tokens = chat.session.messages, chat.session.num_tokens
    said(capsys)
    take_line(chat, f"/load {path}")
    assert said(capsys) == f"minikv: {path} is damaged: its checksum does not fit.\n"
    assert (chat.session.messages, chat.session.num_tokens) == (before, tokens)


def test_load_tells_sessions_and_transcripts_apart_by_what_they_hold(
    chat: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    take_line(chat, "hello")
    before = chat.session.messages
    take_line(chat, f"/save {tmp_path}/a.json")
    take_line(chat, f"/save {tmp_path}/b")
    os.rename(tmp_path / "a.json", tmp_path / "c")
    os.rename(tmp_path / "b", tmp_path / "d.json")
    for name in ("c", "d.json"):
        take_line(chat, "/clear")
        take_line(chat, f"/load {tmp_path}/{name}")
        assert chat.session.messages == before
    assert "minikv: " not in said(capsys)


def test_a_policy_set_after_loading_keeps_the_template_arguments(
    chat: ChatState, llm: LLM, tmp_path: Path
) -> None:
    with llm.chat_session(enable_thinking=False) as session:
        session.save(tmp_path / "talk")
    take_line(chat, f"/load {tmp_path}/talk")
    take_line(chat, "/set policy snapkv 0.5")
    assert chat.session.template_args == {"enable_thinking": False}


# The file of --session


def test_the_session_file_is_as_new_as_the_conversation(
    chat: ChatState, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.session_file = tmp_path / "talk"
    keeper = Keeper(chat)
    keeper.keep()
    assert not os.listdir(tmp_path)
    for line in ("hello", "/system Be brief.", "and on", "/regen", "/set policy snapkv 0.5", "/clear"):
        take_line(chat, line)
        keeper.keep()
        with llm.load_session(tmp_path / "talk") as loaded:
            assert loaded.messages == chat.session.messages
            assert loaded.cache.policy == chat.session.cache.policy
            assert loaded.num_tokens == chat.session.num_tokens
    written = (tmp_path / "talk").stat().st_mtime_ns
    for line in ("/stats", "/kv", "/help", "/set temperature 0.5"):
        take_line(chat, line)
        keeper.keep()
    assert (tmp_path / "talk").stat().st_mtime_ns == written
    assert "is damaged" not in said(capsys)


def test_another_session_that_is_loaded_is_kept_in_its_own_file(
    chat: ChatState, llm: LLM, tmp_path: Path
) -> None:
    take_line(chat, "of other things")
    take_line(chat, f"/save {tmp_path}/other")
    chat.session_file = tmp_path / "talk"
    keeper = Keeper(chat)
    take_line(chat, "/clear")
    take_line(chat, "hello")
    keeper.keep()
    take_line(chat, f"/load {tmp_path}/other")
    take_line(chat, "more of them")
    keeper.keep()
    for name, count in (("talk", 2), ("other", 4)):
        with llm.load_session(tmp_path / name) as loaded:
            assert len(loaded.messages) == count


def test_a_session_file_that_cannot_be_written_is_one_line_and_the_chat_goes_on(
    chat: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.session_file = tmp_path / "folder" / "talk"
    keeper = Keeper(chat)
    take_line(chat, "hello")
    said(capsys)
    keeper.keep()
    assert said(capsys) == f"minikv: Cannot save to {chat.session_file}: no such file or directory.\n"
    chat.session_file.parent.mkdir()
    keeper.keep()
    assert chat.session_file.exists()


def test_piped_turns_make_one_conversation(model: Path, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    for text in ("hello", "and on"):
        done = invoke("chat", model, *SHORT, "--session", path, "--system", "Be brief.", stdin=text)
        assert (done.exit_code, done.stderr) == (0, "")
    with llm.load_session(path) as session:
        contents = [message["content"] for message in session.messages]
        assert contents[::2] == ["Be brief.", contents[2], contents[4]]
        assert (contents[1], contents[3]) == ("hello", "and on")
        assert done.stdout == contents[4] + "\n"
        assert session.num_tokens > 60
    invoke("chat", model, *SHORT, "--session", path, "--system", "Be long.", stdin="more")
    with llm.load_session(path) as session:
        assert session.messages[0]["content"] == "Be long."


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--kv-policy", "adakv", "--kv-budget", 40),
            "with policy 'snapkv', not 'adakv'; leave the option",
        ),
        (("--kv-policy", "snapkv", "--kv-budget", "1.0"), "with budget 40, not 1.0; leave the option out"),
        (
            ("--kv-budget", 41),
            "with budget 40, not 41; leave the option out, or change it in the chat with /set",
        ),
        (("--no-refit",), "with refit None, not False; leave the option out."),
        (("--kv-budget", "64 apples"), "budget must be a fraction"),
        (("--template-arg", "tone=mild"), "with the template argument tone None, not 'mild'"),
        (("--kv-dtype", "int8"), "and those of this model are int8; load the model with kv_dtype"),
        (("--max-context", 20), "and the context is 20; raise max_context"),
    ],
)
def test_an_option_that_the_session_contradicts_is_refused(
    model: Path, tmp_path: Path, options: tuple, sentence: str
) -> None:
    path, kept = tmp_path / "talk", ("--kv-policy", "snapkv", "--kv-budget", 40)
    assert invoke("chat", model, *SHORT, *kept, "--session", path, stdin="hello").exit_code == 0
    before = path.read_bytes()
    assert sentence in error_of(invoke("chat", model, *SHORT, *options, "--session", path, stdin="on"))
    assert path.read_bytes() == before
    for same in (kept, kept[2:], ()):
        assert invoke("chat", model, *SHORT, *same, "--session", path, stdin="hello").exit_code == 0


def test_a_session_file_that_cannot_be_used_is_found_out_before_anything_is_said(
    model: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.write_text("mine", encoding="utf-8")
    for name, sentence in {
        notes: "notes is not a session saved by minikv.",
        tmp_path / "no" / "talk": "no such file or directory.",
        tmp_path / "talk.json": "give --session a name without .json.",
        tmp_path: "is a directory.",
        tmp_path / ("a" * 300): "file name too long.",
    }.items():
        assert error_of(invoke("chat", model, "--session", name, stdin="hello")).endswith(sentence)
    assert os.listdir(tmp_path) == ["notes"]


def test_kill_9_between_two_turns_loses_nothing(model: Path, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    child = at_terminal("chat", model, *SHORT, "--session", path, home=tmp_path / "home")
    for text in ("hello there", "and again"):
        child.expect(READY)
        child.send(text + "\r")
        child.expect(STATS)
    child.expect(READY)
    child.kill(signal.SIGKILL)
    child.close()
    with llm.load_session(path) as session:
        assert [m["content"] for m in session.messages[::2]] == ["hello there", "and again"]
        tokens = session.num_tokens
    child = at_terminal("chat", model, *SHORT, "--session", path, home=tmp_path / "home")
    child.expect(f"Loaded 4 messages and the KV cache of {tokens} tokens")
    child.expect(READY)
    child.send("one more\r")
    child.expect(STATS)
    assert child.match is not None
    assert int(child.match[2]) == tokens  # type: ignore[index]
    child.expect(READY)
    child.sendeof()
    child.expect("\x1b")
    child.close()


def test_a_session_of_a_chat_goes_on_in_python(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    invoke("chat", model, *SHORT, "--session", path, stdin="hello")
    with LLM(str(model), cache=CacheConfig(policy="snapkv", budget=40)) as llm:
        session = llm.load_session(path)
        assert session.cache.policy == "full"
        reply = session.send("and on", SamplingParams(max_tokens=8))
        assert reply.usage.reused_tokens > 20
