"""Needles: a fact as text of some format, and the question that it answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from minikv.calibration.languages import Fact, Language


@dataclass(frozen=True)
class Needle:
    """A hidden fact.

    text: what is put into the haystack; the answer is text[start : start + len(answer)], after a blank.
    inline: a sentence of a paragraph, not lines of their own.
    reply: how an answer to `question` begins, up to the blank before the answer.
    """

    format: str
    kind: str
    text: str
    start: int
    answer: str
    inline: bool
    question: str
    reply: str


_Maker = Callable[[Language, Fact, str, str, random.Random], tuple[str, int]]


def make_needle(language: Language, fact: Fact, format: str, rng: random.Random) -> Needle:
    """A random needle of one kind and format."""
    subject = rng.choice(fact.subjects)
    answer = language.expand(rng.choice(fact.answers), rng)
    text, start = _MAKERS[format](language, fact, subject, answer, rng)
    full = fact.full.format(x=subject)
    # Half of the replies continue in the words of a sentence, half in those of a record.
    reply = (
        f"{full} {language.copula}" if rng.random() < 0.5 else f"{_capital(fact.label.format(x=subject))}:"
    )
    return Needle(
        format, fact.kind, text, start, answer, format == "sentence", fact.question.format(x=subject), reply
    )


def _sentence(
    language: Language, fact: Fact, subject: str, answer: str, rng: random.Random
) -> tuple[str, int]:
    before, after = rng.choice(fact.sentences).format(x=subject, answer="\0").split("\0")
    before = _capital(before)
    return before + answer + after, len(before)


def _key_value(
    language: Language, fact: Fact, subject: str, answer: str, rng: random.Random
) -> tuple[str, int]:
    key = _capital(fact.label.format(x=subject)) + ": "
    return key + answer, len(key)


def _comment(
    language: Language, fact: Fact, subject: str, answer: str, rng: random.Random
) -> tuple[str, int]:
    name = rng.choice(("load", "update", "check_all", "main", "export"))
    mark, head, body = rng.choice(
        (
            ("#", f"def {name}(items):", f"    return [item for item in items if {name}_one(item)]"),
            ("//", f"int {name}(int count) {{", "    return count > 0 ? count - 1 : 0;\n}"),
        )
    )
    before = f"{head}\n    {mark} {fact.label.format(x=subject)}: "
    return f"{before}{answer}\n{body}", len(before)


def _list(language: Language, fact: Fact, subject: str, answer: str, rng: random.Random) -> tuple[str, int]:
    rows = [f"- {fact.label.format(x=other)}: " for other in _decoys(fact, subject, rng)]
    return _rows(rows, "", f"- {fact.label.format(x=subject)}: ", answer, "", language, fact, rng)


def _table(language: Language, fact: Fact, subject: str, answer: str, rng: random.Random) -> tuple[str, int]:
    first, second = language.table_head
    head = f"| {first} | {second} |\n|---|---|\n"
    rows = [f"| {fact.label.format(x=other)} | " for other in _decoys(fact, subject, rng)]
    return _rows(rows, head, f"| {fact.label.format(x=subject)} | ", answer, " |", language, fact, rng)


def _rows(
    decoys: list[str],
    head: str,
    key: str,
    answer: str,
    end: str,
    language: Language,
    fact: Fact,
    rng: random.Random,
) -> tuple[str, int]:
    """The needle's row at a random place among rows of the same kind with other values."""
    values = [value for value in fact.answers if value != answer]
    lines = [decoy + language.expand(rng.choice(values or fact.answers), rng) + end for decoy in decoys]
    place = rng.randint(0, len(lines))
    before = head + "".join(f"{line}\n" for line in lines[:place])
    lines.insert(place, key + answer + end)
    return head + "\n".join(lines), len(before) + len(key)


def _decoys(fact: Fact, subject: str, rng: random.Random) -> list[str]:
    return rng.sample([other for other in fact.subjects if other != subject], 2)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


_MAKERS: dict[str, _Maker] = {
    "sentence": _sentence,
    "key_value": _key_value,
    "list": _list,
    "comment": _comment,
    "table": _table,
}
FORMATS = tuple(_MAKERS)
