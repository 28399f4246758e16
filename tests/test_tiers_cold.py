"""The cold file: what is left of it when it is cut, damaged, deleted, full, or its process killed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tiering import MODEL, span

from minikv.cache.tiers import cold_file
from minikv.cache.tiers.cold import ColdTier
from minikv.cache.tiers.cold_file import FRAME_BYTES, START_BYTES
from minikv.cache.tiers.span import owner_key
from minikv.errors import ConfigError

SIZE = span().nbytes
RECORD = SIZE + FRAME_BYTES
ROOM = 1 << 20


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "kv.cold"


def filled(path, count=5, room=ROOM):
    """A cold tier of `count` spans, each of a key of its own, and their handles."""
    cold = ColdTier(path, room)
    return cold, [cold.write(span(str(n), n, seed=n)) for n in range(count)]


def left(path, count=5, room=ROOM):
    """Which of these spans a new tier finds; all that it finds must be as they were written."""
    cold = ColdTier(path, room)
    found = set()
    for n in range(count):
        handles = cold.find(owner_key(str(n)), MODEL)
        assert len(handles) <= 1
        for handle in handles:
            one = cold.read(handle)
            if one is not None:
                assert one == span(str(n), n, seed=n)
                found.add(n)
    cold.check()
    counters = cold.counters
    cold.close()
    return found, counters


def fail_when(monkeypatch, name, condition, error=errno.ENOSPC, part=0):
    """Calls of a function of `os` fail where the condition holds of their arguments; pwrite has written
    `part` bytes by then."""
    real = getattr(os, name)

    def call(*args, **options):
        if not condition(*args):
            return real(*args, **options)
        if part:
            real(args[0], args[1][:part], *args[2:])
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(cold_file.os, name, call)


def at_calls(numbers):
    """A condition that holds of calls by their number, from 1."""
    count = itertools.count(1)
    return lambda *_: next(count) in numbers


# After the process has ended


def test_a_later_run_finds_all_that_was_written(path):
    cold, handles = filled(path)
    cold.drop(handles[1])
    cold.close()
    found, counters = left(path)
    assert found == {0, 2, 3, 4} and counters.damaged == 0
    assert path.stat().st_mode & 0o077 == 0  # rows tell what was read


def test_a_file_cut_off_at_any_byte_holds_the_whole_records_before(path):
    cold, _ = filled(path, 3)
    cold.close()
    data = path.read_bytes()
    assert len(data) == START_BYTES + 3 * RECORD
    for size in [*range(START_BYTES + FRAME_BYTES), *range(0, len(data), 37), len(data) - 1]:
        path.write_bytes(data[:size])
        whole = max(0, size - START_BYTES) // RECORD
        assert left(path, 3)[0] == set(range(whole))
        assert path.stat().st_size == START_BYTES + whole * RECORD
        cold, _ = filled(path, 3)  # and it goes on from there
        cold.close()
        assert left(path, 3)[0] == {0, 1, 2}


def test_a_flipped_bit_costs_one_record_at_most(path):
    cold, _ = filled(path)
    cold.close()
    data = path.read_bytes()
    for place in range(START_BYTES, len(data), 61):
        wrong = bytearray(data)
        wrong[place] ^= 4
        path.write_bytes(bytes(wrong))
        found, counters = left(path)
        assert len(found) >= 4
        assert counters.damaged == 5 - len(found) == 1


def test_a_stretch_of_zeros_costs_the_records_that_it_meets(path):
    cold, _ = filled(path)
    cold.close()
    data = bytearray(path.read_bytes())
    data[START_BYTES + RECORD + 100 : START_BYTES + 3 * RECORD + 50] = bytes(2 * RECORD - 50)
    path.write_bytes(bytes(data))
    assert left(path)[0] == {0, 4}


@pytest.mark.parametrize(
    "content", [b"hello", b"minikv", b"\0" * 100, b"minikv cold\n\x02\0\0\0" + b"x" * 50]
)
def test_a_file_of_something_else_is_refused_in_one_sentence_and_left_alone(path, content):
    path.write_bytes(content)
    if content == b"minikv":  # the beginning of one that was cut off
        ColdTier(path, ROOM).close()
        return
    with pytest.raises(ConfigError, match=str(path)):
        ColdTier(path, ROOM)
    assert path.read_bytes() == content


def test_a_path_that_cannot_be_opened_is_refused_in_one_sentence(tmp_path):
    for wrong in (tmp_path, tmp_path / "missing" / "kv.cold", Path("/dev/null")):
        with pytest.raises(ConfigError, match="cold tier"):
            ColdTier(wrong, ROOM)


def test_a_file_over_a_lower_ceiling_gives_up_its_oldest_spans(path):
    cold, _ = filled(path, 8)
    cold.close()
    room = START_BYTES * 2 + 5 * RECORD
    cold = ColdTier(path, room)
    assert cold.nbytes <= room and path.stat().st_size <= room
    cold.check()
    cold.close()
    found, counters = left(path, 8, room)
    assert found and min(found) >= 3 and counters.damaged == 0


# Room


def watch_size(monkeypatch, path, limit):
    """The most that the file and the one beside it ever took together."""
    real, most = os.pwrite, [0]

    def pwrite(*args):
        written = real(*args)
        files = (path, path.with_name(path.name + ".new"))
        most[0] = max(most[0], sum(file.stat().st_size for file in files if file.exists()))
        assert most[0] <= limit
        return written

    monkeypatch.setattr(cold_file.os, "pwrite", pwrite)
    return most


def test_compaction_frees_garbage_and_never_passes_the_ceiling(path, monkeypatch):
    limit = 12 * RECORD
    cold = ColdTier(path, limit)
    most = watch_size(monkeypatch, path, limit)
    held, choose = {}, random.Random(1)
    for n in range(120):
        one = span(str(n), n % 7, lengths=(1 + n % 9, n % 4), seed=n)
        if (handle := cold.write(one)) is not None:
            held[handle] = one
        else:
            gone = choose.choice(sorted(held, key=lambda h: h.number))
            cold.drop(gone)
            del held[gone]
        cold.check()
        assert 2 * cold.garbage <= cold.nbytes
    assert all(cold.read(handle) == one for handle, one in held.items())
    assert cold.counters.compactions > 3 and most[0] > 0.8 * limit
    assert not path.with_name("kv.cold.new").exists()
    cold.close()
    again = ColdTier(path, limit)
    assert len(again) == len(held)
    again.close()


@pytest.mark.parametrize("at", range(14))
def test_a_compaction_that_is_cut_short_anywhere_loses_nothing(path, monkeypatch, at):
    """Every call that changes a file is the last one once."""

    class Killed(BaseException):
        pass

    cold, handles = filled(path, 6)
    for handle in handles[:2]:
        cold.drop(handle)
    calls = [0]

    def until_killed(real):
        def call(*args):
            if calls[0] == at:
                raise Killed
            calls[0] += 1
            return real(*args)

        return call

    for name in ("pwrite", "ftruncate", "replace"):
        monkeypatch.setattr(cold_file.os, name, until_killed(getattr(os, name)))
    with contextlib.suppress(Killed):
        cold._compact()
    monkeypatch.undo()
    for file in cold._files:
        file.close()
    assert left(path, 6)[0] == {2, 3, 4, 5}
    assert not path.with_name("kv.cold.new").exists()


# Faults in the middle of a run


@pytest.mark.parametrize("part", [0, 5, 150])
def test_a_full_disk_is_a_refusal_and_the_file_stays_whole(path, monkeypatch, part):
    cold, handles = filled(path, 2)
    with monkeypatch.context() as patch:
        fail_when(patch, "pwrite", lambda fd, data, offset: len(data) > 100, part=part)
        assert cold.write(span("2", 2, seed=2)) is None
        assert cold.read(handles[0]) == span("0", 0, seed=0)
        assert path.stat().st_size == START_BYTES + 2 * RECORD
    assert cold.write(span("2", 2, seed=2)) is not None
    assert cold.counters.faults == 1
    cold.check()
    cold.close()
    assert left(path)[0] == {0, 1, 2}


@pytest.mark.parametrize("calls", [{5}, {6}, {7}, {7, 8}, set(range(5, 99)), set(range(7, 99))], ids=sorted)
def test_a_disk_that_is_full_while_the_file_is_compacted_loses_nothing(path, monkeypatch, calls):
    """Four spans are marked as forgotten, then a file is begun, and two records move to it."""
    cold, handles = filled(path, 6)
    with monkeypatch.context() as patch:
        fail_when(patch, "pwrite", at_calls(calls), part=9)
        for handle in handles[1:5]:
            cold.drop(handle)
            cold.check()
        assert cold.counters.faults >= 1 and cold.counters.compactions == 0
        assert cold.read(handles[0]) == span("0", 0, seed=0)
        assert cold.read(handles[5]) == span("5", 5, seed=5)
    new = cold.write(span("1", 1, seed=1))
    for _ in range(12):
        cold.drop(cold.write(span("2", 2, seed=2)))
        cold.check()
    assert cold.read(handles[0]) == span("0", 0, seed=0) and cold.read(new) == span("1", 1, seed=1)
    assert cold.counters.compactions > 0  # now that there is room again
    cold.close()
    assert left(path, 6)[0] == {0, 1, 5}


def test_a_directory_that_became_read_only_ends_no_run(path, monkeypatch):
    cold, handles = filled(path, 6)
    fail_when(monkeypatch, "open", lambda name, *_: str(name).endswith(".new"), errno.EROFS)
    for handle in handles[:5]:
        cold.drop(handle)
        cold.check()
    for _ in range(8):
        cold.drop(cold.write(span("7")))
    assert cold.read(handles[5]) == span("5", 5, seed=5)
    assert cold.write(span("6", 6, seed=6)) is not None
    # It is not tried again for every span.
    assert 1 <= cold.counters.faults < 5 and cold.counters.compactions == 0
    cold.close()


def test_a_disk_that_cannot_be_read_is_a_miss(path, monkeypatch):
    cold, handles = filled(path, 2)
    with monkeypatch.context() as patch:
        fail_when(patch, "pread", lambda *_: True, errno.EIO)
        assert cold.read(handles[0]) is None
    assert cold.counters.faults == 1
    assert cold.read(handles[1]) == span("1", 1, seed=1)
    cold.close()


def test_a_file_deleted_in_the_middle_of_a_run_ends_no_run(path):
    cold, handles = filled(path)
    path.unlink()
    assert cold.read(handles[0]) == span("0", 0, seed=0)
    handles.append(cold.write(span("5", 5, seed=5)))
    for handle in handles[:4]:
        cold.drop(handle)
    assert [cold.read(handle) for handle in handles[4:]] == [span(str(n), n, seed=n) for n in (4, 5)]
    cold.check()
    cold.close()


def test_a_file_that_another_program_put_there_is_left_alone(path):
    cold, handles = filled(path)
    path.unlink()
    path.write_text("mine")
    for handle in handles[:4]:
        cold.drop(handle)
    assert cold.read(handles[4]) == span("4", 4, seed=4)
    cold.check()
    cold.close()
    assert path.read_text() == "mine"


@pytest.mark.parametrize("size", [0, START_BYTES, START_BYTES + RECORD + 30])
def test_a_file_cut_off_in_the_middle_of_a_run_is_a_miss(path, size):
    cold, handles = filled(path, 3)
    os.truncate(path, size)
    whole = max(0, size - START_BYTES) // RECORD
    for n, handle in enumerate(handles):
        assert cold.read(handle) == (span(str(n), n, seed=n) if n < whole else None)
    assert cold.counters.damaged == 3 - whole
    new = cold.write(span("4", 4, seed=4))
    assert cold.read(new) == span("4", 4, seed=4)
    cold.check()
    cold.close()
    if size:
        assert 4 in left(path)[0]


def test_a_disk_that_fails_when_the_file_is_opened_is_one_sentence(path, monkeypatch):
    filled(path, 2)[0].close()
    for call in (1, 2, 3):
        with monkeypatch.context() as patch:
            fail_when(patch, "pread", at_calls({call}), errno.EIO)
            with pytest.raises(ConfigError, match=r"Cannot use .* as a cold tier: input/output error\."):
                ColdTier(path, ROOM)
    assert left(path, 2)[0] == {0, 1}


def test_a_bit_flipped_in_the_middle_of_a_run_is_a_miss_and_a_counter(path):
    cold, handles = filled(path, 3)
    with path.open("r+b") as file:
        file.seek(START_BYTES + RECORD + 300)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    assert cold.read(handles[1]) is None and cold.read(handles[1]) is None
    assert cold.counters.damaged == 1
    assert cold.read(handles[0]) is not None and cold.read(handles[2]) is not None
    cold.check()
    cold.close()


# Other processes


def in_child(work):
    """Begin a process that does some work, which gets the end of a pipe; its id and the pipe's other end."""
    output, end = os.pipe()
    process = os.fork()
    if not process:
        try:
            work(end)
        finally:
            os._exit(1)
    os.close(end)
    return process, os.fdopen(output, "rb", buffering=0)


def test_a_second_tier_on_one_file_is_refused_in_one_sentence(path):
    cold, handles = filled(path)
    sentence = "Another process has .*kv.cold as its cold tier; give another path, or wait until it ends."
    for _ in range(2):
        with pytest.raises(ConfigError, match=sentence):
            ColdTier(path, ROOM)
        for handle in handles[:4]:  # and so it is when the file has been compacted
            cold.drop(handle)
    assert cold.counters.compactions
    assert cold.read(handles[4]) == span("4", 4, seed=4)
    cold.close()
    assert left(path)[0] == {4}


def test_a_second_process_on_one_file_is_refused_in_one_sentence(path):
    cold, handles = filled(path)
    data = path.read_bytes()

    def work(end):
        try:
            os.write(end, b"%d spans" % len(ColdTier(path, ROOM)))
        except ConfigError as error:
            os.write(end, str(error).encode())

    def output():
        process, pipe = in_child(work)
        with pipe:
            said = pipe.readall().decode()
        os.waitpid(process, 0)
        return said

    assert (
        output() == f"Another process has {path} as its cold tier; give another path, or wait until it ends."
    )
    assert path.read_bytes() == data and cold.read(handles[0]) is not None
    cold.close()
    assert output() == "5 spans"


def writer(path, room, spans, begun):
    """Writes and drops without end; says when there is something."""
    cold, held = ColdTier(path, room), []
    for n in range(1 << 40):
        if n == len(spans):
            os.write(begun, b".")
        handle = cold.write(spans[n % len(spans)])
        if handle is not None:
            held.append(handle)
        if handle is None or n % 3 == 0:
            cold.drop(held.pop(0))


def kill_while_it_writes(path, times):
    """What is left is readable, under the ceiling, and as it was written, whenever the writer is killed."""
    room, choose, cut_short = 12 * RECORD, random.Random(times), 0
    spans = [span(str(n), n, seed=n) for n in range(8)]
    for _ in range(times):
        process, pipe = in_child(lambda end: writer(path, room, spans, end))
        with pipe:
            assert pipe.read(1) == b"."
            time.sleep(choose.random() * 0.05)
        os.kill(process, signal.SIGKILL)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        files = list(path.parent.iterdir())
        assert sum(file.stat().st_size for file in files) <= room
        cut_short += len(files) > 1
        found, counters = left(path, 8, room)
        assert len(found) >= 3
        assert counters.damaged <= 2  # what was being written, in either file
    return cut_short


def test_a_killed_writer_leaves_a_readable_file(path):
    kill_while_it_writes(path, 10)


@pytest.mark.slow
def test_a_writer_killed_fifty_times_leaves_a_readable_file(path):
    assert kill_while_it_writes(path, 50)  # some of them in the middle of a compaction
