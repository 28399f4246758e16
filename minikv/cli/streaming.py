"""Follow a stream of pieces until it ends or Ctrl-C is pressed, and time it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minikv.cli.interrupts import Interrupts
from minikv.results import Result, StreamPiece


@dataclass(frozen=True)
class Streamed:
    """What came out of a stream. `result` is None when it was interrupted.

    `first_token_s` and `seconds` are measured here, from the call on; `first_token_s` is None when
    no token came.
    """

    text: str
    token_ids: tuple[int, ...]
    result: Result | None
    first_token_s: float | None
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate over the tokens after the first, None for fewer than two tokens."""
        if self.first_token_s is None or len(self.token_ids) < 2 or self.seconds <= self.first_token_s:
            return None
        return (len(self.token_ids) - 1) / (self.seconds - self.first_token_s)


def follow(
    pieces: Iterator[StreamPiece], interrupts: Interrupts | None, emit: Callable[[str], object] | None
) -> Streamed:
    """Pass each new text to `emit` and gather the rest.

    Pieces without text come while a prompt is read, so an interrupt is seen between engine steps.
    The caller closes `pieces`, which is what ends an interrupted request.
    """
    start = time.perf_counter()
    texts: list[str] = []
    token_ids: list[int] = []
    first = result = None
    for piece in pieces:
        if piece.token_ids and first is None:
            first = time.perf_counter() - start
        token_ids.extend(piece.token_ids)
        if piece.text:
            texts.append(piece.text)
            if emit is not None:
                emit(piece.text)
        result = piece.result
        if result is not None or (interrupts is not None and interrupts.requested):
            break
    return Streamed("".join(texts), tuple(token_ids), result, first, time.perf_counter() - start)
