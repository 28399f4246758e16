"""Text from files and standard input, and how documents and a question become one prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from minikv.cli.console import reason
from minikv.config import format_size
from minikv.errors import ConfigError, RequestError

# More than the longest context of any model holds as text.
LARGEST_TEXT = 256 << 20


def user_path(text: str) -> Path:
    """The path a person typed, `~` expanded. Raises ConfigError when no file can have that name."""
    if "\0" in text:
        raise ConfigError("A file name cannot hold a NUL character.")
    return Path(os.path.expanduser(text))


def refuse_special(path: Path) -> None:
    """Raise RequestError for a pipe or a device, which may never end or never begin."""
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():
            raise RequestError(f"{path} is not a regular file.")
    except OSError as error:
        raise RequestError(f"Cannot read {path}: {reason(error)}.") from None


def read_text_file(path: Path, limit: int = LARGEST_TEXT) -> str:
    """The UTF-8 text of a file of at most `limit` bytes. Raises RequestError."""
    try:
        with path.open("rb") as file:
            # Devices and pipes have no size to look at first.
            data = file.read(limit + 1)
    except OSError as error:
        raise RequestError(f"Cannot read {path}: {reason(error)}.") from None
    if len(data) > limit:
        raise RequestError(
            f"{path} is longer than the {format_size(limit)} that the model's context can hold."
        )
    return _decode(data, str(path))


def read_stdin() -> str:
    """All of standard input as text, "" when it is closed. Raises RequestError when it is not UTF-8."""
    if sys.stdin is None:
        return ""
    try:
        data = sys.stdin.buffer.read()
    except OSError as error:
        raise RequestError(f"Cannot read standard input: {reason(error)}.") from None
    return _decode(data, "Standard input")


def _decode(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise RequestError(f"{where} is not a text file in UTF-8.")
    return text


def join_prompt(documents: Sequence[str], question: str | None) -> str:
    """Documents first, the question last, a blank line between two."""
    parts = [document.rstrip("\n") for document in documents]
    return "\n\n".join(part for part in (*parts, question or "") if part.strip())


def encodable(text: str) -> bool:
    """False for text with half of a surrogate pair, which JSON can write but UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
