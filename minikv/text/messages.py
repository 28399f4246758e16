"""Check and normalise the messages of a conversation before a template sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from minikv.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


def normalise_messages(messages: Any, extra_roles: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Fresh plain messages, each with a text `content`; other keys are kept, null ones dropped.

    A list of `{"type": "text"}` parts is joined as it stands. Only an assistant message with
    `tool_calls` may lack content. Raises RequestError naming the message at fault (counted from 1).
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of messages, not {type(messages).__name__}.")
    if not messages:
        raise RequestError("messages must hold at least one message, but the list is empty.")
    roles = (*ROLES, *extra_roles)
    return [_normalise_message(message, number, roles) for number, message in enumerate(messages, 1)]


def _normalise_message(message: Any, number: int, roles: Sequence[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f'Message {number} must be an object with "role" and "content", not {type(message).__name__}.'
        )
    role = message.get("role")
    if role is None:
        raise RequestError(f'Message {number} has no "role".')
    if not isinstance(role, str) or role not in roles:
        raise RequestError(f"Message {number} has the unknown role {role!r}; use {', '.join(ROLES[:-1])}.")
    plain = plain_data(message, f"message {number}")
    # Templates print a null as "None" but understand a key that is not there.
    plain = {key: value for key, value in plain.items() if value is not None}
    if "content" in plain:
        plain["content"] = _flatten_content(plain["content"], number)
    elif not plain.get("tool_calls"):
        raise RequestError(f'Message {number} (role {role}) has no "content".')
    return plain


def _flatten_content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"Message {number} must have text or a list of text parts as content, "
            f"not {type(content).__name__}."
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise RequestError(
                f"Message {number} has a content part of type {kind!r}, but only text parts are supported."
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f'Message {number} has a text part whose "text" is not a string.')
        texts.append(text)
    return "".join(texts)


def plain_data(value: Any, where: str) -> Any:
    """A copy of JSON-like data made of built-in types only. Raises RequestError for anything else.

    Templates come with the model and are not trusted: they must not meet an object with methods.
    """
    try:
        return _plain_data(value, where)
    except RecursionError as error:
        raise RequestError(f"The chat template cannot be given {where}: it is nested too deeply.") from error


def _plain_data(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {_plain_data(key, where): _plain_data(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item, where) for item in value]
    shown = repr(value) if isinstance(value, float) else f"a value of type {type(value).__name__}"
    raise RequestError(f"The chat template can only be given plain JSON data, but {where} holds {shown}.")
