"""The package as it is installed and imported: what it needs, what it must not need."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("minikv", "tests", "examples", "benchmarks", "docs", ".ci")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".cpp", ".h", ""}
BLOCKED = ("triton", "flashinfer", "transformers", "accelerate", "psutil")

BLOCK_AND_RUN = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
{code}
"""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def source_files() -> list[Path]:
    """Every text file of the project: those at the top and in its folders."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in SOURCE_FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [f for f in files if f.suffix in TEXT_SUFFIXES and "__pycache__" not in f.parts]


def test_every_module_imports_without_gpu_packages_and_transformers() -> None:
    code = """
import importlib, pkgutil, minikv
skipped = ["minikv.__main__", "minikv.kernels.cpu._kernels"]  # the command; no Python module
kernels = ("attend", "backend", "blocks", "entries", "language", "moves", "rows")
skipped += ["minikv.kernels.triton." + name for name in kernels] + ["minikv.kernels.flashinfer.backend"]
names = [m.name for m in pkgutil.walk_packages(minikv.__path__, "minikv.") if m.name not in skipped]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
    assert int(run_python(BLOCK_AND_RUN.format(blocked=BLOCKED, code=code))) > 20


def test_public_names_are_reachable_from_the_top() -> None:
    code = """
import minikv
for name in ("LLM", "SamplingParams", "CacheConfig", "TierConfig", "MinikvError", "Job", "ChatSession"):
    getattr(minikv, name)
for name in minikv.__all__:
    getattr(minikv, name)
"""
    run_python(BLOCK_AND_RUN.format(blocked=BLOCKED, code=code))


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = run_python("import minikv, sys; print(*sys.modules)").split()
    heavy = {"torch", "numpy", "tokenizers", "gguf", "typer", "rich", "prompt_toolkit", "huggingface_hub"}
    assert heavy.isdisjoint(loaded)


def test_help_is_shown_without_loading_torch() -> None:
    code = """
import sys
from minikv.cli.app import main
sys.argv = ["minikv", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
print("torch" in sys.modules)
"""
    assert run_python(code).splitlines()[-1] == "False"


def test_import_starts_no_thread_and_no_random_state() -> None:
    code = """
import threading, torch
torch.manual_seed(5)
before = torch.get_rng_state()
import minikv
print(threading.active_count(), bool((before == torch.get_rng_state()).all()))
"""
    assert run_python(code).split() == ["1", "True"]


def test_command_is_declared_and_callable() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    command = EntryPoint("minikv", project["scripts"]["minikv"], "console_scripts")
    assert callable(command.load())


def test_pinned_versions_lie_in_the_declared_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    exact = {pin.name.lower(): str(next(iter(pin.specifier)).version) for pin in pins}
    extras = [text for group in project["optional-dependencies"].values() for text in group]
    for text in project["dependencies"] + extras:
        wanted = Requirement(text)
        assert wanted.name.lower() in exact, f"constraints.txt does not pin {wanted.name}"
        assert exact[wanted.name.lower()] in wanted.specifier, text


def test_runtime_dependencies_have_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in project["dependencies"]:
        assert any(bound.operator == "<" for bound in Requirement(text).specifier), text


def test_no_file_names_a_folder_of_one_machine() -> None:
    # Written so that the pattern does not find itself.
    folders = "|".join(("root", "home", "Users", "work", "farm", "tmp"))
    pattern = re.compile(rf"(?<![\w.~$}}/-])/(?:{folders})/[\w.-]+")
    found = {str(f.relative_to(ROOT)): pattern.findall(f.read_text(encoding="utf-8")) for f in source_files()}
    assert not {name: hits for name, hits in found.items() if hits}


def test_no_source_file_is_longer_than_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in source_files()
        if path.suffix in {".py", ".cpp", ".h"} and (count := len(path.read_text("utf-8").splitlines())) > 500
    }
    assert not long
