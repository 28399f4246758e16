"""The output file of a batch: whole lines only, and what an earlier run has left in it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from minikv.cli.console import OutputError, reason

# JSON may hold these as they are, but many readers would end the line there.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


@dataclass(frozen=True)
class DoneLine:
    """A complete line of an output file: which input line it answers, and whether it is an error."""

    id: str
    custom_id: str | None
    failed: bool


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            # Only the last line can lack its end: the run was killed while writing it.
            if data.endswith(b"\n"):
                yield number, data


def _done_line(path: Path, number: int, data: bytes) -> DoneLine:
    try:
        fields = json.loads(data)
        return DoneLine(fields["id"], fields["custom_id"], fields["error"] is not None)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise OutputError(
            f"Line {number} of {path} was not written by minikv batch, so the run cannot be resumed there."
        ) from None


class OutputFile:
    """Appends lines to a file, each whole or not at all. A context manager.

    The file is opened or created, and locked against a second run; OutputError when that fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        try:
            # Unbuffered, so that a line is with the operating system once `write` returns.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise OutputError(f"Cannot write {self.path}: {reason(error)}.") from None
        if not _lock(self._file.fileno()):
            self._file.close()
            raise OutputError(f"Another run is writing {self.path}; wait until it ends.")

    def clear(self) -> None:
        """Drop whatever the file holds."""
        self._file.truncate(0)

    def recover(self, *, drop_failed: bool) -> list[DoneLine]:
        """The lines that an earlier run finished, once a torn last line is cut off the file.

        With `drop_failed` error lines are removed too, by way of a copy that replaces the file.
        Raises OutputError when the file is not the output of a batch.
        """
        done: list[DoneLine] = []
        try:
            whole = failed = 0
            for number, data in _whole_lines(self.path):
                line = _done_line(self.path, number, data)
                whole += len(data)
                if drop_failed and line.failed:
                    failed += 1
                else:
                    done.append(line)
            if whole < self.path.stat().st_size:
                self._file.truncate(whole)
            if failed:
                self._drop_failed()
        except OSError as error:
            raise OutputError(f"Cannot resume {self.path}: {reason(error)}.") from None
        return done

    def _drop_failed(self) -> None:
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with open(handle, "wb") as copy:
                for number, data in _whole_lines(self.path):
                    if not _done_line(self.path, number, data).failed:
                        copy.write(data)
                copy.flush()
                os.fsync(copy.fileno())
            os.chmod(temporary, self.path.stat().st_mode & 0o777)
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise
        self._file.close()
        self._open()

    def write(self, line: dict[str, Any]) -> None:
        """Append one JSON line. Raises OutputError after taking back a part of a line."""
        text = json.dumps(line, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
        # A half of a surrogate pair, quoted from the input, becomes the escape that JSON has for it.
        data = text.encode(errors="backslashreplace") + b"\n"
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError as error:
            self._take_back(written)
            raise OutputError(f"Cannot write {self.path}: {reason(error)}.") from None

    def _take_back(self, count: int) -> None:
        try:
            self._file.truncate(os.fstat(self._file.fileno()).st_size - count)
        except OSError:
            # Not a regular file, or a device that failed: the torn line is cut off on resume.
            return

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _lock(descriptor: int) -> bool:
    """Take the file for this process until it ends; False when another one has it."""
    try:
        import fcntl
    except ImportError:
        return True  # Windows has no such lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True
