"""Line editing for the chat: history, completion of command names, and what Ctrl-C means."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

# A Ctrl-C this soon after the prompt appears was meant for the reply that has just ended.
_LATE_CTRL_C_S = 0.3


def line_reader(commands: Sequence[str], *, keep_history: bool) -> Callable[[str], str]:
    """A function that shows a prompt and returns a line.

    It raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C, both at an empty line only: in a
    line that has text Ctrl-C empties it. Lines of a continuation prompt stay out of the history.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import DummyHistory, InMemoryHistory
    from prompt_toolkit.output import create_output

    shown_at = 0.0
    # Replies may be redirected; the editor needs the terminal itself.
    output = create_output(always_prefer_tty=True)
    keys = key_bindings(lambda: time.monotonic() - shown_at)
    names = WordCompleter([f"/{name}" for name in commands], sentence=True)
    main: PromptSession[str] = PromptSession(
        history=line_history() if keep_history else InMemoryHistory(),
        completer=names,
        complete_while_typing=False,
        key_bindings=keys,
        output=output,
    )
    more: PromptSession[str] = PromptSession(history=DummyHistory(), key_bindings=keys, output=output)

    def read_line(prompt: str) -> str:
        nonlocal shown_at
        shown_at = time.monotonic()
        return (main if prompt == "> " else more).prompt(prompt)

    return read_line


def key_bindings(prompt_age: Callable[[], float]) -> KeyBindings:
    """What Ctrl-C does; `prompt_age` is the time in seconds since the prompt appeared."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        elif prompt_age() > _LATE_CTRL_C_S:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def line_history() -> History:
    """Lines kept in the model cache; in memory alone where they cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from minikv.models.sources import model_cache_dir

    class SafeHistory(FileHistory):
        """A full disk, or a line that is not valid text, costs its history and not the chat."""

        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeError):
                super().store_string(string)

    path = model_cache_dir() / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        return SafeHistory(path)
    except OSError:
        return InMemoryHistory()
