"""Measures against values computed by hand, results on disk, summaries, tables and plots."""

from __future__ import annotations

import csv
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minikv.errors import ConfigError, RequestError
from minikv.evals import plots
from minikv.evals.metrics import measure
from minikv.evals.plan import EvalPlan
from minikv.evals.records import RESULTS, SETTINGS, Record, ResultsFile
from minikv.evals.summary import plain, summarise, tables, write_summary

# Measures


def test_measures_are_those_computed_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]])
    found = measure(q.log() + 3.0, torch.tensor([1, 0]), p.log())
    assert (found.exact, found.token_accuracy, found.top1) == (False, 0.5, 0.5)
    assert found.nll == pytest.approx(-(math.log(0.5) + math.log(0.2)) / 2)
    first = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    second = 0.2 * math.log(0.5) + 0.8 * math.log(0.8 / 0.6)
    assert found.kl == pytest.approx((first + second) / 2)


def test_a_distribution_is_at_no_distance_from_itself() -> None:
    logits = torch.randn(5, 50) * 8
    logits[0, 3] = -torch.inf
    found = measure(logits, logits.argmax(dim=-1), logits)
    assert (found.exact, found.token_accuracy, found.kl, found.top1) == (True, 1.0, 0.0, 1.0)


# Files


def record(**changes) -> Record:
    values = {"task": "needle", "format": "city", "policy": "full", "budget": None, "length": 1024, "seed": 0}
    values |= {"depth": 0.25, "agnostic": False, "turn": 1, "exact": True, "token_accuracy": 1.0, "nll": 0.5}
    return Record(**(values | {"kl": 0.0, "top1": 1.0, "kv_bytes": 800, "full_bytes": 800} | changes))


def wrote(folder: Path, records: list[Record], settings: dict | None = None) -> None:
    with ResultsFile(folder) as results:
        results.settle(settings or {"model": "m", "kv_dtype": "float16"})
        results.write(records)


def test_a_torn_last_line_is_cut_and_the_rest_comes_back(tmp_path: Path) -> None:
    kept = [record(), record(policy="snapkv", budget=0.5, kv_bytes=400, compress_s=0.1)]
    wrote(tmp_path, kept)
    path = tmp_path / RESULTS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = "task format policy budget length seed depth agnostic turn exact token_accuracy nll kl top1 "
    assert " ".join(lines[0]) == names + "kv_bytes full_bytes compress_s"
    with path.open("a") as file:
        file.write('{"task": "needle", "form')
    with ResultsFile(tmp_path) as results:
        assert results.records == kept
        results.settle({"model": "m", "kv_dtype": "float16"})
        results.write([record(seed=1)])
    with ResultsFile(tmp_path) as results:
        assert results.records == [*kept, record(seed=1)]


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    wrote(tmp_path, [record()])
    with ResultsFile(tmp_path) as results, pytest.raises(ConfigError) as caught:
        results.settle({"model": "m", "kv_dtype": "int8"})
    assert "with kv_dtype 'float16', not 'int8'" in str(caught.value)
    (tmp_path / SETTINGS).unlink()
    with ResultsFile(tmp_path) as results, pytest.raises(ConfigError, match="could be mixed"):
        results.settle({"model": "m", "kv_dtype": "float16"})


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for line in ('{"prompt": "x"}', "[1]", "not JSON"):
        (tmp_path / RESULTS).write_text(f"{line}\n")
        with pytest.raises(ConfigError, match=r"Line 1 of .* was not written by minikv eval"):
            ResultsFile(tmp_path)


def test_files_of_others_are_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / RESULTS
    for content in ("my notes", json.dumps(vars(record())) + "\nmy notes"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="was not written by minikv eval"):
            ResultsFile(tmp_path)
        assert path.read_text() == content
    path.unlink()
    for content in ('{"editor.tabSize": 4}', "half {"):
        (tmp_path / SETTINGS).write_text(content)
        with ResultsFile(tmp_path) as results, pytest.raises(ConfigError, match=r"settings\.json was not"):
            results.settle({"evaluation": 1})
        assert (tmp_path / SETTINGS).read_text() == content
    (tmp_path / SETTINGS).write_text('{"evaluation": 1, "model": "that failed before its first answer"}')
    with ResultsFile(tmp_path) as results:
        results.settle({"evaluation": 1, "model": "m"})
    assert "failed" not in (tmp_path / SETTINGS).read_text()


def test_a_folder_that_cannot_be_written_or_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="Cannot write"):
        ResultsFile(tmp_path / "file")
    with ResultsFile(tmp_path / "new" / "folder"), pytest.raises(RequestError, match="Another run"):
        ResultsFile(tmp_path / "new" / "folder")


def test_keys_tell_budgets_of_different_kinds_apart() -> None:
    keys = {record(policy="snapkv", budget=budget).key for budget in (1, 1.0, "1MiB", None)}
    assert len(keys) == 4
    assert len({record(policy="snapkv", budget=budget).question for budget in (1, 1.0)}) == 1
    plan = EvalPlan(policies=("snapkv",), budgets=(1, 1.0, 1), lengths=(8, 8))
    assert list(map(repr, plan.budgets)) == ["1", "1.0"] and plan.lengths == (8,)


# Summaries

PLAN = EvalPlan(tasks=("needle", "perplexity"), policies=("snapkv", "window"), budgets=(0.5, 64))


def some_records() -> list[Record]:
    found = [record(seed=seed, depth=depth, nll=0.1) for seed in (0, 1) for depth in (0.25, 0.75)]
    for policy, budget in PLAN.variants[1:]:
        for full in found[:4]:
            right = policy == "snapkv" and full.depth == 0.75
            changes = {"exact": right, "kl": 0.25 + full.seed / 2, "compress_s": 0.02, "kv_bytes": 400}
            found.append(replace(full, policy=policy, budget=budget, **changes))
    text = record(task="perplexity", format="text64", depth=None, exact=None, token_accuracy=0.5, nll=2.0)
    text = replace(text, kl=None, top1=None)
    return [*found, text, replace(text, policy="snapkv", budget=0.5, token_accuracy=0.4)]


def test_summary_has_means_errors_and_shares_of_the_full_cache() -> None:
    rows = summarise(some_records(), PLAN.variants)
    shown = {(r.task, r.policy, r.budget): r for r in rows if r.format == "all"}
    row = shown["needle", "snapkv", 0.5]
    assert (row.answers, row.exact, row.relative, row.kl) == (4, 0.5, 0.5, 0.5)
    assert row.kl_se == pytest.approx(math.sqrt((4 * 0.25**2) / 3) / 2)
    assert (row.kv_bytes, row.full_bytes, row.compress_s) == (400, 800, 0.02)
    text = shown["perplexity", "snapkv", 0.5]
    assert (text.exact, text.kl, text.relative) == (None, None, pytest.approx(0.8))
    assert text.perplexity == pytest.approx(math.exp(2.0))
    assert shown["needle", "full", None].relative == 1.0


def test_rows_stand_by_task_and_budget_with_the_full_cache_first() -> None:
    rows = [row for row in summarise(some_records(), PLAN.variants) if row.format == "all"]
    columns = [("full", None), ("snapkv", 0.5), ("window", 0.5), ("snapkv", 64), ("window", 64)]
    assert [(r.policy, r.budget) for r in rows if r.task == "needle"] == columns
    assert [r.task for r in rows] == sorted(r.task for r in rows)


def test_tables_leave_out_what_says_nothing_and_the_csv_does_not(tmp_path: Path) -> None:
    rows = summarise(some_records(), PLAN.variants)
    needle, text = tables(rows)
    assert "perplexity" not in needle.head and {"exact", "KL", "of full"} <= set(needle.head)
    assert "exact" not in text.head and "perplexity" in text.head
    lines = plain(needle).splitlines()
    assert lines[0] == "needle, 1,024 tokens, query-aware"
    assert lines[3].split()[:5] == ["snapkv", "50%", "4", "50.0%", "50.0%"]
    with write_summary(tmp_path, rows).open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(rows)
    assert {line["exact"] for line in found if line["task"] == "perplexity"} == {""}


def test_a_grid_takes_only_its_own_records() -> None:
    other = [record(length=2048), record(seed=9), record(agnostic=True), record(task="quote")]
    other += [record(policy="adakv", budget=0.5), record(policy="snapkv", budget=0.25)]
    assert PLAN.chosen([*other, record()]) == [record()]


# Plots


def test_plots_show_depths_and_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = some_records() + [replace(r, length=2048) for r in some_records()]
    paths = plots.draw(records, summarise(records, PLAN.variants), tmp_path)
    assert [path.name for path in paths] == ["needle.png", "quality-needle.png", "quality-perplexity.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError, match="Cannot write"):
        plots.draw(records, [], tmp_path / "missing")


def test_plots_of_the_full_cache_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = summarise([record()], [("full", None)])
    assert len(plots.draw([record()], rows, tmp_path)) == 2


@pytest.mark.parametrize("policy", ["full", "snapkv"])
def test_plots_of_a_cache_that_was_nowhere_changed(tmp_path: Path, policy: str) -> None:
    pytest.importorskip("matplotlib")
    one = record(task="fidelity", format="text64", depth=None, exact=None, token_accuracy=None, nll=None)
    records = [one] if policy == "full" else [one, replace(one, policy=policy, budget=1.0)]
    rows = summarise(records, [("full", None), ("snapkv", 1.0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (path,) = plots.draw(records, rows, tmp_path)  # a divergence of zero has no logarithm
    assert path.name == "quality-fidelity.png"
