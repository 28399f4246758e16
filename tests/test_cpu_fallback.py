"""What runs without the compiled kernels, and how threads are counted and told to wait."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from cli_tools import ROOT, write_tiny_model

from minikv.threads import default_threads, warn_if_threads_spin

WITHOUT_LIBRARY = """
import sys
import minikv.kernels.cpu.library as library
from pathlib import Path
library.__file__ = str(Path(sys.argv.pop(1)) / "library.py")
from minikv.cli.app import main
main()
"""


def run_python(*arguments: str, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, cwd=ROOT, env=clean | environment, timeout=60,
    )  # fmt: skip


def test_an_install_without_a_compiler_succeeds(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "minikv", tmp_path / "minikv", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    missing = {name: str(tmp_path / "no-compiler") for name in ("CC", "CXX", "LDSHARED", "LDCXXSHARED")}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | missing, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "failed" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


def test_without_the_library_plain_torch_generates(model: str, tmp_path: Path) -> None:
    command = [str(tmp_path), "generate", model, "--prompt", "the", "--max-tokens", "4", "--ignore-eos"]
    done = run_python(*command, code=WITHOUT_LIBRARY)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_without_the_library_the_reason_is_one_line(model: str, tmp_path: Path) -> None:
    command = [str(tmp_path), "generate", model, "--prompt", "the", "--backend", "cpu"]
    done = run_python(*command, code=WITHOUT_LIBRARY)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "backend cpu cannot be used: the compiled kernels were not built" in line


# How threads wait

REPORT = 'import os, sys; print(os.environ.get("OMP_WAIT_POLICY"))'


def test_importing_minikv_first_makes_waiting_threads_sleep() -> None:
    assert run_python(code=f"import minikv; {REPORT}").stdout.split() == ["PASSIVE"]


def test_a_policy_of_the_users_own_is_kept() -> None:
    done = run_python(code=f"import minikv; {REPORT}", OMP_WAIT_POLICY="ACTIVE")
    assert done.stdout.split() == ["ACTIVE"]


MAKE_TWO = """
import sys
from minikv import LLM
for _ in range(2):
    LLM(sys.argv[1], tiers=None, max_context=64).close()
"""


def test_importing_torch_first_is_warned_about_once(model: str) -> None:
    done = run_python(model, code="import torch\n" + MAKE_TWO)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert "import minikv before torch" in done.stderr


def test_importing_minikv_first_is_not_warned_about(model: str) -> None:
    done = run_python(model, code=MAKE_TWO)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("policy", ["PASSIVE", "passive"])
def test_a_passive_policy_is_never_warned_about(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_threads_spin()


@pytest.mark.parametrize("policy", [None, "ACTIVE"])
def test_spinning_threads_are_warned_about_in_one_sentence(
    policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    with pytest.warns(RuntimeWarning, match=r"^[^.]*OMP_WAIT_POLICY=PASSIVE\.$"):
        warn_if_threads_spin()


# How many threads there are


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores with two hardware threads each, all of them ours."""
    for cpu in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


def test_there_is_a_thread_per_physical_core(system: Path) -> None:
    assert default_threads(system) == 4


@pytest.mark.parametrize(("allowed", "cores"), [({0, 4}, 1), ({0, 1, 4}, 2), ({7}, 1), ({1, 6, 7}, 3)])
def test_only_cores_that_the_process_may_use_count(
    system: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    assert default_threads(system) == cores


@pytest.mark.parametrize(("limit", "cores"), [("max 100000", 4), ("150000 100000", 2), ("10000 100000", 1)])
def test_a_containers_share_of_time_limits_the_threads(system: Path, limit: str, cores: int) -> None:
    (system / "fs/cgroup").mkdir(parents=True)
    (system / "fs/cgroup/cpu.max").write_text(limit + "\n")
    assert default_threads(system) == cores


@pytest.mark.parametrize(
    ("asked", "cores"), [("2", 2), ("64", 4), ("3,1", 3), ("0", 1), ("many", 4), ("", 4)]
)
def test_a_limit_for_openmp_is_a_limit_for_us(
    system: Path, monkeypatch: pytest.MonkeyPatch, asked: str, cores: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert default_threads(system) == cores


def test_without_a_description_every_processor_is_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert default_threads(tmp_path) == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert default_threads(tmp_path) == 6


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler to build the kernels with")
def test_with_a_compiler_the_kernels_are_there() -> None:
    """The build is optional, and without it the kernels' own tests are skipped: that must not go unseen."""
    from minikv.kernels.cpu.library import load_library

    assert load_library().mkv_version() > 0
