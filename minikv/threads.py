"""How many threads compute, and how OpenMP's threads wait for each other."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

WAIT_POLICY = "OMP_WAIT_POLICY"


def default_threads(system: Path = Path("/sys")) -> int:
    """Physical cores that this process may use: at least 1, at most OMP_NUM_THREADS where that is set.

    A second thread on a core brings nothing to work that keeps the core's arithmetic busy.
    `system` is where Linux describes the processors.
    """
    cores = min(_physical_cores(system), _quota(system))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, min(cores, int(asked)) if asked.isdecimal() else cores)


def _physical_cores(system: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    return len({_siblings(system, cpu) for cpu in allowed})


def _siblings(system: Path, cpu: int) -> str:
    """The hardware threads of a processor's core, as Linux lists them; alone where that is not told."""
    try:
        listed = (system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        listed = ""
    return listed or str(cpu)


def _quota(system: Path) -> int:
    """Processors' worth of time that the container may use, rounded up; a large number without a limit."""
    try:
        quota, period = (system / "fs/cgroup/cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 30


def warn_if_threads_spin() -> None:
    """Warn, once per process, when OpenMP threads wait by spinning.

    Importing minikv sets the policy, which OpenMP reads when torch loads it: so it is missing only
    if torch came first, and other than PASSIVE only if the user chose so.
    """
    if os.environ.get(WAIT_POLICY, "").upper() != "PASSIVE":
        warnings.warn(
            "Torch's threads spin while they wait, which makes every step many times slower when another "
            f"process is busy; import minikv before torch, or set {WAIT_POLICY}=PASSIVE.",
            RuntimeWarning,
            stacklevel=1,
        )
