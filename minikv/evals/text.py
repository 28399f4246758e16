"""The prose that contexts are filled with: Python's language reference, which lies in every installation.

Nothing is fetched. The text changes a little from one version of Python to the next, so its hash is
recorded with the results.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

from minikv.text.tokenizer import Tokenizer

_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_REACH = 0.05  # of a passage: how far from a wanted depth something may be put
_RULE = re.compile(r"[*=\-~^+|#_ ]{4,}")


def reference_prose() -> str:
    """The topics in alphabetical order: paragraphs on one line each, without drawn rules."""
    paragraphs = (part for name in sorted(topics) for part in _BLANK_LINE.split(topics[name]))
    lines = (" ".join(_RULE.sub(" ", paragraph).split()) for paragraph in paragraphs)
    return "\n\n".join(line for line in lines if line)


def text_hash(text: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Passage:
    """A run of tokens, and the places in it where a sentence or a paragraph begins."""

    ids: tuple[int, ...]
    breaks: tuple[int, ...]

    def near(self, depth: float, allowed: Callable[[int], bool] = lambda _: True) -> int:
        """The allowed break nearest to a depth (0 to 1), or where none is near, as in a long listing, the
        nearest allowed index."""
        place = round(depth * len(self.ids))
        reach = _REACH * len(self.ids)
        close = [i for i in self.breaks if abs(i - place) <= reach and allowed(i)]
        return min(close or filter(allowed, range(len(self.ids))), key=lambda i: abs(i - place))


class Prose:
    """A text as token ids, in a circle: after its end it begins again."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.ids = tokenizer.encode_rendered(text)
        words = _Words(tokenizer)
        pairs = zip(self.ids, self.ids[1:], strict=False)
        self._breaks = [i for i, (last, next_) in enumerate(pairs, 1) if words.part(last, next_)]

    def passage(self, start: int, count: int) -> Passage:
        """`count` tokens from an index on, which may be negative; at most the whole text."""
        assert count <= len(self.ids)
        first = start % len(self.ids)
        ids = (self.ids[first:] + self.ids[:first])[:count]
        breaks = sorted((i - first) % len(self.ids) for i in self._breaks)
        return Passage(tuple(ids), tuple(i for i in breaks if 0 < i < count))


class _Words:
    """What single tokens say about the borders of sentences, asked once per token of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = tokenizer.token_text
        self._known: dict[int, tuple[bool, bool, bool]] = {}

    def part(self, last: int, following: int) -> bool:
        """Whether a sentence or a paragraph ends with `last` and another begins with `following`."""
        ends, _, was_new_line = self._look_up(last)
        _, begins, new_line = self._look_up(following)
        return (new_line and not was_new_line) or (ends and begins)

    def _look_up(self, token_id: int) -> tuple[bool, bool, bool]:
        if token_id not in self._known:
            text = self._text(token_id)
            facts = (text.endswith((".", "!", "?")), text[:1].isspace(), text.startswith("\n"))
            self._known[token_id] = facts
        return self._known[token_id]
