"""`minikv chat` at a pseudo-terminal and with piped input."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from cli_tools import at_terminal, error_of, invoke, write_tiny_model
from model_files import byte_level_tokenizer
from prompt_toolkit import PromptSession
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from minikv import LLM, SamplingParams
from minikv.cli.interrupts import Interrupts
from minikv.cli.line_editor import key_bindings, line_history
from minikv.cli.transcript import load_transcript

# A prompt is there once the editor asks the terminal to mark pasted text.
READY = r"\x1b\[\?2004h"
STATS = r"(\d+) new prompt tokens?, (\d+) reused, (\d+) tok"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny", max_context=4096)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_seqs=4) as llm:
        yield llm


# At a terminal


def enter(child: pexpect.spawn, line: str) -> None:
    child.expect(READY)
    child.send(line + "\r")


def read_stats(child: pexpect.spawn) -> tuple[int, int, int]:
    child.expect(STATS)
    assert child.match is not None
    new, reused, produced = (int(number) for number in child.match.groups())  # type: ignore[union-attr]
    return new, reused, produced


def leave(child: pexpect.spawn) -> None:
    child.expect(READY)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_three_turns_reuse_what_came_before(model: Path, tmp_path: Path) -> None:
    child = at_terminal("chat", model, "--max-tokens", 12, "--ignore-eos", home=tmp_path)
    child.expect("/help lists the commands")
    for part in ("minikv ", "llama", "backend ", "context 4,096 tokens", "KV float"):
        assert part in child.before
    enter(child, "hello there")
    new, reused, produced = read_stats(child)
    assert (reused, produced) == (0, 12)
    known = new + produced
    for text in ("and again", "one more time"):
        enter(child, text)
        new, reused, produced = read_stats(child)
        # The last token of a reply has no keys and values yet when the next turn begins.
        assert reused >= known - 1 > 0
        assert new < 40
        known = new + reused + produced
    leave(child)
    assert "hello there" in (tmp_path / "history").read_text(encoding="utf-8")


def test_ctrl_c_stops_the_turn_and_the_chat_goes_on(model: Path, tmp_path: Path) -> None:
    tilde = byte_level_tokenizer().token_to_id("~")
    options = ("--max-tokens", "none", "--logit-bias", f"{tilde}=100")
    child = at_terminal("chat", model, *options, home=tmp_path)
    enter(child, "hello")
    child.expect("~")  # the reply has begun
    child.sendintr()
    child.expect(r"(\d+) tok[^\r\n]*, stopped")
    enter(child, "/set max_tokens 5")
    child.expect("max_tokens = 5")
    enter(child, "hello again")
    _, reused, produced = read_stats(child)
    assert produced == 5
    assert reused > 0
    # Twice in a row is still only the turn: the second comes when the prompt is there already.
    enter(child, "/set max_tokens none")
    enter(child, "and on")
    child.expect("~")
    child.sendintr()
    child.sendintr()
    child.expect("stopped")
    enter(child, "/stats")
    child.expect("Last turn: ")
    child.expect(READY)
    time.sleep(0.6)
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_mistakes_at_the_terminal_are_one_line_each(model: Path, tmp_path: Path) -> None:
    child = at_terminal("chat", model, "--no-history", "--max-tokens", 4, home=tmp_path)
    enter(child, "/raed notes.txt")
    child.expect("minikv: There is no command /raed; did you mean /read\\?\r\n")
    enter(child, "/read no-such-file.txt What is it?")
    child.expect("minikv: Cannot read no-such-file.txt: no such file or directory.\r\n")
    enter(child, "/set temperature hot")
    child.expect("minikv: temperature must be a number, not 'hot'.\r\n")
    enter(child, "word " * 1500)
    child.expect("minikv: The prompt has \\d+ tokens and the context is 4096")
    enter(child, "short")
    assert read_stats(child)[1] == 0
    leave(child)
    assert not (tmp_path / "history").exists()


def test_line_editing_and_a_message_of_several_lines(model: Path, tmp_path: Path) -> None:
    child = at_terminal("chat", model, "--max-tokens", 3, home=tmp_path)
    enter(child, "/multi")
    for line in ("first", "second", "."):
        child.expect(READY)
        child.send(line + "\r")
    read_stats(child)
    enter(child, "/save talk.json\x01\x0b/save " + str(tmp_path / "talk.json"))  # to the start, cut all
    child.expect("Saved 2 messages")
    child.expect(READY)
    child.send("half a line")
    time.sleep(0.6)
    child.sendintr()  # empties the line and no more
    child.send("/exit\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    messages, _ = load_transcript(tmp_path / "talk.json")
    assert messages[0] == {"role": "user", "content": "first\nsecond"}


def test_terminal_gets_no_control_characters_and_no_markup(tmp_path: Path) -> None:
    # The bias makes the reply of these two bytes.
    model = write_tiny_model(tmp_path / "m")
    escape, bracket = byte_level_tokenizer().encode("\x1b[").ids
    forced = ("--logit-bias", f"{escape}=100", "--logit-bias", f"{bracket}=100", "--frequency-penalty", 2)
    raw = invoke("chat", model, "--max-tokens", 8, *forced, stdin="hi").stdout
    assert "\x1b" in raw
    assert "[" in raw
    child = at_terminal("chat", model, "--max-tokens", 8, *forced, home=tmp_path)
    enter(child, "hi")
    child.expect(STATS)
    shown = raw.replace("\x1b", "").strip()
    # Right after the editor has ended its line; an escape left in the reply would stand between.
    assert f"\x1b[?2004l{shown}\r\n" in child.before
    leave(child)


@pytest.mark.parametrize(
    ("age", "typed", "line"),
    [
        (0.1, "\x03late\r", "late"),
        (1.0, "half\x03whole\r", "whole"),
        (1.0, "\x03", None),
        (1.0, "\x04", None),
    ],
)
def test_ctrl_c_at_the_prompt(age: float, typed: str, line: str | None) -> None:
    with create_pipe_input() as keys:
        session: PromptSession[str] = PromptSession(
            input=keys, output=DummyOutput(), key_bindings=key_bindings(lambda: age)
        )
        keys.send_text(typed)
        if line is not None:
            assert session.prompt("> ") == line
        else:
            with pytest.raises((KeyboardInterrupt, EOFError)):
                session.prompt("> ")


@pytest.fixture
def heeds_sigint() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_sigint")
def test_second_ctrl_c_insists_only_where_the_command_ends_anyway() -> None:
    with Interrupts(insist=False) as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.requested
    finally:
        signal.signal(signal.SIGINT, before)


def test_history_that_cannot_be_written_costs_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))
    history = line_history()
    history.append_string("kept")
    history.append_string("not text \udcff")
    file = tmp_path / "home" / "history"
    assert "+kept" in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o077 == 0
    file.unlink()
    file.mkdir()
    history.append_string("lost")
    assert history.get_strings() == ["kept", "not text \udcff", "lost"]
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "file"))
    line_history().append_string("in memory")


# Piped


def test_piped_input_is_one_turn(model: Path, llm: LLM) -> None:
    text = "/help is not a command here\nsecond line"
    expected = llm.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=9))
    done = invoke("chat", model, "--max-tokens", 9, stdin=text + "\n")
    assert done.exit_code == 0
    assert (done.stdout, done.stderr) == (expected.text + "\n", "")


def test_piped_input_that_cannot_be_answered_exits_1(model: Path) -> None:
    assert "nothing to answer" in error_of(invoke("chat", model, stdin=" \n"))
    assert "4096" in error_of(invoke("chat", model, stdin="word " * 3000))


def test_model_without_template_cannot_chat(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", template=None)
    assert "no chat template" in error_of(invoke("chat", plain, stdin="hi"))
