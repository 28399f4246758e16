"""Building and running tests/cpp/kernel_driver.cpp with a compiler of choice."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "minikv" / "kernels" / "cpu"
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-I{KERNELS}"]


def host_compiler() -> list[str]:
    """The C++ compiler of this machine; skips the test without one."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
    pytest.skip("there is no C++ compiler here")


def build_driver(compiler: list[str], folder: Path, *flags: str) -> Path:
    """The driver with all kernels."""
    program = folder / "kernel_driver"
    sources = [*sorted(KERNELS.glob("*.cpp")), ROOT / "tests" / "cpp" / "kernel_driver.cpp"]
    done = subprocess.run(
        [*compiler, *FLAGS, *flags, *map(str, sources), "-o", str(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return program


def run_driver(command: list[str], isa: str, out: Path) -> dict[str, tuple[np.ndarray, float]]:
    """Results and tolerance of each case on one instruction set."""
    done = subprocess.run([*command, isa, str(out), "1"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    numbers, cases = np.fromfile(out, dtype=np.float32), {}
    for line in done.stdout.splitlines():
        name, count, tolerance = line.split()
        cases[name], numbers = (numbers[: int(count)], float(tolerance)), numbers[int(count) :]
    assert not len(numbers) and len(cases) > 300
    return cases


def assert_close(
    some: dict[str, tuple[np.ndarray, float]], others: dict[str, tuple[np.ndarray, float]]
) -> None:
    """Every case agrees within its tolerance, taken of the case's largest number."""
    assert some.keys() == others.keys()
    far = {}
    for name, (numbers, tolerance) in some.items():
        expected = others[name][0]
        bound = tolerance * max(np.abs(expected).max(initial=0.0), 1e-6)
        difference = np.abs(numbers - expected).max(initial=0.0)
        if not difference <= bound:
            far[name] = (difference, bound)
    assert not far
