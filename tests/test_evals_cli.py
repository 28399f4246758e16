"""`minikv eval` on a tiny model: a grid end to end, going on after a stop, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_tools import error_of, invoke
from eval_tools import write_word_model

from minikv.cache.evidence import Recorded
from minikv.cache.policies.profile import HeadProfile
from minikv.cache.showing import joined, shown_to
from minikv.cli import eval as command
from minikv.evals import plots
from minikv.evals.plan import EvalPlan
from minikv.evals.sweep import variants_of
from minikv.probe import Probe

GRID = ("--tasks", "needle,multi-turn,fidelity", "--policies", "snapkv,window", "--budgets", "1.0,0.1")
SIZE = ("--lengths", "1100", "--samples", "1", "--seed", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_word_model(tmp_path_factory.mktemp("eval") / "tiny")


@pytest.fixture(autouse=True)
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)


def run(model: Path, output: Path, *options: object):
    return invoke("eval", model, *GRID, *SIZE, "--threads", 1, "-o", output, *options)


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


def timeless(output: Path) -> list[str]:
    """Records in any order, without what differs from run to run."""
    found = lines(output)
    for line in found:
        line["compress_s"] = line["compress_s"] is None
    return sorted(map(json.dumps, found))


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run."""
    output = tmp_path_factory.mktemp("eval") / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "available", lambda: False)
        result = run(model, output)
    assert result.exit_code == 0, (result.output, result.exception)
    (output / "printed").write_text(result.stdout + result.stderr)
    return output


def test_every_policy_and_budget_is_measured_beside_the_full_cache(done: Path) -> None:
    records = lines(done)
    columns = {(r["policy"], r["budget"]) for r in records}
    assert columns == {("full", None), *((p, b) for p in ("snapkv", "window") for b in (1.0, 0.1))}
    assert len(records) == 5 * (5 + 2 * 2 + 2)
    for record in records:
        if record["budget"] == 0.1:
            assert record["kv_bytes"] < 0.15 * record["full_bytes"] and record["compress_s"] > 0
            assert record["kl"] > 0
        assert (record["task"] == "fidelity") == (record["exact"] is None)
    printed = (done / "printed").read_text()
    assert "needle, 1,100 tokens, query-aware" in printed and "multi-turn, turn 2" in printed
    assert plots.NEEDED in printed
    assert (done / "summary.csv").read_text().count("\n") > 20


def test_a_budget_of_everything_gives_the_figures_of_the_full_cache(done: Path) -> None:
    def figures(record: dict[str, Any]) -> str:
        left_out = {"policy", "budget", "compress_s"}
        return json.dumps({name: value for name, value in record.items() if name not in left_out})

    records = lines(done)
    full = sorted(figures(r) for r in records if r["policy"] == "full")
    for policy in ("snapkv", "window"):
        assert sorted(figures(r) for r in records if r["policy"] == policy and r["budget"] == 1.0) == full


def test_going_on_computes_what_is_missing_and_nothing_else(model: Path, done: Path, tmp_path: Path) -> None:
    text = (done / "results.jsonl").read_text()
    kept = text[: len(text) // 3]
    (tmp_path / "results.jsonl").write_text(kept)
    (tmp_path / "settings.json").write_text((done / "settings.json").read_text())
    assert not kept.endswith("\n"), "the last line has to be torn"
    result = run(model, tmp_path)
    assert result.exit_code == 0, result.output
    whole = kept[: kept.rindex("\n") + 1]
    assert (tmp_path / "results.jsonl").read_text().startswith(whole)
    assert timeless(tmp_path) == timeless(done)
    rows = [len((folder / "summary.csv").read_text().splitlines()) for folder in (tmp_path, done)]
    assert rows[0] == rows[1]


def test_an_interrupted_run_says_so_and_goes_on(
    model: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(command.Interrupts):
        def __init__(self) -> None:
            super().__init__()
            self.requested = True

    with monkeypatch.context() as patch:
        patch.setattr(command, "Interrupts", Impatient)
        result = run(model, tmp_path)
    assert result.exit_code == 130
    assert "Interrupted after 1 of 55 answers. Run it again to go on." in result.stderr
    assert len(lines(tmp_path)) == 1
    assert run(model, tmp_path).exit_code == 0
    assert timeless(tmp_path) == timeless(done)


def test_a_run_that_is_done_loads_its_results_only(
    model: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (done / "results.jsonl").read_bytes()
    monkeypatch.setattr(Probe, "feed", lambda *_: pytest.fail("nothing is missing"))
    assert run(model, done).exit_code == 0
    assert (done / "results.jsonl").read_bytes() == before


def test_a_grid_may_grow_but_settings_may_not_change(model: Path, done: Path) -> None:
    assert "with window 16, not 8" in error_of(run(model, done, "--kv-window", 8))
    assert "not 'int8'; give another folder" in error_of(run(model, done, "--kv-dtype", "int8"))
    before = len(lines(done))
    result = run(model, done, "--tasks", "perplexity", "--policies", "window", "--budgets", "32")
    assert result.exit_code == 0, result.output
    assert len(lines(done)) == before + 2
    assert "perplexity, 1,100" in result.stdout and "needle" not in result.stdout


def test_agnostic_compresses_once_for_all_questions(model: Path, tmp_path: Path) -> None:
    options = ("--tasks", "needle", "--policies", "snapkv,expected,adakv:compresskv", "--budgets", "0.2,64")
    result = invoke("eval", model, *options, *SIZE, "--threads", 1, "--agnostic", "-o", tmp_path)
    assert result.exit_code == 0, (result.output, result.exception)
    records = lines(tmp_path)
    assert all(record["agnostic"] for record in records) and len(records) == 7 * 5
    for policy in ("snapkv", "expected", "adakv:compresskv"):
        times = {r["compress_s"] for r in records if r["policy"] == policy and r["budget"] == 64}
        assert len(times) == 1, "the questions share one compression"
    assert "query-agnostic" in result.stdout


def test_merging_and_refits_are_measured_beside_the_plain_policies(model: Path, tmp_path: Path) -> None:
    policies = "gracekv,gracekv+refit,gracekv-refit,snapkv,snapkv+refit"
    options = ("--tasks", "quote", "--policies", policies, "--budgets", "1/128,0.2")
    result = invoke("eval", model, *options, *SIZE, "--threads", 1, "-o", tmp_path)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "0.78125%" in result.stdout and "20%" in result.stdout
    records = lines(tmp_path)
    found = {(r["policy"], r["budget"]): r["kl"] for r in records if r["depth"] == records[0]["depth"]}
    assert set(found) == {("full", None)} | {(p, b) for p in policies.split(",") for b in (1 / 128, 0.2)}
    assert found["snapkv", 0.2] != found["snapkv+refit", 0.2]
    assert found["gracekv-refit", 0.2] != found["gracekv+refit", 0.2]
    assert found["gracekv", 0.2] in (found["gracekv-refit", 0.2], found["gracekv+refit", 0.2])


def test_the_full_cache_alone_can_be_measured(model: Path, tmp_path: Path) -> None:
    result = invoke("eval", model, "--tasks", "quote", "--policies", "full", *SIZE, "-o", tmp_path)
    assert result.exit_code == 0, (result.output, result.exception)
    assert [record["policy"] for record in lines(tmp_path)] == ["full"] * 4


@pytest.mark.parametrize("name", ["snapkv", "adakv", "expected", "compresskv"])
def test_shared_evidence_is_what_a_policy_would_have_recorded_itself(model: Path, name: str) -> None:
    probe = Probe.load(str(model), threads=1, max_context=512, max_seqs=3)
    profile = HeadProfile(torch.rand(2, 4), torch.rand(2), top_heads=2)
    plan = EvalPlan(policies=("snapkv", "expected", "compresskv", name), budgets=(0.2,), window=8)
    variants = variants_of(plan, probe, profile)
    chosen = next(variant for variant in variants if variant.name == name)
    ids = torch.randint(3, 400, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    content, whole = range(280), range(296)

    shared = probe.record(joined([variant.policy.evidence for variant in variants]), content)
    base = probe.open()
    probe.feed(base, ids[:280], "none", shared)
    asked = probe.fork(base)
    shared = shared.extended(whole)
    probe.feed(asked, ids[280:], "none", shared)
    own = probe.record(chosen.policy.evidence, whole)
    alone = probe.open()
    probe.feed(alone, ids, "none", own)

    def keep(seq: int, recorded: Recorded) -> torch.Tensor:
        return probe.compressor.choose(seq, chosen.policy, chosen.cache, 300, recorded)

    kept = keep(asked, shown_to(shared.result(), chosen.policy.evidence))
    assert kept.sum() == 0.2 * kept.numel()
    agreement = (kept == keep(alone, own.result())).float().mean()
    # Chunks end elsewhere, so a near tie may fall the other way.
    assert agreement > 0.99


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tasks", "nedle"), "There is no task 'nedle'; did you mean needle or multi-needle?"),
        (("--tasks", "essay"), "There is no task 'essay'; choose from needle,"),
        (("--tasks", ","), "tasks must name at least one."),
        (("--policies", "snapvk"), "There is no policy 'snapvk'; did you mean snapkv"),
        (("--policies", "snapvk+refit"), "There is no policy 'snapvk'; did you mean snapkv"),
        (("--policies", "full+refit"), "policy full keeps everything"),
        (("--budgets", "1.5"), "budget must be above 0 and at most 1"),
        (("--budgets", "0.5,0"), "at least 1 entry per lane"),
        (("--budgets", "half"), "budget must be a fraction"),
        (("--lengths", "0"), "lengths must be numbers of tokens of at least 1, not 0."),
        (("--lengths", "4096"), "A length of 4096 tokens is more than the context of"),
        (("--lengths", "400"), "has no room for the needles and questions"),
        (("--samples", "0"), "samples must be from 1 to 10000, not 0."),
        (("--seed", "-1"), "seed must be a whole number of at least 0, not -1."),
        (("--kv-window", "0"), "window must be a whole number of at least 1"),
        (("--kv-profile", "nowhere.safetensors", "--policies", "compresskv"), "nowhere.safetensors"),
    ],
)
def test_bad_input_is_one_sentence(
    model: Path, tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    assert sentence in error_of(run(model, tmp_path, *options))


def test_too_few_bytes_are_refused_before_the_first_answer(model: Path, tmp_path: Path) -> None:
    assert "budget of 16 B is too little" in error_of(run(model, tmp_path, "--budgets", "0.5,16B"))
    assert not (tmp_path / "results.jsonl").read_text()


def test_a_folder_that_cannot_be_written_is_one_sentence(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Cannot write" in error_of(run(model, tmp_path / "file"))
    assert "Cannot write" in error_of(run(model, tmp_path / "file" / "inside"))
