"""Writes contexts with facts in them, and the questions about them. Everything follows from a seed.

Three kinds: prose with one needle of each format (`mixed`), prose with needles that resemble each
other (`alike`), and a list of nothing but facts (`records`). What a context holds does not depend on
which tasks are wanted, so tasks can be added to a run later.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from minikv.errors import ConfigError
from minikv.evals.frame import Frame, Ids
from minikv.evals.needles import Needle, like_needles, mixed_needles, records
from minikv.evals.questions import Dialogue, Haystack, Turn
from minikv.evals.text import Passage, Prose
from minikv.text.tokenizer import Tokenizer

# Which kind of context serves which task.
KIND_OF_TASK = {
    "needle": "mixed",
    "multi-needle": "alike",
    "kv-lookup": "records",
    "multi-turn": "mixed",
    "quote": "mixed",
    "perplexity": "mixed",
    "fidelity": "mixed",
}
CONTINUATION = 64  # tokens of the text's own continuation that are scored
REPLY = 48  # most tokens of the full cache's own reply
CUE, QUOTED = 12, 16  # tokens of a quotation that are given and scored

_LEAST_TEXT = 128
_MIXED_DEPTHS = (0.05, 0.25, 0.45, 0.65, 0.85)
_ALIKE_DEPTHS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
_QUOTE_DEPTHS = (0.15, 0.35, 0.55, 0.75)
_RECORD_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_PROSE_OPENING = "Read the text below carefully and answer the question after it.\n\n"
_RECORDS_OPENING = "Read the records below carefully and answer the question after them.\n"
_REPLY_QUESTION = "What is the text above about? Answer in a few sentences."


class Writer:
    """Contexts and questions for one tokenizer, of one text."""

    def __init__(self, tokenizer: Tokenizer, prose: Prose) -> None:
        self.tokenizer = tokenizer
        self.frame = Frame.of(tokenizer)
        self.prose = prose

    def write(self, kind: str, length: int, seed: int) -> Haystack:
        """The context of a seed and its dialogues.

        length: tokens of the whole sample: template, context, question and answer. Raises ConfigError
        when it leaves no room for the text.
        """
        make = {"mixed": self._mixed, "alike": self._alike, "records": self._records}[kind]
        return make(random.Random(f"{kind} {seed}"), length)

    # Kinds of contexts

    def _mixed(self, rng: random.Random, length: int) -> Haystack:
        needles = mixed_needles(rng)
        shift = rng.randrange(len(needles))
        depths = [_MIXED_DEPTHS[(shift + i) % len(needles)] for i in range(len(needles))]
        turns = [self._ask(needle, depth) for needle, depth in zip(needles, depths, strict=True)]
        order = rng.sample(turns, 4)
        end = rng.randrange(len(self.prose.ids))
        dialogues = [
            *(Dialogue(("needle",), (turn,)) for turn in turns),
            Dialogue(("multi-turn",), (order[0], self._follow_up(order[1]))),
            Dialogue(("multi-turn",), (order[2], self._follow_up(order[3]))),
            Dialogue(("perplexity", "fidelity"), (self._go_on(end),)),
            Dialogue(("fidelity",), (self._reply(),)),
        ]
        body = self._prose_with(needles, depths, end, length, dialogues)
        for depth in _QUOTE_DEPTHS:
            dialogues.append(Dialogue(("quote",), (self._quote(body.quotation(depth), depth),)))
        return self._haystack(_PROSE_OPENING, body.ids(), dialogues)

    def _alike(self, rng: random.Random, length: int) -> Haystack:
        needles = like_needles(rng, len(_ALIKE_DEPTHS))
        end = rng.randrange(len(self.prose.ids))
        asked = [self._ask(needle, depth) for needle, depth in zip(needles, _ALIKE_DEPTHS, strict=True)]
        dialogues = [Dialogue(("multi-needle",), (turn,)) for turn in asked]
        body = self._prose_with(needles, _ALIKE_DEPTHS, end, length, dialogues)
        return self._haystack(_PROSE_OPENING, body.ids(), dialogues)

    def _records(self, rng: random.Random, length: int) -> Haystack:
        used = len(self._opening(_RECORDS_OPENING))
        lines: list[Ids] = []
        turns: list[Turn] = []
        longest = 0
        for record in records(rng):
            line, turn = self._plain("\n" + record.sentence), self._ask(record, 0.0)
            longest = max(longest, turn.num_tokens)
            used += len(line)
            if used + longest > length:
                break
            lines.append(line)
            turns.append(turn)
        if len(lines) < len(_RECORD_DEPTHS):
            raise ConfigError(f"A length of {length} tokens has no room for the records of kv-lookup.")
        asked = [replace(turns[int(depth * len(turns))], depth=depth) for depth in _RECORD_DEPTHS]
        dialogues = [Dialogue(("kv-lookup",), (turn,)) for turn in asked]
        return self._haystack(_RECORDS_OPENING, sum(lines, ()), dialogues)

    def _haystack(self, opening: str, body: Ids, dialogues: Sequence[Dialogue]) -> Haystack:
        ids = (*self._opening(opening), *body)
        return Haystack(ids[:-1], tuple(_begin_with(ids[-1:], dialogue) for dialogue in dialogues))

    def _prose_with(
        self,
        needles: Sequence[Needle],
        depths: Sequence[float],
        end: int,
        length: int,
        dialogues: Sequence[Dialogue],
    ) -> _Body:
        """As much text that ends at `end` as `length` leaves room for, with the needles in it."""
        sentences = [self._plain(" " + needle.sentence) for needle in needles]
        most = max(dialogue.num_tokens for dialogue in dialogues)
        fixed = len(self._opening(_PROSE_OPENING)) + sum(map(len, sentences)) + most
        room = length - fixed
        if room < _LEAST_TEXT:
            raise ConfigError(
                f"A length of {length} tokens has no room for the needles and questions; "
                f"with this tokenizer it must be at least {fixed + _LEAST_TEXT}."
            )
        if room > len(self.prose.ids):
            longest = fixed + len(self.prose.ids)
            raise ConfigError(f"A length of {length} tokens is too long: there is text for {longest}.")
        passage = self.prose.passage(end - room, room)
        return _Body(passage, dict(zip(depths, sentences, strict=True)))

    # Turns

    def _ask(self, needle: Needle, depth: float) -> Turn:
        prefix, gold = self._split(needle.prefix, needle.answer)
        question = self._plain(f"\n\nQuestion: {needle.question}")
        return Turn(needle.format, question, self.frame.tail, prefix, gold, depth)

    def _follow_up(self, turn: Turn) -> Turn:
        """The same question after another one was answered."""
        return replace(turn, question=(*self.frame.between, *turn.question))

    def _go_on(self, end: int) -> Turn:
        """The text itself goes on."""
        return Turn(f"text{CONTINUATION}", (), (), (), self.prose.passage(end, CONTINUATION).ids)

    def _reply(self) -> Turn:
        question = self._plain(f"\n\nQuestion: {_REPLY_QUESTION}")
        suffix, last = self.frame.tail[:-1], self.frame.tail[-1:]
        return Turn(f"reply{REPLY}", question, suffix, last, (), reply=REPLY)

    def _quote(self, quotation: Ids, depth: float) -> Turn:
        """A sentence of the text begins again; all but the last token of the cue are the question."""
        cue, gold = quotation[:CUE], quotation[CUE:]
        question = (*self._plain("\n\n"), *cue[:-1])
        return Turn(f"quote{QUOTED}", question, (), cue[-1:], gold, depth)

    # Token ids

    def _opening(self, text: str) -> Ids:
        return (*self.frame.head, *self._plain(text))

    def _plain(self, text: str) -> Ids:
        return tuple(self.tokenizer.encode_rendered(text))

    def _split(self, prefix: str, answer: str) -> tuple[Ids, Ids]:
        """Ids of a beginning and of what follows it; a token across the border counts as the answer's."""
        alone, whole = self._plain(prefix), self._plain(prefix + answer)
        same = 0
        while same < len(alone) and alone[same] == whole[same]:
            same += 1
        return whole[:same], whole[same:]


class _Body:
    """A passage with sentences put in at breaks near given depths (0 to 1)."""

    def __init__(self, passage: Passage, sentences: dict[float, Ids]) -> None:
        self._passage = passage
        self._put_in = sorted((passage.near(depth), ids) for depth, ids in sentences.items())

    def ids(self) -> Ids:
        """The whole text."""
        out: list[int] = []
        last = 0
        for place, sentence in self._put_in:
            out += self._passage.ids[last:place] + sentence
            last = place
        return (*out, *self._passage.ids[last:])

    def quotation(self, depth: float) -> Ids:
        """The first tokens of a sentence near `depth`, none of which is another's."""
        size, count = len(self._passage.ids), CUE + QUOTED
        places = [place for place, _ in self._put_in]

        def whole(start: int) -> bool:
            return start + count <= size and not any(start < place < start + count for place in places)

        start = self._passage.near(depth, whole)
        return self._passage.ids[start : start + count]


def _begin_with(ids: Ids, dialogue: Dialogue) -> Dialogue:
    """The dialogue with `ids` before its first question, or before its prefix if it has no question."""
    first, *rest = dialogue.turns
    name = "question" if first.question else "prefix"
    begun = replace(first, **{name: (*ids, *getattr(first, name))})
    return replace(dialogue, turns=(begun, *rest))
