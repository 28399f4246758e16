"""A context and what is asked about it, as token ids."""

from __future__ import annotations

from dataclasses import dataclass

from minikv.evals.frame import Ids


@dataclass(frozen=True)
class Turn:
    """One question and its answer.

    question: the user's text, the beginning of the turn included; suffix: the template's end of it.
    prefix: how the reply is made to begin, never empty: its last token predicts the first of `gold`.
    gold: the answer that is scored. Empty: the full cache's own reply of `reply` tokens.
    depth: where in the context the answer lies, from 0 (beginning) to 1; None if nowhere.
    """

    format: str
    question: Ids
    suffix: Ids
    prefix: Ids
    gold: Ids
    depth: float | None = None
    reply: int = 0

    @property
    def num_tokens(self) -> int:
        """Most tokens that the turn adds to the context."""
        parts = (self.question, self.suffix, self.prefix, self.gold)
        return sum(map(len, parts)) + self.reply


@dataclass(frozen=True)
class Dialogue:
    """Turns that follow each other on one context, scored for each of `tasks`."""

    tasks: tuple[str, ...]
    turns: tuple[Turn, ...]

    @property
    def num_tokens(self) -> int:
        """Most tokens that the turns add to the context."""
        return sum(turn.num_tokens for turn in self.turns)


@dataclass(frozen=True)
class Haystack:
    """A context, computed once, and all dialogues about it.

    ids: the beginning of the user's message and the text, up to its last token but one. The last
    token begins every dialogue, so that a dialogue without a question has something to predict from.
    """

    ids: Ids
    dialogues: tuple[Dialogue, ...]
