"""What every benchmark needs: facts of the machine, worker processes, clocks."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "examples" / "data" / "lighthouse.txt"


def say(message: str) -> None:
    """Progress, on stderr, so that stdout stays the report."""
    print(message, file=sys.stderr, flush=True)


def run_worker(script: str, arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """Run `script` in a fresh process and return the JSON object it prints last.

    The threading variables are set here because the OpenMP runtime reads them once, when torch
    is imported. Waiting threads sleep instead of spinning: on a shared machine spinning threads
    take the processor from the ones that work, for either engine.
    """
    variables = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, script, *arguments], env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"The worker `{' '.join(arguments)}` ended with status {done.returncode}.")
    return json.loads(done.stdout.splitlines()[-1])


def peak_rss() -> int:
    """Bytes: the most memory this process has held at once."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@dataclass(frozen=True)
class Clocks:
    """A figure by two clocks: the one on the wall, and processor time summed over our threads.

    The second is steadier on a machine that others use too, but blind to waiting.
    """

    wall: float
    cpu: float

    def __sub__(self, other: Clocks) -> Clocks:
        return Clocks(self.wall - other.wall, self.cpu - other.cpu)


def timed(work: Callable[[], Any]) -> tuple[Clocks, Any]:
    """Seconds that `work` took, and what it returned."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return Clocks(time.perf_counter() - wall, time.process_time() - cpu), result


def machine(packages: Sequence[str] = ("torch", "transformers")) -> dict[str, Any]:
    """Processor, cores and versions, for the head of a report."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def read_bandwidth() -> float:
    """Bytes per second that the best pass over 512 MiB of float32 reaches."""
    import torch

    block = torch.ones(128 * 1024 * 1024)
    return block.nbytes / best_seconds(block.sum)


def matmul_rate() -> float:
    """Floating-point operations per second of the best 1024 x 1024 x 1024 float32 product."""
    import torch

    side = 1024
    matrix = torch.ones(side, side)
    return 2 * side**3 / best_seconds(lambda: matrix @ matrix)


def best_seconds(work: Callable[[], Any], trial_seconds: float = 4.0) -> float:
    """The fastest of as many runs as `trial_seconds` hold: what the machine does undisturbed."""
    end = time.perf_counter() + trial_seconds
    best = float("inf")
    while time.perf_counter() < end:
        best = min(best, timed(work)[0].wall)
    return best
