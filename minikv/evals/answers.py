"""Feeds questions and answers to sequences and returns how the answers are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.evals.copies import Copies, Copy, Held
from minikv.evals.frame import Ids
from minikv.evals.questions import Dialogue, Turn

if TYPE_CHECKING:
    from minikv.probe import Probe


@dataclass(frozen=True)
class Reference:
    """What the full cache says: per turn the answer that is scored [n] and its logits [n, vocab]."""

    golds: tuple[Ids, ...]
    logits: tuple[Tensor, ...]
    kv_bytes: int


@dataclass(frozen=True)
class Answer:
    """What a copy says in one turn, as logits [n, vocab], and what it holds meanwhile. No logits: nothing
    was taken from it, so it is the full cache, and answers like it."""

    logits: Tensor | None
    held: Held


class Answers:
    """Answers to the turns of a dialogue, each token given the right ones before it.

    asked: the first question, without its prefix, stands in the sequence already.
    """

    def __init__(self, probe: Probe, copies: Copies) -> None:
        self._probe = probe
        self._copies = copies

    def full(self, seq: int, dialogue: Dialogue, *, asked: bool) -> Reference:
        """Of the full cache in `seq`, which stays as it is."""
        held = self._probe.store.bytes_of(seq)
        copy = self._probe.fork(seq)
        try:
            golds: list[Ids] = []
            logits: list[Tensor] = []
            for index, turn in enumerate(dialogue.turns):
                self._lead([copy], turn, golds[-1:], told=asked and index == 0)
                if turn.gold:
                    golds.append(turn.gold)
                    logits.append(self._score([copy], turn, turn.gold)[0])
                else:
                    gold, rows = self._reply(copy, turn)
                    golds.append(gold)
                    logits.append(rows)
        finally:
            self._probe.close(copy)
        return Reference(tuple(golds), tuple(logits), held)

    def compressed(
        self, copies: Sequence[Copy], dialogue: Dialogue, reference: Reference, *, asked: bool
    ) -> list[list[Answer]]:
        """Per turn, per copy; their sequences hold the dialogue afterwards."""
        changed = [copy for copy in copies if not copy.unchanged]
        answers: list[list[Answer]] = []
        for index, turn in enumerate(dialogue.turns):
            self._lead_copies(changed, turn, reference.golds[:index][-1:], told=asked and index == 0)
            said = iter(self._score([copy.seq for copy in changed], turn, reference.golds[index]))
            answers.append([Answer(None if copy.unchanged else next(said), copy.held) for copy in copies])
        return answers

    def _lead_copies(self, copies: Sequence[Copy], turn: Turn, before: Sequence[Ids], *, told: bool) -> None:
        """Feed the same to copies. Those that demote begin a new turn with each question."""
        anew = [copy for copy in copies if copy.variant.demotes and turn.question and not told]
        for copy in anew:
            self._copies.begin(copy, (*_unread(before), *turn.question), turn.suffix)
        self._lead([copy.seq for copy in anew], turn, (), told=True)
        self._lead([copy.seq for copy in copies if copy not in anew], turn, before, told=told)

    def _lead(self, seqs: Sequence[int], turn: Turn, before: Sequence[Ids], *, told: bool) -> None:
        """Feed all that comes before the last token of the prefix, what is unread of the answer `before`
        first."""
        ids = [*_unread(before)]
        if not told:
            ids += (*turn.question, *turn.suffix)
        for part, reply in ((ids, False), (list(turn.prefix[:-1]), True)):
            if part and seqs:
                self._probe.feed_many(seqs, [part] * len(seqs), reply=reply)

    def _score(self, seqs: Sequence[int], turn: Turn, gold: Ids) -> list[Tensor]:
        """Per sequence the logits that predict the tokens of `gold`."""
        if not seqs:
            return []
        ids = (*turn.prefix[-1:], *gold[:-1])
        return self._probe.feed_many(seqs, [ids] * len(seqs), "all")

    def _reply(self, seq: int, turn: Turn) -> tuple[Ids, Tensor]:
        """The likeliest reply token by token, up to the end of the turn, which counts as a token."""
        gold: list[int] = []
        rows: list[Tensor] = []
        token = turn.prefix[-1]
        while len(gold) < turn.reply:
            rows += self._probe.feed_many([seq], [[token]])
            token = int(rows[-1].argmax())
            gold.append(token)
            if token in self._probe.tokenizer.eos_token_ids:
                break
        return tuple(gold), torch.stack(rows)


def _unread(before: Sequence[Ids]) -> Ids:
    """The last token of the answer before, if there was one: nothing was predicted from it."""
    return tuple(token for gold in before for token in gold[-1:])
