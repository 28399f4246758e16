"""Where output goes: the model's text and machine output to stdout, all else to stderr.

Notes and progress appear only when stderr is a terminal. Model text reaches a terminal without
control characters, so that no completion can move the cursor or recolour the screen.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from minikv.errors import MinikvError

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_COMPLAINT = 600
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# C0 but newline and tab, DEL, and C1 (a lone 0x9b begins an escape sequence on some terminals).
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class OutputError(MinikvError):
    """Standard output or an output file cannot be written."""


def stdin_is_terminal() -> bool:
    """False as well when stdin is closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def stdout_is_terminal() -> bool:
    """False as well when stdout is closed."""
    return sys.stdout is not None and sys.stdout.isatty()


def stderr_is_terminal() -> bool:
    """False as well when stderr is closed."""
    return sys.stderr is not None and sys.stderr.isatty()


def printable(text: str) -> str:
    """`text` without the control characters that a terminal would act on."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """`text` with every run of white space as one blank and no control characters."""
    return printable(" ".join(text.split()))


def reason(error: OSError) -> str:
    """What went wrong, as a clause: `no such file or directory`."""
    text = error.strerror or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


def write_text(text: str) -> None:
    """Write to stdout at once, unchanged unless stdout is a terminal. Raises OutputError."""
    if sys.stdout is None:
        raise OutputError("Standard output is closed, so there is nowhere to write the result.")
    try:
        sys.stdout.write(printable(text) if stdout_is_terminal() else text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise OutputError(f"Standard output cannot be written: {reason(error)}.") from None


def discard_stdout() -> None:
    """Send what is still buffered for stdout nowhere, so that the flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error_console() -> Console:
    """A rich console on stderr that prints text as it is: no markup, no highlighting, no emoji names."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)


def note(text: str, style: str = "dim") -> None:
    """One line on stderr for a person: nothing when stderr is not a terminal."""
    if stderr_is_terminal():
        error_console().print(printable(text), style=style)


def complain(sentence: str) -> None:
    """The one line on stderr that reports an error."""
    if sys.stderr is not None:
        line = one_line(sentence)
        if len(line) > LONGEST_COMPLAINT:  # a quoted name or value must not bury the sentence
            line = f"{line[: LONGEST_COMPLAINT // 2]} ... {line[-LONGEST_COMPLAINT // 2 :]}"
        print(f"minikv: {line}", file=sys.stderr, flush=True)


class _Complaints(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(record.getMessage())


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Warnings of the engine in the form of all that is said on stderr."""
    handler, logger = _Complaints(logging.WARNING), logging.getLogger("minikv")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the errors a user can meet into one line on stderr and an exit status, and warnings into lines."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with _warnings_shown():
                command(*args, **kwargs)
        except MinikvError as error:
            complain(str(error))
            raise typer.Exit(EXIT_FAILED) from None
        except BrokenPipeError:
            discard_stdout()
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except OSError as error:
            # Nothing else that a command opens reports its own failures as anything but MinikvError.
            discard_stdout()
            complain(f"{reason(error)[:1].upper()}{reason(error)[1:]}.")
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return run
