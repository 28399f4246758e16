"""Haystacks: generated prose of a wanted length with needles in it, where the needles lie known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minikv.calibration.languages import Language
from minikv.calibration.needles import Needle

_PARAGRAPH = (4, 7)  # sentences, from and to


@dataclass(frozen=True)
class Haystack:
    """text, and where each needle's answer lies in it: character offsets [start, stop)."""

    text: str
    spans: tuple[tuple[int, int], ...]


def prose(language: Language, size: int, measure: Callable[[str], int], rng: random.Random) -> list[str]:
    """Sentences that measure `size` together, or a little more; at least one."""
    sentences, total = [], 0
    while total < size or not sentences:
        sentences.append(language.sentence(rng))
        total += measure(" " + sentences[-1])
    return sentences


def hide(sentences: Sequence[str], needles: Sequence[Needle], rng: random.Random) -> Haystack:
    """Needles at random depths, one in each of as many equal parts of the prose, in random order."""
    order = rng.sample(range(len(needles)), len(needles))
    depths = [(part + rng.random()) / len(needles) for part in range(len(needles))]
    before = [int(depth * len(sentences)) for depth in depths]
    text, spans = _Text(rng), [(0, 0)] * len(needles)
    for index, sentence in enumerate(sentences):
        for place, needle in zip(before, order, strict=True):
            if place == index:
                start = text.add(needles[needle].text, needles[needle].inline) + needles[needle].start
                spans[needle] = (start, start + len(needles[needle].answer))
        text.add(sentence, inline=True)
    return Haystack(text.text, tuple(spans))


class _Text:
    """Text that grows by sentences, which share paragraphs, and by blocks, which do not."""

    def __init__(self, rng: random.Random):
        self.text = ""
        self._rng = rng
        self._left = 0  # sentences that the open paragraph still takes

    def add(self, piece: str, inline: bool) -> int:
        """Append; the offset where the piece begins."""
        if not inline:
            self._left = 0
        if self.text:
            self.text += " " if self._left else "\n\n"
        if inline:
            self._left = (self._left or self._rng.randint(*_PARAGRAPH)) - 1
        start = len(self.text)
        self.text += piece
        return start
