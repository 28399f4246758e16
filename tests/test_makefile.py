"""What `make` builds again, with a stand-in for the environment's Python that lists its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "minikv/kernels/cpu"
PYTHON = """#!/bin/sh
case "$2" in
  pip) echo "$@" >> calls; [ ! -e compiler ] || touch {folder}/_kernels.abi.so ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def project(tmp_path):
    """A project with an environment that nothing is installed in yet."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "api.cpp").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PYTHON.format(folder=FOLDER))
    python.chmod(0o755)
    (tmp_path / ".venv" / ".created").touch()
    return tmp_path


def installed(project: Path) -> int:
    """How often `make test` installs the package, without its tests."""
    calls = project / "calls"
    calls.write_text("")
    subprocess.run(["make", "test"], cwd=project, check=True, capture_output=True)
    return calls.read_text().count("--editable .\n")


def test_the_kernel_library_is_built_again_where_it_was_deleted(project):
    (project / "compiler").touch()
    assert installed(project) == 1
    os.utime(project / FOLDER / "_kernels.abi.so")  # as if it was built by hand since
    assert installed(project) == 0
    library = project / FOLDER / "_kernels.abi.so"
    library.unlink()
    assert installed(project) == 1 and library.exists()
    assert installed(project) == 0


def test_where_there_is_no_compiler_nothing_is_built_again(project):
    assert [installed(project) for _ in range(3)] == [1, 0, 0]
