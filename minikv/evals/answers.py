"""Feeds questions and answers to sequences and returns how the answers are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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


class Answers:
    """Answers to the turns of a dialogue, each token given the right ones before it.

    asked: the first question, without its prefix, stands in the sequence already.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

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
        self, seqs: Sequence[int], dialogue: Dialogue, reference: Reference, *, asked: bool
    ) -> list[list[Tensor]]:
        """Per turn, per sequence the logits [n, vocab]; the sequences hold the dialogue afterwards."""
        if not seqs:
            return [[] for _ in dialogue.turns]
        answers: list[list[Tensor]] = []
        for index, turn in enumerate(dialogue.turns):
            before = reference.golds[:index]
            self._lead(seqs, turn, before[-1:], told=asked and index == 0)
            answers.append(self._score(seqs, turn, reference.golds[index]))
        return answers

    def _lead(self, seqs: Sequence[int], turn: Turn, before: Sequence[Ids], *, told: bool) -> None:
        """Feed all that comes before the last token of the prefix. The last token of the answer
        `before`, which nothing was predicted from, comes first."""
        ids = [token for gold in before for token in gold[-1:]]
        if not told:
            ids += (*turn.question, *turn.suffix)
        ids += turn.prefix[:-1]
        if ids:
            self._probe.feed_many(seqs, [ids] * len(seqs))

    def _score(self, seqs: Sequence[int], turn: Turn, gold: Ids) -> list[Tensor]:
        """Per sequence the logits that predict the tokens of `gold`."""
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
