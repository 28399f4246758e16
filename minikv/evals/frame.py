"""The chat template around a context, as token ids in pieces."""

from __future__ import annotations

from dataclasses import dataclass

from minikv.errors import TemplateError
from minikv.text.tokenizer import Tokenizer

Ids = tuple[int, ...]

_MARKS = ("@@0@@", "@@1@@", "@@2@@")


@dataclass(frozen=True)
class Frame:
    """What stands before a user's text, between it and the reply, and between a reply and the next
    user's text. A model without a chat template gets plain lines instead."""

    head: Ids
    tail: Ids
    between: Ids

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Frame:
        """The pieces of a model's template. Raises TemplateError when the template hides a message."""
        if not tokenizer.has_chat_template:
            plain = tokenizer.encode_rendered
            return cls(tuple(tokenizer.encode("")), tuple(plain("\nAnswer:")), tuple(plain("\n")))
        first, reply, second = _MARKS
        messages = [{"role": "user", "content": first}, {"role": "assistant", "content": reply}]
        messages.append({"role": "user", "content": second})
        # The switch of reasoning models: the answer is scored right after the template, not after a thought.
        once = tokenizer.render_chat(messages[:1], enable_thinking=False)
        twice = tokenizer.render_chat(messages, enable_thinking=False)
        texts = (_cut(once, "", first), _cut(once, first, ""), _cut(twice, reply, second))
        head, tail, between = (tuple(tokenizer.encode_rendered(text)) for text in texts)
        return cls(head, tail, between)


def _cut(rendered: str, start: str, end: str) -> str:
    """What stands between two marks; "" means the beginning or the end."""
    if any(mark not in rendered for mark in (start, end)):
        raise TemplateError("The chat template does not show a message as it is, so it cannot be evaluated.")
    rest = rendered.split(start, 1)[1] if start else rendered
    return rest.split(end, 1)[0] if end else rest
