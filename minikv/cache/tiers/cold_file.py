"""The file of the cold tier: a header, and records one after the other.

    file     b"minikv cold\\n", format version uint32
    record   b"record", b"+" or b"-" when it is forgotten, b"\\n", and a span

That one byte is the only one that is written twice; all else is appended, or cut off at the end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minikv.cache.tiers.span import HEADER_BYTES, MAGIC, Header, SpanFault, digest
from minikv.errors import ConfigError

VERSION = 1
_NAME = b"minikv cold\n"
_START = _NAME + VERSION.to_bytes(4, "little")
START_BYTES = len(_START)
_LIVE, _DEAD = b"record+\n", b"record-\n"
FRAME_BYTES = len(_LIVE)
_SEARCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Found:
    """A record that a scan has found. seal: a digest of its header, which holds one of its body."""

    offset: int
    live: bool
    header: Header
    seal: bytes


class RecordFile:
    """An open file of records, locked for this process. Raises OSError like the calls that it makes.

    end: where the next record goes. skipped: stretches that a scan could not read.
    """

    def __init__(self, path: Path) -> None:
        """Open or make a file; ConfigError when it cannot be, is in use, or holds something else."""
        self.path = path
        self.end = START_BYTES
        self.skipped = 0
        try:
            self._fd = _open_locked(path)
            try:
                self._begin()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise unusable(path, error) from None

    def _begin(self) -> None:
        start = os.pread(self._fd, START_BYTES, 0)
        if start != _START and _START.startswith(start):  # new, or cut off before there was a record
            os.ftruncate(self._fd, 0)
            self._write(_START, 0)
            return
        if not start.startswith(_NAME):
            raise ConfigError(
                f"{self.path} is not a cold tier of minikv; give the path of another file, or of none."
            )
        if start != _START:
            raise ConfigError(f"{self.path} was written by a newer version of minikv; give another path.")

    # Records

    def append(self, span: bytes, live: bool = True) -> int:
        """Add a record and say where it is. If that fails the file is as it was."""
        offset = self.end
        try:
            self._write((_LIVE if live else _DEAD) + span, offset)
        except OSError:
            self.truncate(offset)
            raise
        self.end = offset + FRAME_BYTES + len(span)
        return offset

    def _write(self, data: bytes, offset: int) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._fd, rest, offset)
            rest, offset = rest[written:], offset + written

    def read(self, offset: int, span_bytes: int) -> bytes:
        """The span of the record at `offset`, or what is left of it."""
        return os.pread(self._fd, span_bytes, offset + FRAME_BYTES)

    def forget(self, offset: int) -> None:
        """Mark the record at `offset` as forgotten, for whoever opens the file next."""
        os.pwrite(self._fd, _DEAD, offset)

    def truncate(self, end: int) -> None:
        """Cut everything off from `end` on."""
        os.ftruncate(self._fd, end)
        self.end = end

    def scan(self) -> Iterator[Found]:
        """All records that can be read, by their headers; what follows the last one is cut off."""
        size, at = os.fstat(self._fd).st_size, START_BYTES
        while at < size:
            found = self._record_at(at, size)
            if found is None:
                self.skipped += 1
                at = self._next_magic(at + FRAME_BYTES + 1, size) - FRAME_BYTES
                continue
            at += FRAME_BYTES + found.header.span_bytes
            self.end = at
            yield found
        self.truncate(self.end)

    def _record_at(self, offset: int, size: int) -> Found | None:
        data = os.pread(self._fd, FRAME_BYTES + HEADER_BYTES, offset)
        frame, packed = data[:FRAME_BYTES], data[FRAME_BYTES:]
        try:
            header = Header.from_bytes(packed)
        except SpanFault:
            return None
        if frame not in (_LIVE, _DEAD) or offset + FRAME_BYTES + header.span_bytes > size:
            return None
        return Found(offset, frame == _LIVE, header, digest(packed))

    def _next_magic(self, at: int, size: int) -> int:
        """Where the next span may begin; past the end if nowhere."""
        while at < size:
            place = os.pread(self._fd, _SEARCH_BYTES, at).find(MAGIC)
            if place >= 0:
                return at + place
            at += _SEARCH_BYTES - len(MAGIC) + 1
        return size + FRAME_BYTES

    # The file itself

    def move_to(self, path: Path) -> None:
        """Take the place of the file at `path`."""
        os.replace(self.path, path)
        self.path = path

    def is_at_path(self) -> bool:
        """Whether nothing else lies where this file was opened: it may have been deleted."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Close the file, which gives up the lock."""
        os.close(self._fd)

    def remove(self) -> None:
        """Delete and close the file."""
        self.path.unlink(missing_ok=True)
        self.close()


def unusable(path: Path, error: OSError) -> ConfigError:
    """What to say when a file cannot be opened or read."""
    return ConfigError(f"Cannot use {path} as a cold tier: {(error.strerror or str(error)).lower()}.")


def _open_locked(path: Path) -> int:
    """A descriptor of the file at `path`, made if need be. ConfigError when another process has it."""
    while True:
        # Only for its owner: rows tell what was read.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path} is not a plain file; give another path for the cold tier.")
            _lock(descriptor, path)
            # Another process may have put a new file there since, and have let this one go.
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return  # Windows has no such lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"Another process has {path} as its cold tier; give another path, or wait until it ends."
        ) from None
    except OSError:
        return  # a file system without locks
