"""The slash commands of `minikv chat`. Each takes the state and the text after its name."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minikv.cache.budget import read_budget
from minikv.cli import chat_files, chat_kv
from minikv.cli.chat_state import ChatState, summary
from minikv.cli.compression import changed
from minikv.cli.inputs import encodable, read_text_file, refuse_special, user_path
from minikv.cli.options import CHAT_SAMPLING, parse_value
from minikv.errors import ConfigError, RequestError, SessionError

# No text has fewer tokens than a 32nd of its bytes, so a larger file cannot fit the context.
_MOST_BYTES_PER_TOKEN = 32
# Settings of the KV cache, beside those of sampling.
_KEPT = ("policy", "budget")


class LeaveChat(Exception):
    """The person asked to leave."""


@dataclass(frozen=True)
class Command:
    """`usage` is what follows the name in /help."""

    run: Callable[[ChatState, str], None]
    usage: str
    help: str


def run_command(state: ChatState, line: str) -> None:
    """Run a line that begins with a slash. Raises MinikvError for the caller to print, LeaveChat."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name.lower())
    if command is None:
        near = difflib.get_close_matches(name.lower(), COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them."
        raise ConfigError(f"There is no command /{name}; {hint}")
    command.run(state, argument.strip())


def _help(state: ChatState, argument: str) -> None:
    width = max(len(f"/{name} {command.usage}") for name, command in COMMANDS.items())
    for name, command in COMMANDS.items():
        state.say(f"{f'/{name} {command.usage}':{width}}  {command.help}")
    state.say("Ctrl-C stops a reply, and leaves at an empty prompt, as Ctrl-D does.")
    state.say("Begin with a blank to send text that starts with a slash.")


def _clear(state: ChatState, argument: str) -> None:
    state.session.clear()
    state.documents.clear()
    state.last = None
    state.say("The conversation is cleared.")


def _regen(state: ChatState, argument: str) -> None:
    if not any(message["role"] == "user" for message in state.session.messages):
        raise SessionError("There is no turn to answer again yet.")
    if state.params.temperature == 0 and state.session.cache.policy == "full":
        state.say("At temperature 0 the reply is the same again; /set temperature 0.8 varies it.")
    state.play(lambda: state.session.regenerate(state.params))


def _system(state: ChatState, argument: str) -> None:
    current = [m["content"] for m in state.session.messages if m["role"] == "system"]
    if not argument:
        state.say(f"System message: {current[0]}" if current else "There is no system message.")
        return
    if not encodable(argument):
        raise ConfigError("The system message holds bytes that are not UTF-8 text.")
    state.session.set_system(None if argument == "none" else argument)
    state.say("The system message is removed." if argument == "none" else "The system message is set.")


def _read(state: ChatState, argument: str) -> None:
    match = re.match(r"(\"[^\"]*\"|'[^']*'|(?:\\.|\S)+)\s*(.*)", argument, re.DOTALL)
    if match is None:
        raise ConfigError("/read needs the name of a file.")
    path = _path(re.sub(r"\\(.)", r"\1", match[1]))
    refuse_special(path)
    text = read_text_file(path, limit=state.llm.max_context * _MOST_BYTES_PER_TOKEN)
    if not text.strip():
        raise RequestError(f"{path} is empty.")
    state.documents.append(text)
    if match[2]:
        state.send(match[2])
    else:
        state.say(f"Read {path} ({len(text):,} characters); it goes before your next message.")


def _multi(state: ChatState, argument: str) -> None:
    state.say("Several lines; a line with a single . or /end sends them.")
    lines = [argument] if argument else []
    while True:
        try:
            line = state.read_line("... ")
        except (EOFError, KeyboardInterrupt):
            state.say("Nothing was sent.")
            return
        if line.strip() in (".", "/end"):
            break
        lines.append(line)
    text = "\n".join(lines)
    if text.strip():
        state.send(text)
    else:
        state.say("Nothing was sent.")


def _set(state: ChatState, argument: str) -> None:
    options = {option.name: option for option in CHAT_SAMPLING}
    key, _, value = argument.partition(" ")
    key = key.replace("-", "_").lower()
    if not key:
        for name in options:
            state.say(f"{name} = {_shown(getattr(state.params, name))}")
        for name in _KEPT:
            state.say(f"{name} = {_shown(getattr(state.session.cache, name))}")
        return
    if key in _KEPT:
        _set_kept(state, key, value.strip())
        return
    if key in ("n", "logprobs"):
        raise ConfigError(f"{key} cannot be set in a chat, which shows one reply as text.")
    if key not in options:
        near = difflib.get_close_matches(key, [*options, *_KEPT], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "/set lists what there is."
        raise ConfigError(f"There is no setting {key}; {hint}")
    if value.strip():
        changed: dict[str, Any] = {key: parse_value(options[key], value.strip())}
        state.params = dataclasses.replace(state.params, **changed)
    state.say(f"{key} = {_shown(getattr(state.params, key))}")


def _set_kept(state: ChatState, key: str, value: str) -> None:
    """`/set policy NAME [BUDGET]` and `/set budget BUDGET`."""
    from minikv.cache.policies.registry import check_policy_name

    cache = state.session.cache
    if value:
        name, _, budget = value.partition(" ") if key == "policy" else ("", "", value)
        fields: dict[str, Any] = {}
        if name:
            check_policy_name(name)
            fields["policy"] = name
        if budget.strip():
            fields["budget"] = read_budget(budget)
        if cache.policy == "full" and name != "full" and len(fields) < len(_KEPT):
            raise ConfigError("Give a policy and its budget together, as in /set policy snapkv 0.1.")
        state.keep(changed(cache, fields))
    for name in _KEPT:
        state.say(f"{name} = {_shown(getattr(state.session.cache, name))}")


def _shown(value: Any) -> str:
    if value is None or value == () or value == {} or value == "":
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(repr(item) for item in value)
    return repr(value)


def _stats(state: ChatState, argument: str) -> None:
    if state.last is None:
        raise SessionError("There is no turn to report on yet.")
    state.say(f"Last turn: {summary(state.last)}")
    if state.last.first_token_s is not None:
        state.say(
            f"First token after {state.last.first_token_s:.2f} s, whole reply {state.last.seconds:.2f} s"
        )
    if state.last.result is not None:
        usage = state.last.result.usage
        state.say(f"{usage.reused_tokens} of {usage.prompt_tokens} prompt tokens were still in the KV cache.")


def _kv(state: ChatState, argument: str) -> None:
    chat_kv.describe(state, argument)


def _save(state: ChatState, argument: str) -> None:
    if not argument:
        raise ConfigError("/save needs the name of a file.")
    chat_files.save(state, _path(argument))


def _load(state: ChatState, argument: str) -> None:
    if not argument:
        raise ConfigError("/load needs the name of a file.")
    chat_files.load(state, _path(argument))


def _exit(state: ChatState, argument: str) -> None:
    raise LeaveChat


def _path(argument: str) -> Path:
    quoted = len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "\"'"
    return user_path(argument[1:-1] if quoted else argument)


COMMANDS: dict[str, Command] = {
    "help": Command(_help, "", "list the commands"),
    "clear": Command(_clear, "", "forget the conversation; the system message stays"),
    "regen": Command(_regen, "", "answer the last message again"),
    "system": Command(_system, "[TEXT]", "show or set the system message; none removes it"),
    "read": Command(_read, "FILE [QUESTION]", "put a text file before the question or the next message"),
    "multi": Command(_multi, "", "write a message of several lines"),
    "set": Command(_set, "[KEY [VALUE]]", "show or change settings of sampling, or policy and budget"),
    "stats": Command(_stats, "", "tokens, speed and reuse of the last turn"),
    "kv": Command(_kv, "[LAYER]", "what the KV cache of the conversation holds, and its size"),
    "save": Command(_save, "FILE", "write the session with its KV cache; to FILE.json the messages alone"),
    "load": Command(_load, "FILE", "go on with a saved conversation"),
    "exit": Command(_exit, "", "leave"),
}
