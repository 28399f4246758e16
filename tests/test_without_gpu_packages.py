"""minikv where neither triton nor flashinfer can be imported, whether they are installed or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_tools import write_tiny_model

BLOCKED = """
import sys
sys.modules["triton"] = sys.modules["flashinfer"] = None
"""


def run_blocked(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code, *arguments]
    root = Path(__file__).parents[1]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


def test_text_is_generated(model):
    code = "sys.argv[1:1] = ['generate']\nfrom minikv.cli.entry import main\nmain()"
    done = run_blocked(code, model, "--prompt", "the", "--max-tokens", "4", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_asking_for_a_backend_says_how_to_get_it(model, backend):
    code = "sys.argv[1:1] = ['generate']\nfrom minikv.cli.entry import main\nmain()"
    done = run_blocked(code, model, "--prompt", "the", "--backend", backend)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    words = f"backend {backend} cannot be used: {backend} is not installed (pip install 'minikv[{backend}]')."
    assert words in line
