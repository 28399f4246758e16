"""Saving is all or nothing: after a full disk, a failing system call or kill -9 the old session is there, or
the new one."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cli_tools import ROOT, write_tiny_model
from session_tools import PARAMS, begun, keep, load

from minikv import SessionError, TierConfig
from minikv.sessions import replacing


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


@pytest.fixture(scope="module")
def llm(model):
    with load(model) as llm:
        yield llm


@pytest.fixture(scope="module")
def session(llm):
    with begun(llm, keep("gracekv", 40)) as session:
        yield session


@pytest.fixture
def old(llm, tmp_path) -> Path:
    """A file that holds an earlier session."""
    path = tmp_path / "talk"
    with begun(llm, questions=("An earlier question",)) as earlier:
        earlier.save(path)
    return path


def refused(session, path: object) -> str:
    with pytest.raises(SessionError) as caught:
        session.save(path)
    return str(caught.value)


def holds_the_old(llm, path: Path) -> None:
    """That the file is the earlier session, and alone in its folder."""
    assert os.listdir(path.parent) == [path.name]
    with llm.load_session(path) as loaded:
        assert loaded.messages[1]["content"] == "An earlier question"
        assert loaded.num_tokens > 0


def test_a_full_disk_leaves_the_old_session(llm, session, old):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        assert refused(session, old) == f"Cannot save to {old}: file too large."
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    holds_the_old(llm, old)


@pytest.mark.parametrize("name", ["fsync", "replace", "fstat", "listdir"])
def test_a_failing_system_call_leaves_the_old_session(llm, session, old, monkeypatch, name):
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replacing.os, name, fail)
    assert refused(session, old) == f"Cannot save to {old}: no space left on device."
    monkeypatch.undo()
    holds_the_old(llm, old)


def test_every_write_can_fail_and_the_old_session_stays(llm, session, old, monkeypatch):
    """Among them those of the checksums, when all the rest is written."""
    writes = 0

    def failing(at: int):
        def write_container(file, metadata, tensors):
            def write(data):
                nonlocal writes
                writes += 1
                if writes == at:
                    raise OSError(5, "Input/output error")
                return real_write(data)

            real_write, file.write = file.write, write
            try:
                real(file, metadata, tensors)
            finally:
                file.write = real_write

        return write_container

    from minikv.sessions import save

    real = save.write_container
    for at in range(1, 40):
        writes = 0
        monkeypatch.setattr(save, "write_container", failing(at))
        with suppress(SessionError):
            session.save(old)
            break
        holds_the_old(llm, old)
    assert at > 15
    assert os.listdir(old.parent) == [old.name]


def test_an_interrupted_save_leaves_the_old_session(llm, session, old, monkeypatch):
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replacing.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.save(old)
    monkeypatch.undo()
    holds_the_old(llm, old)


def test_nothing_but_a_session_is_replaced(llm, session, old, tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("mine", encoding="utf-8")
    assert refused(session, notes) == (
        f"{notes} is not a session saved by minikv, so it is not replaced; give another name."
    )
    assert notes.read_text(encoding="utf-8") == "mine"
    assert "is a directory, so it is not replaced" in refused(session, tmp_path)
    assert "is not a regular file" in refused(session, "/dev/null")
    assert "no such file or directory" in refused(session, tmp_path / "absent" / "talk")
    assert "no name can hold a NUL" in refused(session, "a\0b")
    assert "file name too long" in refused(session, tmp_path / ("a" * 300))
    # Nothing is lost with an empty file, nor with a session that is damaged.
    notes.write_bytes(b"")
    session.save(notes)
    notes.write_bytes(notes.read_bytes()[:5000])
    session.save(notes)
    llm.load_session(notes).close()


def test_a_folder_that_cannot_be_written_is_one_sentence(session, tmp_path, monkeypatch):
    def denied(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(replacing.tempfile, "mkstemp", denied)
    assert refused(session, tmp_path / "talk") == f"Cannot save to {tmp_path / 'talk'}: permission denied."


def test_only_the_owner_may_read_a_session(session, tmp_path):
    session.save(tmp_path / "talk")
    assert (tmp_path / "talk").stat().st_mode & 0o077 == 0


def test_what_a_killed_save_left_is_removed_by_the_next_but_not_what_is_being_written(tmp_path):
    path = tmp_path / "talk"
    left, other = tmp_path / ".talk.abc.unfinished", tmp_path / ".walk.abc.unfinished"
    left.write_bytes(b"half")
    other.write_bytes(b"of another file")

    def write(file) -> None:
        assert not left.exists()
        file.write(b"one")
        # A second save while the first has not come to its end.
        replacing.replace_whole(path, lambda second: second.write(b"two") and None)

    replacing.replace_whole(path, write)
    assert path.read_bytes() == b"one"
    assert sorted(os.listdir(tmp_path)) == sorted([other.name, path.name])


# Processes of their own, of which each is killed while it saves. Loading torch takes long, so that it is done
# once, in a process whose copies are the ones that save.
SAVING = """
import os, signal, sys
from pathlib import Path
from minikv import LLM, CacheConfig, SamplingParams, TierConfig
model, path, evicted = sys.argv[1:]
params = SamplingParams(max_tokens=9, ignore_eos=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with LLM(model, backend="torch", threads=1, tiers=TierConfig(hot="4MiB", warm="4MiB")) as llm:
    sessions = []
    for cache in (None, CacheConfig(policy="snapkv", budget=40, evicted=evicted)):
        session = llm.chat_session("Be brief.", cache=cache)
        for question in ("Hello", "Tell me of the sea", "Go on")[: 2 + (cache is not None)]:
            session.send(question, params)
        sessions.append(session)
    sessions[0].save(path)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            while True:
                for session in reversed(sessions):
                    session.save(path)
        print(child, flush=True)
"""


def save_and_kill(llm, model: Path, folder: Path, times: int, evicted: str) -> None:
    """Kill a saving process that many times; each time one of its two sessions has to load, and the second
    with what was demoted of it, if anything was."""
    path = folder / "talk"
    parent = subprocess.Popen(
        [sys.executable, "-c", SAVING, str(model), str(path), evicted],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    moments, seen, unfinished, done = random.Random(7), set(), 0, 0
    try:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        first = path.read_bytes()
        # More often on a machine so busy that none of them came to an end, or none was under way.
        while done < times or (done < 10 * times and not (len(seen) == 2 and unfinished)):
            done += 1
            path.write_bytes(first)
            parent.stdin.write("\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            time.sleep(moments.uniform(0, 0.04))
            os.kill(child, signal.SIGKILL)
            while _runs(child):
                time.sleep(0.001)
            unfinished += len(os.listdir(folder)) > 1
            with llm.load_session(path) as loaded:
                seen.add(len(loaded.messages))
                assert len(loaded.messages) in (5, 7)
                below = bool(llm.engine.storage._own)
                assert below == (evicted == "demote" and len(loaded.messages) == 7)
                assert loaded.send("And now?", PARAMS).usage.reused_tokens > 40
        assert len(os.listdir(folder)) <= 2
    finally:
        parent.kill()
        parent.communicate()
    assert seen == {5, 7}
    assert unfinished > 0


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def tiered(model):
    with load(model, tiers=TierConfig(hot="4MiB", warm="4MiB")) as llm:
        yield llm


evictions = pytest.mark.parametrize("evicted", ["drop", "demote"])


@evictions
def test_kill_9_at_any_moment_leaves_the_old_or_the_new_session(tiered, model, tmp_path, evicted):
    save_and_kill(tiered, model, tmp_path, 10, evicted)


@pytest.mark.slow
@evictions
def test_kill_9_at_fifty_moments_leaves_the_old_or_the_new_session(tiered, model, tmp_path, evicted):
    save_and_kill(tiered, model, tmp_path, 50, evicted)
