"""The course of a sequence as JSON and tensors: its turns, its compressions, and what was recorded."""

from __future__ import annotations

from collections.abc import Callable
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

RECORDS = ("recorder.", "before.")  # that the names of what was recorded begin with
_MOST_PAGES = 1 << 40


def plain_course(course: Course, page_size: int, held: bool) -> dict[str, Any]:
    """A course without what was recorded; `held`: with the lanes that it has led to."""
    places = {turn: place for place, turn in enumerate(course.turns)}
    return {
        "turns": [_plain_state(turn) for turn in course.turns],
        "compressions": [[places[c.turn], c.num_tokens, c.room] for c in course.compressions],
        "done": course.done if held else 0,
        "peak_entries": course.peak * page_size,
        "page_size": page_size,
    }


def _plain_state(turn: Turn) -> dict[str, Any]:
    return {**_plain_turn(turn), "restored": turn.restored, "staged": turn.staged}


def _plain_turn(turn: Turn) -> dict[str, Any]:
    return {
        "cache": plain_cache(turn.retention.cache),
        "start": turn.start,
        "num_prompt": turn.num_prompt,
        "content": [turn.content.start, turn.content.stop],
        "pinned": [list(span) for span in turn.pinned],
    }


def recorded_tensors(course: Course) -> dict[str, Tensor]:
    """What was recorded: `recorder.N.` before the names of what turn N has, `before.N.` of what there was
    when it began."""
    recorders = {f"recorder.{place}.": turn.recorder for place, turn in enumerate(course.turns)}
    recorders |= {f"before.{place}.": turn.before for place, turn in enumerate(course.turns)}
    return {
        prefix + name: tensor
        for prefix, recorder in recorders.items()
        if recorder is not None
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
        restored = "restored" in body and field_of(body, "restored", bool)  # not said before there were tiers
        if restored and not start:
            raise damaged("nothing can be put back before its first turn")
        staged = "staged" in body and field_of(body, "staged", bool)  # nor this before prompts were
        retention, content = self._retention_of(cache), range(first, stop)
        return Turn(retention, start, num_prompt, content, pinned, restored=restored, staged=staged)

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
        """Give a turn new recorders where it had any, and see that the file's tensors may be their state."""
        for prefix, names in self._recorded().items():
            kind, place = _turn_of(prefix, len(course.turns))
            recorder = self._new_recorder(course, kind, place)
            setattr(course.turns[place], kind, recorder)
            self._check_state(recorder, prefix, names)

    def _check_state(self, recorder: Recorder, prefix: str, names: list[str]) -> None:
        shapes = recorder.state_shapes(self._num_tokens)
        if not set(names) <= shapes.keys():
            raise damaged("it has records that its policy does not make")
        for name in names:
            tensor, (dtype, largest) = self._file.tensors[prefix + name], shapes[name]
            if tensor.dtype != dtype or not _fits(tensor.shape, largest):
                raise Unusable(
                    "was recorded for other attention heads than this model's calibration profile names"
                    if name == "window.queries"
                    else "is damaged: its records have a shape that they cannot have"
                )

    def read_recorders(self, course: Course) -> None:
        """Read what was recorded, once `check_recorders` has passed and the data are known to be whole."""
        for prefix, names in self._recorded().items():
            kind, place = _turn_of(prefix, len(course.turns))
            recorder: Recorder = getattr(course.turns[place], kind)
            try:
                recorder.resume({name: self._file.read(prefix + name) for name in names})
            except (ValueError, KeyError):
                raise damaged("its records do not fit together") from None

    def _recorded(self) -> dict[str, list[str]]:
        """Names of tensors by what is before them."""
        found: dict[str, list[str]] = {}
        for whole_name in self._file.tensors:
            if whole_name.startswith(RECORDS):
                kind, place, name = [*whole_name.split(".", 2), "", ""][:3]
                found.setdefault(f"{kind}.{place}.", []).append(name)
        return found

    def _new_recorder(self, course: Course, kind: str, place: int) -> Recorder:
        turn = course.turns[place]
        if kind == "before":
            if not turn.restored:
                raise damaged("it has records from before a turn that nothing was put back for")
            turn = course.turns[place - 1]
        evidence = turn.retention.evidence
        if turn.retention.keeps_all or not evidence.records:
            raise damaged("it has records that its policy does not make")
        return turn.new_recorder(self._model.config, self._model.rope)


def _turn_of(prefix: str, num_turns: int) -> tuple[str, int]:
    """Of a prefix, which of a turn's recorders it means, and the turn's number."""
    kind, number, _ = prefix.split(".")
    if number not in map(str, range(num_turns)):
        raise damaged("it has records of a turn that is not there")
    return kind, int(number)


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
