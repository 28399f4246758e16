"""Conversation files: the messages of a chat as JSON text, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minikv.cli.console import reason
from minikv.cli.inputs import encodable, refuse_special
from minikv.errors import RequestError, SessionError

FORMAT = "minikv-conversation"
VERSION = 1
_LARGEST_FILE = 64 << 20  # a device must not be read for ever
ROLES = ("system", "user", "assistant")


def save_transcript(path: Path, messages: Sequence[dict[str, str]], model: str) -> None:
    """Write the messages to `path` by way of a temporary file beside it.

    Replaces an earlier conversation, but no other kind of file. Raises SessionError.
    """
    if _exists(path):
        load_transcript(path)
    body = {"format": FORMAT, "version": VERSION, "model": model, "messages": list(messages)}
    text = json.dumps(body, ensure_ascii=False, indent=2) + "\n"
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except UnicodeError:
        raise SessionError(
            f"Cannot save to {path}: the conversation holds bytes that are not text."
        ) from None
    except OSError as error:
        raise SessionError(f"Cannot save to {path}: {reason(error)}.") from None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise SessionError(f"Cannot save to {path}: {reason(error)}.") from None


def load_transcript(path: Path) -> tuple[list[dict[str, str]], str | None]:
    """The messages of a saved conversation and the name of the model that it was held with, if known.

    Everything is checked before anything is returned. Raises SessionError.
    """
    try:
        refuse_special(path)
        with path.open("rb") as file:
            body = json.loads(file.read(_LARGEST_FILE))
    except RequestError as error:
        raise SessionError(str(error)) from None
    except OSError as error:
        raise SessionError(f"Cannot read {path}: {reason(error)}.") from None
    except (ValueError, RecursionError):
        raise SessionError(f"{path} is not a conversation saved by minikv.") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise SessionError(f"{path} is not a conversation saved by minikv.")
    if body.get("version") != VERSION or isinstance(body["version"], bool):
        raise SessionError(
            f"{path} has version {body.get('version')!r} of the conversation format; "
            f"this minikv reads version {VERSION}."
        )
    fault = _fault(body.get("messages"))
    if fault:
        raise SessionError(f"{path} cannot be used: {fault}.")
    messages = [{"role": m["role"], "content": m["content"]} for m in body["messages"]]
    model = body.get("model")
    return messages, model if isinstance(model, str) else None


def _fault(messages: Any) -> str | None:
    if not isinstance(messages, list):
        return "it has no list of messages"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"message {index + 1} needs a role of {', '.join(ROLES)}"
        content = message.get("content")
        if not isinstance(content, str) or not encodable(content):
            return f"message {index + 1} has no text"
        if message["role"] == "system" and index > 0:
            return f"message {index + 1} is a system message, which can only come first"
    return None
