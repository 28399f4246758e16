"""The NEON kernels, cross-compiled and emulated: the same results as plain C++, there and here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cpp_driver import assert_close, build_driver, host_compiler, run_driver

pytestmark = pytest.mark.slow

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def test_neon_gives_the_results_of_plain_kernels_on_both_processors(tmp_path: Path) -> None:
    for program in (COMPILER, EMULATOR):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here (Debian: g++-aarch64-linux-gnu, qemu-user)")
    folders = [tmp_path / name for name in ("arm", "host")]
    for folder in folders:
        folder.mkdir()
    emulated = [EMULATOR, str(build_driver([COMPILER], folders[0], "-O2", "-static"))]
    host = [str(build_driver(host_compiler(), folders[1], "-O2"))]
    neon = run_driver(emulated, "neon", tmp_path / "neon")
    assert_close(neon, run_driver(emulated, "generic", tmp_path / "generic"))
    assert_close(neon, run_driver(host, "generic", tmp_path / "host-generic"))
