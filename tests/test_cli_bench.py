"""`minikv bench` on a tiny model: what it prints, what its JSON holds, what it leaves out and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_tools import ROOT, error_of, invoke, write_tiny_model

from minikv.cli import bench_measure
from minikv.cli.bench_plan import WARM_UP, BenchPlan
from minikv.errors import ConfigError

SMALL = ("--contexts", "32,64", "--batch-sizes", "1,3", "--prompt-lengths", "16", "--repeat", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny", max_context=64)


@pytest.fixture(autouse=True)
def short_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_measure, "_READ_SECONDS", 0.02)


def figures(*arguments: object) -> dict[str, Any]:
    done = invoke("bench", *arguments, "--json")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_theory_is_printed_before_the_measurement(model: Path) -> None:
    done = invoke("bench", model, *SMALL)
    assert done.exit_code == 0, done.output
    parts = ("What memory allows", "GB/s", "floor ms", "Decode", "of floor", "Prefill", "Loaded in")
    places = [done.stdout.index(part) for part in parts]
    assert places == sorted(places)
    assert "Left out" not in done.stdout


def test_json_has_every_figure(model: Path) -> None:
    facts = figures(model, *SMALL, "--threads", "1", "--kv-dtype", "float32")
    theory = facts["theory"]
    assert (facts["architecture"], facts["threads"], facts["kv_dtype"]) == ("llama", 1, "float32")
    assert theory["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    points = [(1, 32), (1, 64), (3, 32), (3, 64)]
    assert [(floor["batch_size"], floor["context"]) for floor in theory["floors"]] == points
    assert [(row["batch_size"], row["context"]) for row in facts["decode"]] == points
    for floor, row in zip(theory["floors"], facts["decode"], strict=True):
        kv = floor["batch_size"] * floor["context"] * theory["kv_bytes_per_token"]
        assert floor["bytes_per_step"] == theory["weight_bytes"] + kv
        assert floor["ms"] == pytest.approx(1e3 * floor["bytes_per_step"] / theory["read_bandwidth"])
        step, rate, share = row["ms_per_step"], row["tokens_per_second"], row["share_of_floor"]
        assert 0 < step["best"] <= step["median"]
        assert rate["median"] == pytest.approx(1e3 * row["batch_size"] / step["median"])
        assert share["median"] == pytest.approx(row["floor_ms"] / step["median"])
        assert row["kv_bytes"] >= kv
    (prefill,) = facts["prefill"]
    assert prefill["prompt_tokens"] == 16
    assert 0 < prefill["tokens_per_second"]["median"] <= prefill["tokens_per_second"]["best"]
    assert facts["peak_memory_bytes"] >= facts["decode"][-1]["peak_memory_bytes"] > 0
    assert facts["left_out"] == []


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_weights_of_a_step_are_what_the_backend_holds(model: Path, backend: str) -> None:
    facts = figures(model, *SMALL, "--backend", backend, "--contexts", "none")
    parameters = facts["parameters"]
    # Norms and rows that are only looked up are not counted.
    assert 0.5 * 4 * parameters < facts["theory"]["weight_bytes"] <= 4 * parameters
    assert facts["backend"] == backend


def test_what_exceeds_the_context_is_left_out_and_named(model: Path) -> None:
    facts = figures(model, "--contexts", "32,65", "--batch-sizes", "1", "--prompt-lengths", "64,65")
    assert [row["context"] for row in facts["decode"]] == [32]
    assert [row["prompt_tokens"] for row in facts["prefill"]] == [64]
    assert facts["left_out"] == [
        "decode at context 65, batch size 1: the context is 64 tokens.",
        "prefill of 65 tokens: the context is 64 tokens.",
    ]
    assert "Left out: prefill of 65 tokens" in invoke("bench", model, "--prompt-lengths", "65").stdout


def test_what_exceeds_the_pool_or_max_seqs_is_left_out_and_named(model: Path) -> None:
    options = ("--contexts", "64", "--prompt-lengths", "none", "--kv-hot", "80KiB", "--max-seqs", "4")
    facts = figures(model, *options, "--batch-sizes", "1,4,5", "--kv-dtype", "float32", "--backend", "torch")
    assert [row["batch_size"] for row in facts["decode"]] == [1]
    pool, seqs = facts["left_out"]
    assert pool.startswith("decode at context 64, batch size 4: that needs 1")
    assert "pool has" in pool
    assert seqs == "decode at context 64, batch size 5: max_seqs is 4."


def test_steps_end_at_the_context_that_is_named(model: Path) -> None:
    from minikv import LLM

    with LLM(model) as llm:
        seconds, held = bench_measure.time_steps(llm, context=64, batch_size=2, steps=10)
        assert len(seconds) == 10
        assert held == 2 * llm.full_kv_bytes(64)
        assert llm.kv_bytes_in_use == 0


def test_steps_take_at_most_half_of_a_context() -> None:
    plan = BenchPlan(repeat=3)
    assert plan.steps_at(2048) == 48
    assert plan.steps_at(64) == 32 - WARM_UP
    assert plan.steps_at(8) == 2


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"contexts": (7,)}, "contexts"),
        ({"batch_sizes": (1, 0)}, "batch_sizes"),
        ({"batch_sizes": (129,)}, "batch_sizes"),
        ({"prompt_lengths": (-1,)}, "prompt_lengths"),
        ({"repeat": 0}, "repeat"),
    ],
)
def test_plan_refuses_what_cannot_be_measured(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BenchPlan(**values)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--contexts", "4"), "contexts"),
        (("--repeat", "0"), "repeat"),
        (("--batch-sizes", "1000"), "batch_sizes"),
        (("--kv-dtype", "int3"), "kv_dtype"),
        (("--threads", "0"), "threads"),
    ],
)
def test_wrong_value_is_one_sentence(model: Path, options: tuple[str, ...], named: str) -> None:
    assert named in error_of(invoke("bench", model, *options))


@pytest.mark.parametrize("options", [("--contexts", "many"), ("--repeat", "often"), ("--no-such-option",)])
def test_wrong_usage_exits_2(model: Path, options: tuple[str, ...]) -> None:
    assert invoke("bench", model, *options).exit_code == 2


def test_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    assert "absent.gguf" in error_of(invoke("bench", tmp_path / "absent.gguf"))


def test_help_loads_no_torch() -> None:
    code = "import sys; sys.argv = ['minikv', 'bench', '--help']\nfrom minikv.cli.app import main\n"
    code += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--prompt-lengths" in done.stdout
