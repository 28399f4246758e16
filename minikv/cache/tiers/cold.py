"""The cold tier: spans in one file."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from minikv.cache.tiers.base import Handle, index_of
from minikv.cache.tiers.cold_file import FRAME_BYTES, START_BYTES, Found, RecordFile, unusable
from minikv.cache.tiers.span import HEADER_BYTES, Span, SpanFault, digest
from minikv.errors import ConfigError
from minikv.once import Once

_LOG = logging.getLogger(__name__)

_BATCH = 16  # a part of the ceiling that is worth rewriting the file for
_MOST_WAITS = 64


@dataclass
class ColdCounters:
    """damaged: records that were not, or not any more, what was written. faults: reads and writes that the
    system refused. refused: spans that there was no room for. compactions: of the file. outdated: spans of
    no owner that made room."""

    damaged: int = 0
    faults: int = 0
    refused: int = 0
    compactions: int = 0
    outdated: int = 0


@dataclass
class _Record:
    """Where a live record is: in `file` at `offset`. owners: who wrote or found it in this run."""

    handle: Handle
    seal: bytes
    file: RecordFile
    offset: int
    owners: int
    pins: int = 0

    @property
    def size(self) -> int:
        return FRAME_BYTES + self.handle.nbytes


class ColdTier:
    """Spans in the file at `path`, which together with a file beside it while it is compacted never takes
    more than `limit` bytes. One process at a time; ConfigError when the file cannot be had.

    What earlier runs left is found by its key. It has no owner until then, nor after `release`, and what has
    none makes room when that is needed, the oldest first.

        write / find --> owned --> release --> no owner --> forgotten when room is needed, or found again
                                   drop    --> forgotten: garbage, until the file is compacted

    Nothing is forced to the disk: after a loss of power the last records may be missing or damaged, which is
    found out when they are read. To kill the process damages nothing but the record that was being written.
    """

    def __init__(self, path: str | Path, limit: int) -> None:
        self.path = Path(os.path.realpath(path))
        self.limit = limit
        self.counters = ColdCounters()
        self._once = Once()
        self._records: dict[Handle, _Record] = {}  # the oldest first
        self._of_key: dict[tuple[bytes, bytes], dict[Handle, _Record]] = {}
        self._live = self._largest = self._next = 0
        self._patience = self._waits = 0  # compactions that are not tried after one that failed
        self._file = RecordFile(self.path)
        self._beside: RecordFile | None = None
        try:
            self._load(self._file)
            if self._beside_path.exists():
                # A compaction was cut short: what it had moved goes back.
                self._beside = RecordFile(self._beside_path)
                self._load(self._beside)
                self._undo()
            self._make_room(0)
        except OSError as error:
            self.close()
            raise unusable(self.path, error) from None
        except BaseException:
            self.close()
            raise

    @property
    def _beside_path(self) -> Path:
        return self.path.with_name(self.path.name + ".new")

    @property
    def _files(self) -> list[RecordFile]:
        return [self._file] if self._beside is None else [self._file, self._beside]

    @property
    def nbytes(self) -> int:
        """Bytes of the file, garbage included."""
        return sum(file.end for file in self._files)

    @property
    def garbage(self) -> int:
        """Bytes that compaction would free."""
        return self.nbytes - self._live - START_BYTES

    def __len__(self) -> int:
        return len(self._records)

    # Spans

    def write(self, span: Span) -> Handle | None:
        """Append a span; None if there is no room for it or the system refuses."""
        if not self._make_room(FRAME_BYTES + span.nbytes):
            self.counters.refused += 1
            return None
        packed = span.sealed().to_bytes()
        try:
            offset = self._file.append(packed + span.body)
        except OSError as error:
            self._fault(error)
            return None
        return self._add(self._file, Found(offset, True, span.header, digest(packed)), owners=1)

    def read(self, handle: Handle) -> Span | None:
        """The span as it was written; None, once and for all, if it is not that any more."""
        record = self._records.get(handle)
        if record is None:
            return None
        data = self._read(record)
        if data is None:
            return None
        try:
            return Span.from_bytes(data)
        except SpanFault:
            self._damage()
            self._forget(record)
            return None

    def _read(self, record: _Record) -> bytes | None:
        """The bytes of a record whose header is the one that was written there."""
        try:
            data = record.file.read(record.offset, record.handle.nbytes)
        except OSError as error:
            self._fault(error)
            return None
        if digest(data[:HEADER_BYTES]) != record.seal:
            self._damage()
            self._remove(record)
            return None
        return data

    def find(self, key: bytes, fingerprint: bytes) -> list[Handle]:
        """All spans of a key and a fingerprint, which the caller owns from here on until `release`."""
        found = self._of_key.get((key, fingerprint), {})
        for record in found.values():
            record.owners += 1
        return list(found)

    def release(self, handle: Handle) -> None:
        """Give up a span that others may find again, as long as nothing else needs its room."""
        record = self._records.pop(handle, None)
        if record is not None:
            record.owners = max(0, record.owners - 1)
            self._records[handle] = record

    def pin(self, handle: Handle) -> None:
        """Keep a span until `unpin` has been called as often."""
        if handle in self._records:
            self._records[handle].pins += 1

    def unpin(self, handle: Handle) -> None:
        """Take back one `pin`."""
        if handle in self._records:
            self._records[handle].pins -= 1
            assert self._records[handle].pins >= 0, "a span was unpinned too often"

    def drop(self, handle: Handle) -> None:
        """Forget a span that is not pinned."""
        record = self._records.get(handle)
        if record is None:
            return
        assert not record.pins, "a pinned span was dropped"
        self._forget(record)
        if 2 * self.garbage > self.nbytes:
            self._compact()

    # Room

    def _make_room(self, size: int) -> bool:
        """Room for `size` bytes more, and for the largest record to stand in two files at once."""
        most = max(size, self._largest)
        # Less garbage is not worth rewriting a file for.
        worthwhile = self.limit // _BATCH if size else 1
        while (excess := self.nbytes + size + most + START_BYTES - self.limit) > 0:
            if self.garbage >= max(excess, worthwhile):
                if not self._compact():
                    return False
            elif not self._outdate(max(excess, worthwhile) - self.garbage):
                return False
        return True

    def _outdate(self, nbytes: int) -> bool:
        """Forget the oldest spans of no owner until `nbytes` have become garbage; False if there are too
        few."""
        free = [record for record in self._records.values() if not record.owners and not record.pins]
        if sum(record.size for record in free) < nbytes:
            return False
        for record in free:
            if nbytes <= 0:
                break
            nbytes -= record.size
            self._forget(record)
            self.counters.outdated += 1
        return True

    def _forget(self, record: _Record) -> None:
        self._remove(record)
        try:
            record.file.forget(record.offset)
        except OSError:
            self.counters.faults += 1

    def _remove(self, record: _Record) -> None:
        del self._records[record.handle]
        of_key = self._of_key[record.handle.index]
        del of_key[record.handle]
        if not of_key:
            del self._of_key[record.handle.index]
        self._live -= record.size

    # Compaction

    def _compact(self) -> bool:
        """Move all live records to a new file and put that in the place of this one.

        Records move from the end of one file to the end of the other, and each is cut off there once it is
        here, so that both together take one record more than the old file at most.
        """
        self._waits -= self._waits > 0
        if self._waits or not self._undo():
            return False
        try:
            self._beside = RecordFile(self._beside_path)
            self._beside.truncate(START_BYTES)
            self._drain(self._file, self._beside)
            if not self._file.is_at_path():
                raise FileExistsError
            self._beside.move_to(self.path)
        except (OSError, ConfigError):
            self.counters.faults += 1
            self._undo()
            # A full disk is not tried again for every span.
            self._patience = min(2 * self._patience + 2, _MOST_WAITS)
            self._waits = self._patience
            return False
        self._patience = 0
        self._file.close()
        self._file, self._beside = self._beside, None
        self._largest = max((record.size for record in self._records.values()), default=0)
        self.counters.compactions += 1
        return True

    def _undo(self) -> bool:
        """Move back what a compaction moved that did not end. Where that fails both files stay in use."""
        if self._beside is None:
            return True
        try:
            self._drain(self._beside, self._file)
            self._beside.remove()
        except OSError:
            self.counters.faults += 1
            return False
        self._beside = None
        return True

    def _drain(self, source: RecordFile, target: RecordFile) -> None:
        records = [record for record in self._records.values() if record.file is source]
        for record in sorted(records, key=lambda record: -record.offset):
            source.truncate(record.offset + record.size)
            data = self._read(record)
            if data is None:
                if record.handle in self._records:
                    self._remove(record)
                continue
            # Ownership changes hands: the copy counts from here on, and the original goes before another
            # record is copied.
            record.offset = target.append(data)
            record.file = target
        source.truncate(START_BYTES)

    def _fault(self, error: OSError) -> None:
        self.counters.faults += 1
        self._once.say(
            _LOG,
            logging.WARNING,
            "The cold tier %s cannot be used in full (%s), and the run goes on without what does not "
            "go there; free some space, or give another path.",
            self.path,
            (error.strerror or str(error)).lower(),
        )

    def _damage(self) -> None:
        self.counters.damaged += 1
        self._once.say(
            _LOG,
            logging.WARNING,
            "The cold tier %s was changed or damaged during the run, which goes on without what is lost.",
            self.path,
        )

    # The index

    def _load(self, file: RecordFile) -> None:
        """Take over what a file holds."""
        known = {record.seal for record in self._records.values()}
        for found in file.scan():
            # A compaction that was cut short leaves a record in both files.
            if found.live and found.seal not in known:
                known.add(found.seal)
                self._add(file, found, owners=0)
        self.counters.damaged += file.skipped

    def _add(self, file: RecordFile, found: Found, owners: int) -> Handle:
        self._next += 1
        handle = Handle.of(self._next, found.header)
        record = _Record(handle, found.seal, file, found.offset, owners)
        self._records[handle] = record
        self._of_key.setdefault(handle.index, {})[handle] = record
        self._live += record.size
        self._largest = max(self._largest, record.size)
        return handle

    def check(self) -> None:
        """Re-derive every count."""
        records = list(self._records.values())
        assert sum(record.size for record in records) == self._live, "bytes are lost"
        assert self.nbytes <= max(self.limit, START_BYTES), "the cold tier is over its ceiling"
        assert max((record.size for record in records), default=0) <= self._largest, "a record is too large"
        for file in self._files:
            end = START_BYTES
            for record in sorted((r for r in records if r.file is file), key=lambda record: record.offset):
                assert record.offset >= end, "two records lie in one place"
                end = record.offset + record.size
            assert end <= file.end, "a record lies past the end"
        assert all(record.file in self._files for record in records), "a record lies nowhere"
        assert index_of(self._records) == self._of_key, "a span is not found by its key"
        assert all(record.owners >= 0 and record.pins >= 0 for record in records), "a count is negative"

    def close(self) -> None:
        """Close the file, which stays for later runs, and give up the lock."""
        for file in self._files:
            file.close()
