"""The compiled kernels under sanitizers: no data race, no access out of bounds, no undefined behaviour."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cpp_driver import build_driver, host_compiler

pytestmark = pytest.mark.slow

RACY = """
#include <thread>
int main() {
  int count = 0;
  std::thread other([&] { count++; });
  other.join();
  return count - 1;
}
"""


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_every_kernel_is_clean_on_1_2_3_and_8_threads(sanitizers: str, tmp_path: Path) -> None:
    compiler = host_compiler()
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1"]
    prefix = runner(compiler, flags, tmp_path)
    driver = build_driver(compiler, tmp_path, *flags)
    rounds = "3" if sanitizers == "thread" else "1"
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_stack_use_after_return=1"}
    done = subprocess.run(
        [*prefix, str(driver), "all", "-", rounds],
        capture_output=True, text=True, timeout=1800, env=os.environ | options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stderr == ""


def runner(compiler: list[str], flags: list[str], folder: Path) -> list[str]:
    """What to put before a program with these sanitizers; skips the test where none can run."""
    source, program = folder / "small.cpp", folder / "small"
    source.write_text(RACY, encoding="utf-8")
    built = subprocess.run(
        [*compiler, "-std=c++17", "-pthread", *flags, str(source), "-o", str(program)], capture_output=True
    )
    if built.returncode:
        pytest.skip(f"{compiler[0]} cannot build with {flags[0]}")
    # Where addresses are spread too widely for the sanitizer's shadow memory, spreading is turned off.
    for prefix in ([], ["setarch", "-R"]):
        try:
            if subprocess.run([*prefix, str(program)], capture_output=True).returncode == 0:
                return prefix
        except FileNotFoundError:
            continue
    pytest.skip(f"a program built with {flags[0]} does not run here")
