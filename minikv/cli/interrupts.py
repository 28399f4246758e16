"""Ctrl-C as a flag, so that it never lands in the middle of an engine step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While entered, SIGINT sets `requested`, which the caller looks at between engine steps.

    With `insist`, a second SIGINT raises KeyboardInterrupt wherever the program is: for commands
    that end anyway, not for a session that must stay usable. SIGINT stays ignored if the process
    was started with it ignored (a background job of a script).
    """

    def __init__(self, insist: bool = True) -> None:
        self.requested = False
        self._insist = insist
        self._previous: Any = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested and self._insist:
            raise KeyboardInterrupt
        self.requested = True

    def __enter__(self) -> Interrupts:
        self._previous = signal.getsignal(signal.SIGINT)
        if self._previous is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._previous)
