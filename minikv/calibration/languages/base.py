"""What a calibration language is: a grammar of varied prose, and facts that can be hidden in it."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Fact:
    """One kind of fact: a property of any of `subjects`, with a value of `answers`.

    label: its name, with {x} for the subject. full: the same with its article, as a sentence begins.
    question: asks for it. sentences: ways to state it, with {x} and {answer}; a blank stands before
    {answer}, as it does in every other format, so that the answer has the same tokens everywhere.
    answers: values; {number} and {date} in them are filled in at random.
    """

    kind: str
    label: str
    full: str
    question: str
    sentences: tuple[str, ...]
    subjects: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Language:
    """All texts of one language.

    patterns: sentences with {slot} for one of `slots`, which may hold slots in turn.
    task, question, answer: the words around a question. copula: between a fact's name and its value.
    table_head: titles of a table of two columns. months: for dates, in `date`'s place for {month}.
    """

    code: str
    patterns: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]]
    facts: tuple[Fact, ...]
    task: str
    question: str
    answer: str
    copula: str
    table_head: tuple[str, str]
    months: tuple[str, ...]
    date: str = "{day} {month} {year}"

    def sentence(self, rng: random.Random) -> str:
        """One random sentence of prose."""
        text = self.expand(rng.choice(self.patterns), rng)
        return text[0].upper() + text[1:]

    def expand(self, text: str, rng: random.Random) -> str:
        """`text` with every slot filled in."""
        return _SLOT.sub(lambda slot: self.expand(self._fill(slot.group(1), rng), rng), text)

    def _fill(self, name: str, rng: random.Random) -> str:
        if name == "number":
            return str(rng.randint(1_000_000, 9_999_999))
        if name == "date":
            day, month, year = rng.randint(1, 28), rng.choice(self.months), rng.randint(1701, 1999)
            return self.date.format(day=day, month=month, year=year)
        return rng.choice(self.slots[name])
