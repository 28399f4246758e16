"""The example programs, run as a user runs them, on the built-in model."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The path lets the tests run from a source tree that is not installed.
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, timeout=300)


def number_after(label: str, output: str) -> int:
    match = re.search(rf"^{label}\s+([\d,]+)", output, re.MULTILINE)
    assert match, output
    return int(match.group(1).replace(",", ""))


def test_batch_example_answers_every_prompt_of_a_file(tmp_path: Path, smollm_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Say hello.\nName a colour.\nName a fruit.\n", encoding="utf-8")
    done = run_example("offline_batch.py", str(prompts), str(smollm_path))
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert sorted(row[0] for row in rows) == ["0", "1", "2"]
    assert all(reason in ("stop", "length") and ast.literal_eval(text) for _, reason, text in rows)


def test_batch_example_counts_an_overlong_prompt_as_a_failure(tmp_path: Path, smollm_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Say hello.\n" + "word " * 9000 + "\n", encoding="utf-8")
    done = run_example("offline_batch.py", str(prompts), str(smollm_path))
    assert done.returncode == 1, done.stderr
    reasons = dict(line.split("\t")[:2] for line in done.stdout.splitlines())
    assert reasons["1"] == "error"
    assert reasons["0"] in ("stop", "length")


def test_embed_example_stays_under_its_ceiling_and_shortens_what_does_not_fit(smollm_path: Path) -> None:
    done = run_example("embed.py", str(EXAMPLES / "data" / "lighthouse.txt"), str(smollm_path))
    assert done.returncode == 0, done.stderr
    assert "words:" in done.stderr
    assert 0 < number_after("KV bytes", done.stdout) <= 24 * 1024 * 1024
    # Float32 weights are 0.54 GB and torch itself 0.2 to 0.3 GB.
    assert number_after("peak RSS", done.stdout) < 1_400_000_000


def test_embed_example_reports_a_missing_model_in_one_line(tmp_path: Path) -> None:
    done = run_example("embed.py", str(EXAMPLES / "data" / "lighthouse.txt"), str(tmp_path / "absent.gguf"))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_demo_answers_both_questions_and_reports_speed(smollm_path: Path) -> None:
    done = run_example("demo.py", str(smollm_path))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("\n> ")[1:]
    assert "4388903" in first
    assert "Lisbon" in second
    assert number_after("reused", second) > 1400
    assert number_after("KV cache", second) > 0
    assert re.search(r"^decode\s+[\d.]+ tokens/s$", second, re.MULTILINE)
