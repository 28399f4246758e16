"""The course of a sequence: its turns, and at which tokens its lanes were compressed.

Lanes that are given up when memory is short can be computed again along it, to the same entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from minikv.cache.compress import Ranges
from minikv.cache.evidence import Recorded, Recorder
from minikv.cache.tiers.below import Below
from minikv.scheduler.retention import Retention

if TYPE_CHECKING:
    from minikv.models.config import ModelConfig
    from minikv.models.rope import Rope

_LONG_AGO = 1 << 40


@dataclass(eq=False)
class Turn:
    """A prompt or a further part of a conversation, with what the model says to it.

    start: first position that it computed itself. num_prompt: tokens up to the model's reply.
    content: positions whose queries tell what matters. pinned: token ranges that stay.
    restored: it began with everything that had been demoted put back; `before` was recorded until then.
    staged: what comes before a row is below the pool while its prompt is computed, and is put into it layer
        by layer.
    """

    retention: Retention
    start: int
    num_prompt: int
    content: range
    pinned: Ranges = ()
    recorder: Recorder | None = None
    restored: bool = False
    staged: bool = False
    before: Recorder | None = None

    def new_recorder(self, config: ModelConfig, rope: Rope) -> Recorder:
        """A recorder that knows nothing of the turns before."""
        evidence, rolling = self.retention.evidence, self.retention.streaming
        return Recorder(evidence, config, rope, self.content, resumes=self.resumes, rolling=rolling)

    @property
    def resumes(self) -> int | None:
        """Position from which what the model says counts as well, where it is judged at all."""
        return self.num_prompt if self.retention.slack is not None else None

    def asks_the_same(self, other: Turn) -> bool:
        """Whether both are the same but for what was recorded."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("retention", "start", "num_prompt", "content", "pinned")
        )


@dataclass(frozen=True)
class Compression:
    """That the lanes were, or are to be, compressed once `num_tokens` tokens are computed."""

    turn: Turn
    num_tokens: int
    room: int


@dataclass
class Course:
    """How a sequence came to hold what it holds: its turns, and where it was compressed.

    Lanes that were given up are computed again along the same course: `done` counts the compressions
    that the present lanes have been through, `peak` is the most pages that they held at once. `below` holds
    what was demoted before each of them, if anything was.
    """

    turns: list[Turn] = field(default_factory=list)
    compressions: list[Compression] = field(default_factory=list)
    done: int = 0
    peak: int = 0
    below: Below | None = None

    @property
    def zooms(self) -> bool:
        """Whether the lanes may hold spans that are zoomed in, from what is below."""
        return any(turn.retention.zooms for turn in self.turns)

    def turn_at(self, num_computed: int) -> Turn:
        """The turn that the next row belongs to."""
        return next(turn for turn in reversed(self.turns) if turn.start <= num_computed)

    def rows_allowed(self, wanted: int, num_computed: int, lengths: np.ndarray) -> int:
        """How many of `wanted` rows may be computed before something else has to happen; 0: a compression
        is due. lengths: entries of each lane."""
        current = self.turns[-1]
        wanted = min(wanted, self.rows_together(num_computed, lengths) or wanted)
        if self.done == len(self.compressions) and num_computed >= current.start:
            last = self.compressions[-1].num_tokens if self.compressions else -_LONG_AGO
            since = num_computed - last
            return current.retention.rows_allowed(wanted, lengths, num_computed, current.num_prompt, since)
        # Along a known course up to the next compression, and to the next turn, which records for itself.
        stops = [c.num_tokens for c in self.compressions[self.done : self.done + 1]]
        stops += [turn.start for turn in self.turns if turn.start > num_computed][:1]
        return min([wanted, *(stop - num_computed for stop in stops)])

    def rows_together(self, num_computed: int, lengths: np.ndarray) -> int:
        """How many rows from the next one on choose together which spans are zoomed in; 0 where there are
        none. That depends on places alone, so that the same rows do when they are computed again."""
        turn = self.turn_at(num_computed)
        reads = num_computed < turn.num_prompt
        # What is staged is there as it was computed.
        if (turn.staged and reads) or not turn.retention.has_spans(num_computed, lengths):
            return 0
        if not reads:
            return 1
        size = turn.retention.routed
        return min(size - (num_computed - turn.start) % size, turn.num_prompt - num_computed)

    def due(self, num_computed: int, lengths: np.ndarray) -> Compression | None:
        """The compression that has to happen now, or None."""
        if self.done < len(self.compressions):
            again = self.compressions[self.done]
            return again if again.num_tokens == num_computed else None
        turn = self.turns[-1]
        if turn.retention.keeps_all or num_computed < turn.start:
            return None
        last = self.compressions[-1] if self.compressions else None
        if last is not None and last.turn is turn and last.num_tokens == num_computed:
            return None
        if num_computed != turn.num_prompt and self.rows_allowed(1, num_computed, lengths):
            return None
        return Compression(turn, num_computed, turn.retention.room(num_computed, turn.num_prompt))

    def take(self, compression: Compression) -> None:
        """Count a compression that `due` gave as done."""
        if self.done == len(self.compressions):
            self.compressions.append(compression)
        self.done += 1

    def recorder_at(self, num_computed: int, config: ModelConfig, rope: Rope) -> Recorder | None:
        """The recorder of the turn that the next row belongs to, made when its first row comes."""
        turn = self.turn_at(num_computed)
        evidence = turn.retention.evidence
        if turn.recorder or not evidence.records:
            return turn.recorder
        before = self._recorder_before(turn)
        if before is not None and before.evidence is evidence:
            turn.recorder = before.continued(turn.content, turn.resumes, turn.retention.streaming)
        else:
            turn.recorder = turn.new_recorder(config, rope)
        for earlier in self.turns[: self.turns.index(turn)]:
            earlier.recorder = None
        return turn.recorder

    def recorded(self, compression: Compression) -> Recorded:
        """The evidence for a compression; before the first row of a turn that of the turn before."""
        turn = compression.turn
        recorder = turn.recorder or self._recorder_before(turn)
        return Recorded() if recorder is None else recorder.result()

    def _recorder_before(self, turn: Turn) -> Recorder | None:
        earlier = reversed(self.turns[: self.turns.index(turn)])
        return next((t.recorder for t in earlier if t.recorder is not None), None)

    def begin(self, turn: Turn, restored: bool) -> None:
        """Go on with a further turn, before which everything was put back or not. Of those before it only the
        last can still be gone back to: what was recorded before each is of many megabytes."""
        turn.restored = restored
        for earlier in self.turns[:-1]:
            earlier.restored, earlier.before = False, None
        if restored:
            recorder = next((t.recorder for t in reversed(self.turns) if t.recorder is not None), None)
            turn.before = None if recorder is None else recorder.copy()
            # What all of them did is undone, for lanes that had been given up as well.
            self.done = len(self.compressions)
        self.turns.append(turn)

    def rewind(self, num_tokens: int) -> bool:
        """Go back to where the turn began whose first token is `num_tokens`, if all that was there then can
        be put back; the lanes are to be filled again. What was decided since is repeated, or forgotten by
        `cut`.
        """
        turn = next((turn for turn in self.turns if turn.start == num_tokens), None)
        if turn is None or not turn.restored or self.below is None or not self.below.covers(num_tokens):
            return False
        place = self.turns.index(turn)
        assert place, "nothing was put back for the first turn"
        for later in self.turns[place:]:
            later.recorder = None
        self.turns[place - 1].recorder = None if turn.before is None else turn.before.copy()
        self.done = sum(c.turn in self.turns[:place] for c in self.compressions)
        return True

    def stop(self, num_tokens: int) -> None:
        """End after `num_tokens` tokens; what was to be done again and was not is forgotten."""
        del self.compressions[self.done :]
        self.cut(num_tokens, held=True)

    def restart(self) -> None:
        """Begin again with empty lanes, and with nothing below them."""
        self.done = 0
        self.forget_below()
        for turn in self.turns:
            turn.recorder = None
            turn.restored = False
            # Computed again, a later turn goes on from what the lanes then hold.
            turn.staged = turn.staged and not turn.start

    def forget_below(self) -> None:
        """Give up what was demoted."""
        if self.below is not None:
            self.below.forget()
            self.below = None

    def knows_more_than(self, num_tokens: int) -> bool:
        """Whether what the lanes hold of the first `num_tokens` tokens, or what will be dropped of it,
        depends on tokens after them."""
        return any(c.num_tokens > num_tokens for c in self.compressions[: self.done]) or any(
            turn.recorder is not None and turn.recorder.keeps_traces(num_tokens) for turn in self.turns
        )

    def start_of_question(self, num_tokens: int) -> int:
        """`num_tokens`, or where a compressed turn began whose prompt goes on after them: another prompt in
        its place is to be judged by as a whole."""
        turn = next((t for t in self.turns if t.start < num_tokens < t.num_prompt), None)
        return num_tokens if turn is None or turn.retention.keeps_all else turn.start

    def cut(self, num_tokens: int, held: bool) -> None:
        """Forget all that happened after the first `num_tokens` tokens. held: there are lanes."""
        if self.below is not None:
            self.below.cut(num_tokens, held)
        self.turns = [turn for turn in self.turns if turn.start < num_tokens]
        for turn in self.turns:
            if turn.recorder is not None:
                turn.recorder.forget(num_tokens)
        self.compressions = [
            c for c in self.compressions if c.num_tokens <= num_tokens and c.turn in self.turns
        ]
        self.done = min(self.done, len(self.compressions))

    def fork(self) -> Course:
        """An independent course for a copy of the lanes."""
        copies = {turn: _copied(turn) for turn in self.turns}
        compressions = [Compression(copies[c.turn], c.num_tokens, c.room) for c in self.compressions]
        below = None
        if self.below is not None and self.zooms:
            below = self.below.copy()
        return Course(list(copies.values()), compressions, self.done, self.peak, below)


def _copied(turn: Turn) -> Turn:
    recorder = None if turn.recorder is None else turn.recorder.copy()
    return replace(turn, recorder=recorder, restored=False, before=None)
