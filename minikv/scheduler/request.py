"""A request and the lanes it may leave behind: token ids and counters, no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from torch import Tensor

from minikv.cache.companion import Tape
from minikv.cache.compress import Ranges
from minikv.results import FinishReason, TokenLogprob
from minikv.sampling import Sampler, SamplingParams
from minikv.scheduler.course import Course, Turn
from minikv.scheduler.retention import Retention

if TYPE_CHECKING:
    from minikv.scheduler.swap import Swapped


class State(Enum):
    """Where a request stands; FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Lanes:
    """Lanes that outlive a request, so that the next turn of a conversation can go on from them.

    `seq` is the open sequence, or None when it was never filled or has been reclaimed for others. It is then
    `swapped`, or else the tokens are computed again, along the same `course`. `token_ids` are the tokens
    whose keys and values were kept, `pages` how many pages they took; all are empty while a request uses the
    lanes (`busy`). `prompt_logits` are those that the last reply began with, kept where lanes were
    compressed: what they were computed from is gone. Abandoned lanes are freed by the next step.
    """

    seq: int | None = None
    token_ids: list[int] = field(default_factory=list)
    course: Course = field(default_factory=Course)
    pages: int = 0
    prompt_logits: Tensor | None = None
    swapped: Swapped | None = None
    busy: bool = False
    abandoned: bool = False

    @property
    def holds(self) -> bool:
        """Whether there are entries to go on from, in the pool or below it."""
        return self.seq is not None or self.swapped is not None or self.are_below

    @property
    def are_below(self) -> bool:
        """Whether all that was computed of them is below the pool, whatever the pool holds."""
        below = self.course.below
        return below is not None and bool(self.token_ids) and below.covers(len(self.token_ids))

    def forget(self) -> None:
        """Forget the tokens and how their entries, which are gone, came to be."""
        self.token_ids, self.course, self.pages, self.prompt_logits = [], Course(), 0, None

    def lose(self) -> None:
        """Count the entries as gone. Compressed lanes remember their course: a conversation may be longer
        than what the pool could hold of it at once."""
        if self.course.compressions:
            self.course.restart()
        else:
            self.course.forget_below()
            self.forget()


@dataclass(eq=False)
class Request:
    """One sequence to generate.

    Two counters say everything: `tokens` (prompt and output) and `num_computed`, how many of them
    have keys and values in the lanes, or had before compression. The last sampled token has none
    until the next step. `course` is empty until the request is first admitted; `past_pages` were held by
    the lanes that it went on from. A preempted request waits with what is `swapped`, or begins again. One
    that `repeats` asks for another reply to the last turn of its lanes. A staged one that `shares` leaves its
    beginning to others, for which it was found to have room. `tape` collects what is recorded of a
    prompt that is being published.
    """

    id: int
    tokens: list[int]
    params: SamplingParams
    sampler: Sampler
    stop_ids: frozenset[int]
    retention: Retention = field(default_factory=Retention)
    content_end: int | None = None
    pinned: Ranges = ()
    course: Course = field(default_factory=Course)
    lanes: Lanes | None = None
    leader: Request | None = None
    num_prompt: int = 0
    num_computed: int = 0
    num_reused: int = 0
    past_pages: int = 0
    repeats: bool = False
    prompt_logits: Tensor | None = None
    tape: Tape | None = None
    seq: int | None = None
    swapped: Swapped | None = None
    was_set_back: bool = False
    shares: bool = False
    state: State = State.WAITING
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    compress_s: float = 0.0
    kv_bytes: int = 0
    full_kv_bytes: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def name(self) -> str:
        """What it is called in a sentence, with all that its lanes came from."""
        return f"request {self.id}" if self.lanes is None else f"the conversation of request {self.id}"

    @property
    def num_remaining(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def begin(self, start: int, restored: bool = False, staged: bool = False) -> None:
        """Begin the turn whose first row is at `start`, as a further one of `course`; see `Course.begin`."""
        turn = self.turn(start)
        turn.staged = staged
        self.course.begin(turn, restored)

    @property
    def restored(self) -> bool:
        """Whether its turn began with everything that had been demoted put back."""
        return bool(self.course.turns) and self.course.turns[-1].restored

    def restart(self) -> None:
        """Begin again with empty lanes, along the same course: with its last turn, if what was there before
        it can be put back, else with the first."""
        self.num_computed = self.num_reused = 0
        if not self.course.rewind(self.course.turns[-1].start):
            self.course.restart()

    @property
    def staged(self) -> bool:
        """Whether its turn is computed against what is below the pool; see `Turn`."""
        return bool(self.course.turns) and self.course.turns[-1].staged

    @property
    def waits_below(self) -> Swapped | None:
        """What it will go on from, where that is below the pool."""
        return self.swapped or (None if self.lanes is None else self.lanes.swapped)

    def is_last_turn_of(self, course: Course) -> bool:
        """Whether `course` would be the same if it had come to this prompt, and was compressed on the way."""
        last = course.turns[-1] if course.compressions else None
        return last is not None and last.asks_the_same(self.turn(last.start))

    def turn(self, start: int) -> Turn:
        """The turn that begins with the row at `start`."""
        end = self.num_prompt if self.content_end is None else min(self.content_end, self.num_prompt)
        content = range(start, end if end > start else self.num_prompt)
        return Turn(self.retention, start, self.num_prompt, content, self.pinned)

    @property
    def waits_for_leader(self) -> bool:
        """A sibling (n > 1) whose shared prompt another request is about to compute."""
        leader = self.leader
        return leader is not None and leader.state is not State.FINISHED and not leader.num_output


@dataclass(frozen=True)
class Order:
    """What `Engine.add` was asked for."""

    token_ids: Sequence[int]
    params: SamplingParams
    retention: Retention
    content_end: int | None
    pinned: Ranges
    lanes: Lanes | None


@dataclass(frozen=True)
class TokenEvent:
    """A request produced a token. `is_stop` marks an end-of-sequence or stop token."""

    request_id: int
    token_id: int
    is_stop: bool = False
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class FinishEvent:
    """The one terminal event of a request."""

    request: Request
    reason: FinishReason
    message: str | None = None

    @property
    def request_id(self) -> int:
        return self.request.id


Event = TokenEvent | FinishEvent
