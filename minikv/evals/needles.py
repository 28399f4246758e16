"""Sentences with a fact that can be asked for: the formats that small models handle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain


def _words(text: str) -> list[str]:
    return text.split()


_ADJECTIVES = _words(
    "brave silent purple golden hidden frozen gentle lucky rapid wooden crimson ancient distant clever "
    "humble polished crooked dusty narrow stormy"
)
_NOUNS = _words(
    "basket candle desert forest hammer jacket kettle lemon marble pencil rabbit saddle ticket window "
    "copper dragon falcon guitar helmet lantern meadow orchard pillow ribbon"
)
_TREASURES = _words(
    "compass violin mirror crown teapot telescope bracelet goblet statue feather clock sword drum carpet "
    "map pearl whistle locket"
)
_FIRST_NAMES = _words(
    "Maria John Aisha Peter Emma Victor Nina Samuel Grace Oliver Hannah Diego Laura Adam Robert Helen Marcus "
    "Julia Simon Clara"
)
_LAST_NAMES = _words(
    "Lopez Carter Khan Novak Clarke Reyes Petrova Osei Chen Stone Weiss Silva Rossi Fischer Moreau Larsen "
    "Hughes Patel Schmidt Murphy"
)
_CITIES = _words(
    "Lisbon Chicago Nairobi Prague Sydney Madrid Toronto Oslo Cairo Dublin Boston Seattle Vienna Athens "
    "Bangkok"
)


@dataclass(frozen=True)
class Needle:
    """A sentence for the context, the question that asks for it, how the answer begins, and the answer,
    which the sentence holds word for word, blank included."""

    format: str
    sentence: str
    question: str
    prefix: str
    answer: str


def mixed_needles(rng: random.Random) -> list[Needle]:
    """One needle of each format, with different names, in a fixed order."""
    first, last = rng.sample(_FIRST_NAMES, 2), rng.sample(_LAST_NAMES, 2)
    resident, subscriber = (" ".join(name) for name in zip(first, last, strict=True))
    return [
        _magic_number(_key(rng), _digits(rng, 7)),
        _sandwich(),
        _treasure(rng.choice(_TREASURES)),
        _city(resident, rng.choice(_CITIES)),
        _phone(subscriber, _digits(rng, 7)),
    ]


def like_needles(rng: random.Random, count: int) -> list[Needle]:
    """Needles of two formats in turn, of people who share no name: each is a distractor for the others."""
    first, last = rng.sample(_FIRST_NAMES, count), rng.sample(_LAST_NAMES, count)
    cities = rng.sample(_CITIES, count)
    names = [" ".join(name) for name in zip(first, last, strict=True)]
    return [
        _city(name, cities[i]) if i % 2 else _phone(name, _digits(rng, 4)) for i, name in enumerate(names)
    ]


def records(rng: random.Random) -> Iterator[Needle]:
    """Lines of a list, without end in practice: the shorter keys first, each once."""
    pairs = [f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
    rng.shuffle(pairs)
    triples = (f"{adjective}-{pair}" for pair in pairs for adjective in _ADJECTIVES if adjective not in pair)
    return (_record(key, _digits(rng, 7)) for key in chain(pairs, triples))


def _record(key: str, number: str) -> Needle:
    return Needle(
        "record7",
        f"The number of {key} is {number}.",
        f"What is the number of {key}?",
        f"The number of {key} is",
        f" {number}",
    )


def _key(rng: random.Random) -> str:
    return f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"


def _digits(rng: random.Random, count: int) -> str:
    return str(rng.randrange(10 ** (count - 1), 10**count))


def _magic_number(key: str, number: str) -> Needle:
    return Needle(
        "ruler7",
        f"One of the special magic numbers for {key} is: {number}.",
        f"What is the special magic number for {key} mentioned in the provided text?",
        f"The special magic number for {key} mentioned in the provided text is:",
        f" {number}",
    )


def _sandwich() -> Needle:
    best = "eat a sandwich and sit in Dolores Park on a sunny day"
    return Needle(
        "sandwich",
        f"The best thing to do in San Francisco is to {best}.",
        "What is the best thing to do in San Francisco?",
        "The best thing to do in San Francisco is to",
        f" {best}",
    )


def _treasure(thing: str) -> Needle:
    return Needle(
        "treasure",
        f"The hidden treasure of the old pirate is a {thing}.",
        "What is the hidden treasure of the old pirate?",
        "The hidden treasure of the old pirate is a",
        f" {thing}",
    )


def _city(name: str, city: str) -> Needle:
    return Needle(
        "city",
        f"{name} lives in the city of {city}.",
        f"In which city does {name} live?",
        f"{name} lives in the city of",
        f" {city}",
    )


def _phone(name: str, number: str) -> Needle:
    return Needle(
        f"phone{len(number)}",
        f"The phone number of {name} is {number}.",
        f"What is the phone number of {name}?",
        f"The phone number of {name} is",
        f" {number}",
    )
