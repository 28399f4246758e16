"""Text from files and standard input, and how documents and a question become one prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from minikv.cli.console import reason
from minikv.config import format_size
from minikv.errors import RequestError


def read_text_file(path: Path, limit: int | None = None) -> str:
    """The UTF-8 text of a file of at most `limit` bytes. Raises RequestError."""
    try:
        size = path.stat().st_size
        if limit is not None and size > limit:
            raise RequestError(
                f"{path} has {format_size(size)}, more than the model's context can hold; "
                f"at most {format_size(limit)} can be read."
            )
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"Cannot read {path}: {reason(error)}.") from None
    return _decode(data, str(path))


def read_stdin() -> str:
    """All of standard input as text. Raises RequestError when it is not UTF-8."""
    return _decode(sys.stdin.buffer.read(), "Standard input")


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
