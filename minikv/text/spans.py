"""Where the user's words end in a rendered conversation, and where the system message ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minikv.errors import MinikvError
from minikv.text.tokenizer import Tokenizer

# Of Unicode's private use, which no template writes.
_MARK = "\ue5a7"


def content_end(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], ids: Sequence[int], **template_kwargs: Any
) -> int | None:
    """How many of the `ids` of a rendered conversation come before what the template puts behind the
    last message's text; None where that cannot be told.

    A mark behind the text shows what the template adds, which must have tokens of its own.
    """
    marked = _rendered_with_mark(tokenizer, messages, len(messages) - 1, template_kwargs)
    if marked is None:
        return None
    suffix = tokenizer.encode_rendered(marked.rpartition(_MARK)[2])
    if not suffix or list(ids[-len(suffix) :]) != suffix:
        return None
    return len(ids) - len(suffix)


def system_end(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], ids: Sequence[int], **template_kwargs: Any
) -> int:
    """How many of the first `ids` of a rendered conversation are its system message; 0 without one."""
    if not messages or messages[0].get("role") != "system":
        return 0
    marked = _rendered_with_mark(tokenizer, messages, 0, template_kwargs)
    if marked is None:
        return 0
    prefix = tokenizer.encode_rendered(marked.partition(_MARK)[0])
    for place, (one, other) in enumerate(zip(prefix, ids, strict=False)):
        if one != other:
            return place
    return min(len(prefix), len(ids))


def _rendered_with_mark(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    which: int,
    template_kwargs: Mapping[str, Any],
) -> str | None:
    """The conversation with a mark behind the text of message `which`; None where it has no text or the
    template does something with it that hides the mark."""
    if not 0 <= which < len(messages):
        return None
    content = messages[which].get("content")
    if isinstance(content, str):
        marked = content + _MARK
    elif isinstance(content, Sequence):
        marked = [*content, {"type": "text", "text": _MARK}]
    else:
        return None
    changed = [*messages[:which], {**messages[which], "content": marked}, *messages[which + 1 :]]
    try:
        rendered = tokenizer.render_chat(changed, **template_kwargs)
    except MinikvError:
        return None
    return rendered if _MARK in rendered else None
