"""`minikv batch` over a cold file: killed at any moment, and with a file that another process has."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_tools import ROOT, error_of, invoke, start, write_tiny_model

from minikv.cache.tiers import cold_file
from minikv.cache.tiers.cold import ColdTier

DOCUMENT = [3 + n * 7 % 60 for n in range(260)]
# So small a pool that requests leave it for the file, which is so small that it has to be compacted.
ENGINE = ("--threads", 1, "--max-seqs", 6, "--kv-hot", "250KiB")
ROOM = 300 << 10
NUM_LINES = 16

# Loading torch and all else takes long, so that it is done once, by a process that runs a batch itself; its
# copies then run one each.
BATCHES = """
import json, os, sys
from minikv.cli.app import app
def run(arguments):
    try:
        app(arguments, prog_name="minikv")
    except SystemExit as end:
        return end.code
run(json.loads(sys.argv[1]))
for line in iter(sys.stdin.readline, ""):
    child = os.fork()
    if not child:
        os._exit(run(json.loads(line)))  # at once: to end Python takes longer than the batch
    print(child, flush=True)
    sys.stdin.readline()  # before which the child, if it has ended, still has its number
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Batches:
    """Runs of `minikv batch`, one after the other, each in a process of its own."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent

    def start(self, *arguments: object) -> int:
        return self._ask(json.dumps(["batch", *map(str, arguments)]))

    def wait(self) -> int:
        """The status of the run, as of `os.waitpid`."""
        return self._ask("")

    def _ask(self, line: str) -> int:
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(line + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny", max_context=512)


@contextmanager
def batches(*arguments: object) -> Iterator[Batches]:
    """What runs batches, once it has run this one."""
    parent = subprocess.Popen(
        [sys.executable, "-c", BATCHES, json.dumps(["batch", *map(str, arguments)])],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Batches(parent)
    finally:
        parent.kill()
        parent.communicate()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Lines that begin with one document, and some that do not; every third is sampled."""
    lines = []
    for n in range(NUM_LINES):
        own = [3 + (n * 13 + k * (n + 3)) % 60 for k in range(20 + 10 * (n % 4))]
        prompt = DOCUMENT + own if n % 2 else own
        lines.append({"prompt": prompt, "max_tokens": 120, "ignore_eos": True})
        lines[-1] |= {"temperature": 1, "seed": n} if n % 3 == 0 else {}
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def answers(output: Path) -> dict[str, Any]:
    """What each line got; fails if one was answered twice."""
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture
def expected(model: Path, source: Path, tmp_path: Path) -> dict[str, Any]:
    """The answers without any tier, each line computed in a pool that is large enough for all."""
    output = tmp_path / "expected.jsonl"
    options = ("--model", model, *ENGINE[:2])
    assert invoke("batch", source, "-o", output, *options).exit_code == 0
    assert len(answers(output)) == NUM_LINES
    return answers(output)


def below(path: Path) -> tuple[object, ...]:
    return ("--kv-cold", f"{path}:{ROOM}", "--kv-warm", "40KiB")


def check_file(path: Path, folder: Path) -> int:
    """How many spans a copy of a cold file holds, all of them readable but the ones being written."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in path.parent.glob(path.name + "*"):
        shutil.copy(file, folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= ROOM
    cold = ColdTier(folder / path.name, ROOM)
    read = [cold.read(handle) is not None for handle in list(cold._records)]
    cold.check()
    cold.close()
    assert read.count(False) + cold.counters.damaged <= 2
    return sum(read)


def kill_batches(model: Path, source: Path, expected: dict[str, Any], times: int) -> None:
    """Kill that many runs, and go on with each; whatever is finished has every answer."""
    output, folder = source.with_name("out.jsonl"), source.with_name("cold")
    folder.mkdir()
    path = folder / "kv.cold"
    arguments = (source, "-o", output, "--model", model, *ENGINE, *below(path), "--resume")
    moments, killed, finished, found, longest = random.Random(11), 0, 0, [], 0.5
    with batches(source, "-o", source.with_name("once.jsonl"), "--model", model, *ENGINE[:2]) as runs:
        while killed < times or not finished:
            if output.exists() and output.read_bytes().count(b"\n") == NUM_LINES:
                assert answers(output) == expected
                output.unlink()
                finished += 1
                if finished % 2:  # every other time from an empty file
                    path.unlink()
            child = runs.start(*arguments)
            if killed < times:
                time.sleep(moments.uniform(0, longest))
                os.kill(child, signal.SIGKILL)
            status = runs.wait()
            assert status in (0, signal.SIGKILL)
            killed += status == signal.SIGKILL
            longest *= 1.1 if status else 0.7  # about as long as a run takes
            if path.exists():
                found.append(check_file(path, source.with_name("copy")))
        runs.start(*arguments)
        assert runs.wait() == 0
    assert answers(output) == expected
    assert found and max(found) >= 4  # of two blocks of the document in two layers


def test_tiers_that_are_full_of_movement_change_no_answer(
    model: Path, source: Path, expected: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for run in ("first", "second"):
        output = tmp_path / f"{run}.jsonl"
        done = invoke("batch", source, "-o", output, "--model", model, *ENGINE, *below(tmp_path / "kv.cold"))
        assert done.exit_code == 0
        assert answers(output) == expected
        assert any("demoting whole sequences" in message for message in caplog.messages)
        caplog.clear()


def test_batches_killed_at_any_moment_lose_nothing(
    model: Path, source: Path, expected: dict[str, Any]
) -> None:
    kill_batches(model, source, expected, 5)


@pytest.mark.slow
def test_batches_killed_at_fifty_moments_lose_nothing(
    model: Path, source: Path, expected: dict[str, Any]
) -> None:
    kill_batches(model, source, expected, 50)


def test_a_cold_file_that_another_run_has_is_refused_and_neither_run_suffers(
    model: Path, source: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    path, output = tmp_path / "kv.cold", tmp_path / "out.jsonl"
    tiers = (*below(path), *ENGINE)
    # The first run waits for a line that it does not get before the others have been refused.
    with start("batch", "-", "-o", output, "--model", model, *tiers, stdin=subprocess.PIPE) as first:
        assert first.stdin is not None
        lines = source.read_bytes().splitlines(keepends=True)
        first.stdin.write(b"".join(lines[:-1]))
        first.stdin.flush()
        deadline = time.monotonic() + 120
        while not (output.exists() and output.read_bytes().count(b"\n")) and time.monotonic() < deadline:
            time.sleep(0.02)
        link = tmp_path / "link.cold"
        link.symlink_to(path)
        sentence = f"Another process has {path} as its cold tier; give another path, or wait until it ends."
        for name in (path, link):
            other = ("--kv-cold", f"{name}:1MiB")
            second = tmp_path / "second.jsonl"
            assert error_of(invoke("batch", source, "-o", second, "--model", model, *other)) == sentence
            assert second.read_bytes() == b""
            assert error_of(invoke("generate", model, "--raw", "-p", "hi", *other)) == sentence
            assert error_of(invoke("chat", model, *other, stdin="hi")) == sentence
        first.communicate(lines[-1], timeout=120)
    assert first.returncode == 0
    assert answers(output) == expected
    done = invoke("batch", source, "-o", second, "--model", model, *tiers)
    assert done.exit_code == 0 and answers(second) == expected


def test_a_disk_that_is_full_is_said_once_and_changes_no_answer(
    model: Path, source: Path, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if offset + len(data) > 50_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    write = os.pwrite
    monkeypatch.setattr(cold_file.os, "pwrite", pwrite)
    output, path = tmp_path / "out.jsonl", tmp_path / "kv.cold"
    done = invoke("batch", source, "-o", output, "--model", model, *ENGINE, "--kv-cold", f"{path}:1MiB")
    assert done.exit_code == 0 and answers(output) == expected
    lines = done.stderr.splitlines()
    assert all(line.startswith("minikv: ") for line in lines)
    said = f"minikv: The cold tier {path} cannot be used in full (no space left on device), "
    assert sum(line.startswith(said) for line in lines) == 1
