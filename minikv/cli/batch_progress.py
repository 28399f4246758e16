"""Counts of a batch run: a bar while it goes on, one line at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minikv.cli import console
from minikv.cli.batch_output import DoneLine

if TYPE_CHECKING:
    from rich.progress import Progress


class Meter:
    """Counts lines and tokens. Shows a bar on stderr while entered, if that is a terminal.

    `total` is None when the number of input lines is not known. `earlier` are lines that an earlier
    run has answered; they count as lines, but their tokens and time do not.
    """

    def __init__(self, total: int | None, earlier: Sequence[DoneLine] = ()) -> None:
        self.total = total
        self.skipped = len(earlier)
        self.failed = sum(line.failed for line in earlier)
        self.served = self.skipped - self.failed
        self.tokens = 0
        self._start: float | None = None
        self._progress: Progress | None = None
        self._task: Any = None

    def served_line(self, tokens: int) -> None:
        """One more line was answered, with so many tokens."""
        self.served += 1
        self.tokens += tokens
        self.show()

    def failed_line(self) -> None:
        """One more line got an error."""
        self.failed += 1
        self.show()

    def progress_text(self) -> str:
        """`57 of 200 lines`."""
        count = self.served + self.failed
        return f"{count} lines" if self.total is None else f"{count} of {self.total} lines"

    def summary(self) -> str:
        """The line at the end of a run that was not interrupted."""
        earlier = f" ({self.skipped} by an earlier run)" if self.skipped else ""
        total = self.served + self.failed
        work = f"; {self.tokens} tokens in {self._seconds():.1f} s, {self._rate()}" if self.tokens else ""
        return f"Served {self.served} of {total} lines{earlier}, {self.failed} failed{work}."

    def _seconds(self) -> float:
        return 0.0 if self._start is None else time.perf_counter() - self._start

    def _rate(self) -> str:
        seconds = self._seconds()
        return f"{self.tokens / seconds if seconds > 0 else 0:.1f} tok/s"

    def show(self) -> None:
        """Bring the bar up to date."""
        if self._progress is not None:
            status = f"{self.progress_text()}, {self.failed} failed, {self._rate()}"
            self._progress.update(self._task, completed=self.served + self.failed, status=status)

    def __enter__(self) -> Meter:
        self._start = time.perf_counter()
        if console.stderr_is_terminal():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TextColumn("{task.fields[status]}", markup=False), TimeRemainingColumn())
            self._progress = Progress(*columns, console=console.error_console(), transient=True)
            self._task = self._progress.add_task("batch", total=self.total, status="")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
