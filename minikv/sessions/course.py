"""The course of a sequence as JSON and tensors: its turns, its compressions, and what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minikv.cache.evidence import Most, Recorder
from minikv.config import CacheConfig
from minikv.scheduler.course import Compression, Course, Turn
from minikv.scheduler.retention import Retention
from minikv.sessions.container import Container, Unusable, damaged
from minikv.sessions.plain import LARGEST, cache_of, field_of, pair, plain_cache, ranges_of, whole

if TYPE_CHECKING:
    from minikv.engine import Model

_MOST_PAGES = 1 << 40


def plain_course(course: Course, page_size: int, held: bool) -> dict[str, Any]:
    """A course without what was recorded; `held`: with the lanes that it has led to."""
    places = {turn: place for place, turn in enumerate(course.turns)}
    return {
        "turns": [_plain_turn(turn) for turn in course.turns],
        "compressions": [[places[c.turn], c.num_tokens, c.room] for c in course.compressions],
        "done": course.done if held else 0,
        "peak_entries": course.peak * page_size,
        "page_size": page_size,
    }


def _plain_turn(turn: Turn) -> dict[str, Any]:
    return {
        "cache": plain_cache(turn.retention.cache),
        "start": turn.start,
        "num_prompt": turn.num_prompt,
        "content": [turn.content.start, turn.content.stop],
        "pinned": [list(span) for span in turn.pinned],
    }


def recorded_tensors(course: Course) -> dict[str, Tensor]:
    """What was recorded, `recorder.N.` before the names of turn N."""
    recorders = [(place, turn.recorder) for place, turn in enumerate(course.turns) if turn.recorder]
    return {
        f"recorder.{place}.{name}": tensor
        for place, recorder in recorders
        for name, tensor in recorder.state().items()
    }


class CourseReader:
    """Makes a course again from what was written. Reads no tensor before its shape has been looked at.

    retention_of: the retention of a cache configuration. num_tokens: tokens that the lanes stand for.
    Everything raises Unusable for what no course can be.
    """

    def __init__(
        self,
        file: Container,
        model: Model,
        retention_of: Callable[[CacheConfig], Retention],
        num_tokens: int,
        max_context: int,
        page_size: int,
        num_lanes: int,
    ) -> None:
        self._file = file
        self._model: Any = model
        self._retention_of = retention_of
        self._num_tokens = num_tokens
        self._max_context = max_context
        self._page_size = page_size
        self._num_lanes = num_lanes

    def course(self, body: Any) -> Course:
        """The course; its recorders are new, as `recorders` finds them."""
        turns = [self._turn(turn) for turn in field_of(body, "turns", list)]
        starts = [turn.start for turn in turns]
        if starts != sorted(set(starts)) or starts[:1] != [0] * bool(self._num_tokens):
            raise damaged("its turns do not follow one another")
        compressions = [self._compression(turns, c) for c in field_of(body, "compressions", list)]
        counts = [c.num_tokens for c in compressions]
        if counts != sorted(counts):
            raise damaged("its compressions do not follow one another")
        done = whole(body, "done", 0, len(compressions))
        return Course(turns, compressions, done, self._peak(body))

    def _peak(self, body: Any) -> int:
        """The most pages that the lanes took, were pages as large as here."""
        entries = whole(body, "peak_entries", 0, _MOST_PAGES)
        if whole(body, "page_size", 1, _MOST_PAGES) == self._page_size or not entries:
            return entries // self._page_size
        return -(-entries // self._page_size) + self._num_lanes

    def _turn(self, body: Any) -> Turn:
        last = max(0, self._num_tokens - 1)
        start = whole(body, "start", 0, last)
        num_prompt = whole(body, "num_prompt", start + 1, self._max_context)
        first, stop = pair(body, "content", num_prompt)
        pinned = ranges_of(body, "pinned")
        if first < start:
            raise damaged("a turn's content begins before it")
        cache = cache_of(field_of(body, "cache", dict))
        return Turn(self._retention_of(cache), start, num_prompt, range(first, stop), pinned)

    def _compression(self, turns: list[Turn], body: Any) -> Compression:
        if not isinstance(body, list) or len(body) != 3 or any(type(n) is not int for n in body):
            raise damaged("its compressions cannot be read")
        place, num_tokens, room = body
        if not (0 <= place < len(turns) and 0 <= num_tokens <= self._num_tokens and 0 <= room <= LARGEST):
            raise damaged("its compressions cannot be read")
        if turns[place].retention.keeps_all:
            raise damaged("it compresses under a policy that keeps all")
        return Compression(turns[place], num_tokens, room)

    def check_recorders(self, course: Course) -> None:
        """Give a turn that had a recorder a new one, and see that the file's tensors may be its state."""
        for place, turn, given in self._recorded(course):
            if turn.recorder is None:
                turn.recorder = self._new_recorder(turn)
            shapes = turn.recorder.state_shapes(self._num_tokens)
            names = {name.partition(f"recorder.{place}.")[2] for name in given}
            if not names <= shapes.keys():
                raise damaged("it has records that its policy does not make")
            for name in names:
                tensor, (dtype, largest) = self._file.tensors[f"recorder.{place}.{name}"], shapes[name]
                if tensor.dtype != dtype or not _fits(tensor.shape, largest):
                    raise Unusable(
                        "was recorded for other attention heads than this model's calibration profile names"
                        if name == "window.queries"
                        else "is damaged: its records have a shape that they cannot have"
                    )

    def read_recorders(self, course: Course) -> None:
        """Read what was recorded, once `check_recorders` has passed and the data are known to be whole."""
        for place, turn, given in self._recorded(course):
            assert turn.recorder is not None
            prefix = f"recorder.{place}."
            try:
                turn.recorder.resume({name.removeprefix(prefix): self._file.read(name) for name in given})
            except (ValueError, KeyError):
                raise damaged("its records do not fit together") from None

    def _recorded(self, course: Course) -> Iterator[tuple[int, Turn, list[str]]]:
        names = [name for name in self._file.tensors if name.startswith("recorder.")]
        places = {name.split(".")[1] for name in names}
        if not places <= {str(place) for place in range(len(course.turns))}:
            raise damaged("it has records of a turn that is not there")
        for place in sorted(map(int, places)):
            given = [name for name in names if name.startswith(f"recorder.{place}.")]
            yield place, course.turns[place], given

    def _new_recorder(self, turn: Turn) -> Recorder:
        evidence = turn.retention.evidence
        if turn.retention.keeps_all or not evidence.records:
            raise damaged("it has records that its policy does not make")
        return turn.new_recorder(self._model.config, self._model.rope)


def _fits(shape: tuple[int, ...], largest: tuple[int | Most, ...]) -> bool:
    if len(shape) != len(largest):
        return False
    pairs = zip(shape, largest, strict=True)
    return all(n <= most.size if isinstance(most, Most) else n == most for n, most in pairs)


def read_ids(file: Container, name: str, most: int, vocab_size: int) -> list[int]:
    """Token ids of a tensor; its length is looked at before it is read."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.dtype != torch.int32 or len(tensor.shape) != 1 or tensor.shape[0] > most:
        raise damaged("its tokens cannot be read")
    ids = file.read(name)
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        raise Unusable("holds tokens that this model does not have")
    return ids.tolist()
