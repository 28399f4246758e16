"""`/save`, `/load` and `--session` of the chat: a conversation in a file.

A name that ends in `.json` stands for the messages alone, as text that anything can read; every other for the
whole session with its KV cache. What a file holds is seen when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minikv.cli import console
from minikv.cli.chat_state import ChatState
from minikv.cli.compression import option_fields, same_value
from minikv.cli.inputs import user_path
from minikv.cli.transcript import load_transcript, save_transcript
from minikv.config import format_size
from minikv.errors import ConfigError, MinikvError, SessionError, shown

if TYPE_CHECKING:
    from minikv import LLM, ChatSession


def save(state: ChatState, path: Path) -> None:
    """`/save`. Raises SessionError."""
    messages = f"{len(state.session.messages)} messages"
    if path.suffix == ".json":
        save_transcript(path, state.session.messages, state.llm.name)
        state.say(f"Saved {messages} to {path}.")
    else:
        state.session.save(path)
        state.say(f"Saved {messages} and {_held(state.session)} to {path}.")


def load(state: ChatState, path: Path) -> None:
    """`/load`. Raises SessionError, and the conversation is then as before."""
    if not _holds_session(path):
        messages, model = load_transcript(path)
        state.session.set_messages(messages)
        held = "" if model in (state.llm.name, None) else f", held with {model}"
        state.say(f"Loaded {len(messages)} messages{held}.")
    else:
        session = state.llm.load_session(path)
        state.session.close()
        state.session = session
        if state.session_file is not None:
            state.session_file = path
        state.say(loaded(session, path))
    state.documents.clear()
    state.last = None


def _holds_session(path: Path) -> bool:
    from minikv.sessions.container import Unusable, is_session_file

    try:
        return is_session_file(path)
    except (OSError, Unusable):
        return False  # a transcript is looked for next, and the reason found again


def loaded(session: ChatSession, path: Path) -> str:
    """That a session was loaded, and under which policy it goes on."""
    cache = session.cache
    policy = "" if cache.policy == "full" else f", under policy {cache.policy} with budget {cache.budget}"
    return f"Loaded {len(session.messages)} messages and {_held(session)} from {path}{policy}."


def _held(session: ChatSession) -> str:
    if not session.num_tokens:
        return "an empty KV cache"
    sizes = [format_size(session.kv_bytes)] if session.kv_bytes else []
    if session.demoted_bytes:
        sizes.append(f"{format_size(session.demoted_bytes)} demoted")
    return f"the KV cache of {session.num_tokens:,} tokens ({' and '.join(sizes)})"


def goes_on(name: str | None) -> bool:
    """Whether `--session` names a file that is there: what the conversation keeps is then said in it."""
    return name is not None and os.path.exists(user_path(name))


def open_session(
    llm: LLM, name: str, system: str | None, compression: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[ChatSession, Path, bool]:
    """`--session`: the session of that file, or a new one, which is written at once, so that a file that
    cannot be is found out before anything is said. Also its path, and whether it is a new one.

    compression, arguments: what the command line says of the KV cache and to the template. A session keeps
    its own; ConfigError where something else was asked for.
    """
    path = user_path(name)
    if path.suffix == ".json":
        raise ConfigError(f"{path} would hold messages alone; give --session a name without .json.")
    if not os.path.exists(path):
        session = llm.chat_session(system, **arguments)
        session.save(path)
        return session, path, True
    session = llm.load_session(path)
    try:
        _check_options(session, path, compression, arguments)
        current = [m["content"] for m in session.messages if m["role"] == "system"]
        if system is not None and current != [system]:
            session.set_system(system)
    except MinikvError:
        session.close()
        raise
    return session, path, False


def _check_options(
    session: ChatSession, path: Path, compression: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    for name, value in option_fields(compression).items():
        own = getattr(session.cache, name)
        if not same_value(name, own, value):
            change = f", or change it in the chat with /set {name}" if name in ("policy", "budget") else ""
            raise ConfigError(
                f"{path} is a conversation with {name} {shown(own)}, not {shown(value)}; leave the option "
                f"out{change}."
            )
    for name, value in arguments.items():
        own = session.template_args.get(name)
        if own != value:
            raise ConfigError(
                f"{path} is a conversation with the template argument {name} {shown(own)}, not "
                f"{shown(value)}; leave the option out."
            )


class Keeper:
    """Keeps the session file of a chat as new as the conversation."""

    def __init__(self, state: ChatState) -> None:
        self._state = state
        self._kept = self._present()

    def keep(self) -> None:
        """Write the file if anything has changed since. An error is one line, and the chat goes on."""
        present = self._present()
        if self._state.session_file is None or present == self._kept:
            return
        try:
            self._state.session.save(self._state.session_file)
        except SessionError as error:
            console.complain(str(error))
        else:
            self._kept = present

    def _present(self) -> tuple[Any, ...]:
        session = self._state.session
        return self._state.session_file, session.messages, session.cache, session.num_tokens
