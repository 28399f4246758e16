"""Whole calibrations of a tiny model: resumed, interrupted, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_tools import error_of, invoke, write_tiny_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from minikv import CacheConfig
from minikv.calibration.journal import Journal, pack, unpack
from minikv.calibration.measure import score_trial
from minikv.calibration.profile import load_profile_for, read_metadata
from minikv.calibration.run import Calibration, Settings
from minikv.calibration.trials import Plan, haystack_trials
from minikv.errors import ConfigError, RequestError
from minikv.loading import load_model
from minikv.probe import Probe

# A random model answers nothing, so every trial must count.
SETTINGS = Settings(trials=7, lengths=(256, 512), texts=3, seed=1, max_nll=1000.0, top_heads=2)
OPTIONS = ("--trials", 7, "--lengths", "256,512", "--texts", 3, "--seed", 1, "--max-nll", 1000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=4096)


@pytest.fixture(scope="module")
def probe(model: Path) -> Probe:
    return Probe(load_model(str(model), CacheConfig(), 1 << 40, backend="torch", threads=1), max_seqs=3)


def run(probe: Probe, path: Path, steps: int | None = None, settings: Settings = SETTINGS) -> Calibration:
    """A calibration that goes on for so many steps, or to its end."""
    with Journal(path, vars(settings)) as journal:
        calibration = Calibration(probe, settings, journal)
        for count, _ in enumerate(calibration.steps(), 1):
            if count == steps:
                break
        return calibration


def test_a_run_that_was_stopped_ends_as_one_that_was_not(probe: Probe, tmp_path: Path) -> None:
    whole = run(probe, tmp_path / "whole")
    assert whole.done == whole.total == 10
    part = run(probe, tmp_path / "part", steps=3)
    assert part.done == 3
    with (tmp_path / "part").open("ab") as file:
        file.write(b'{"key": "trial 0 3", "nll": 2.1, "exa')  # killed while it wrote
    assert run(probe, tmp_path / "part", steps=5).done == 8
    resumed = run(probe, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()
    for name, value in vars(whole.measurement()).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(getattr(resumed.measurement(), name)))
    assert whole.outcomes == resumed.outcomes and whole.facts() == resumed.facts()
    assert not probe.store.pool.bytes_in_use, "sequences were left open"
    probe.store.check()


def test_measurements_are_in_their_ranges(probe: Probe, tmp_path: Path) -> None:
    measured = run(probe, tmp_path / "journal").measurement()
    assert measured.retrieval.shape == measured.copy.shape == measured.stability.shape == (2, 4)
    assert measured.retrieval.max() < 1 and measured.copy.min() >= 0
    assert measured.stability.sum(dim=1).tolist() == pytest.approx([2, 2])
    assert measured.layer_errors.sum() == pytest.approx(1) and measured.layer_errors.min() > 0


def test_layers_are_measured_with_the_heads_that_are_asked_for(probe: Probe, tmp_path: Path) -> None:
    few, many = (replace(SETTINGS, trials=2, texts=1, top_heads=heads) for heads in (1, 4))
    first, second = (run(probe, tmp_path / f"{s.top_heads}", settings=s).measurement() for s in (few, many))
    assert not torch.equal(first.layer_errors, second.layer_errors)


def test_a_trial_is_scored_where_its_answer_is_predicted(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = haystack_trials(probe.tokenizer, Plan((256,), seed=1), 0, 4096)[0]
    count, ids = trial.num_answer, torch.tensor(trial.ids)
    rows: list[list[int]] = []

    def noted(weights: torch.Tensor, positions: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
        assert torch.equal(ids[slice(*span)], ids[-count:])
        rows.append(positions.tolist())
        return weights.sum(dim=(1, 2))

    monkeypatch.setattr("minikv.calibration.measure.retrieval_scores", noted)
    seq = probe.open()
    try:
        probe.feed(seq, trial.ids[:100], logits="none")
        nll = score_trial(probe, seq, 100, trial).nll
        logits = probe.feed(seq, trial.ids[100:-1], logits="all")
    finally:
        probe.close(seq)
    assert logits is not None
    assert rows == [list(range(len(ids) - 1 - count, len(ids) - 1))] * probe.config.num_layers
    assert nll == pytest.approx(float(cross_entropy(logits[-count:], ids[-count:])), rel=1e-4)


def test_a_model_that_answers_nothing_is_refused(probe: Probe, tmp_path: Path) -> None:
    settings = Settings(trials=2, lengths=(256,), texts=1, max_nll=0.001)
    with pytest.raises(ConfigError, match=r"answered none of 2 questions .* higher max_nll\.$"):
        run(probe, tmp_path / "journal", settings=settings)


def test_lengths_that_leave_no_room_are_not_said_to_be_unanswered(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "max_context", 512)
    monkeypatch.setattr("minikv.calibration.run.haystack_trials", lambda *_: [])  # all longer than 512
    with pytest.raises(ConfigError, match=r"No calibration question .* no room in the context of 512 tokens"):
        run(probe, tmp_path / "journal", settings=Settings(trials=2, lengths=(512,), texts=1))


def test_lengths_beyond_the_context_are_refused(probe: Probe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most the context of 4,096 tokens, not 5,000"):
        run(probe, tmp_path / "journal", settings=Settings(lengths=(512, 5000)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trials": 0}, "trials must be at least 1, not 0"),
        ({"texts": -1}, "texts must be at least 1"),
        ({"top_heads": 0}, "top_heads must be at least 1"),
        ({"lengths": ()}, "lengths must be numbers of at least 256 tokens"),
        ({"lengths": (512, 100)}, "lengths must be numbers of at least 256 tokens, not (512, 100)"),
        ({"seed": -1}, "seed must be a whole number from 0 to 2**63 - 1, not -1"),
        ({"seed": 1 << 63}, "seed must be a whole number from 0"),
        ({"max_nll": 0.0}, "max_nll must be a number above 0"),
        ({"max_nll": float("nan")}, "max_nll must be a number above 0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**changes)
    assert words in str(caught.value)


# The journal


def test_numbers_come_back_from_the_journal_bit_for_bit() -> None:
    numbers = torch.tensor([[1 / 3, -0.0], [1e-42, 3e38]])
    assert torch.equal(unpack(pack(numbers)).view(2, 2), numbers)


def test_a_journal_of_another_run_is_named_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.partial"
    with Journal(path, {"seed": 1, "lengths": (512, 1024)}) as journal:
        journal.add("trial 0 0", {"nll": 0.5})
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="unfinished run with seed 1, not 2; repeat that run, or give"):
        Journal(path, {"seed": 2, "lengths": (512, 1024)})
    assert path.read_bytes() == before
    with Journal(path, {"seed": 1, "lengths": (512, 1024)}, fresh=True) as journal:
        assert journal.entries == {"trial 0 0": {"nll": 0.5}}, "--overwrite must not cost the same run's work"
    with Journal(path, {"seed": 2}, fresh=True) as journal:
        assert not journal.entries


def test_settings_without_a_measurement_bind_nobody(tmp_path: Path) -> None:
    path = tmp_path / "x.partial"
    Journal(path, {"lengths": (99999,)}).__exit__(None, None, None)  # refused before it began
    with Journal(path, {"lengths": (512,)}) as journal:
        journal.add("trial 0 0", {"nll": 0.5})
    with Journal(path, {"lengths": (512,)}) as journal:
        assert list(journal.entries) == ["trial 0 0"]


def test_what_is_not_of_a_run_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.partial"
    for content in (b"my notes", b'{"settings": {}}\nmy notes'):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is damaged"):
            Journal(path, {})
        assert path.read_bytes() == content
    path.write_bytes(b'{"sett')  # killed while it wrote its first line
    Journal(path, {}).remove()


def test_a_journal_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.partial").mkdir()
    with pytest.raises(RequestError, match=r"Cannot write .*x\.partial: is a directory\.$"):
        Journal(tmp_path / "x.partial", {})


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.partial"
    for content in (b"garbage\n", b"[]\n", b'{"settings": {}}\n17\n', b'{"settings": {}}\n{"no": "key"}\n'):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"x\.partial is damaged; delete it or give --overwrite"):
            Journal(path, {})
    Journal(path, {}, fresh=True).remove()
    assert not path.exists()


def test_two_runs_do_not_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "x.partial", {}):
        with pytest.raises(ConfigError, match="Another run is writing"):
            Journal(tmp_path / "x.partial", {})


# The command


def test_the_command_makes_a_profile_that_fits_the_model(model: Path, probe: Probe, tmp_path: Path) -> None:
    output = tmp_path / "tiny.safetensors"
    done = invoke("calibrate", model, "-o", output, *OPTIONS, "--backend", "torch", "--top-heads", 2)
    assert done.exit_code == 0, done.output
    assert "7 of 7 trials count" in done.stdout and "retrieval heads" in done.stdout
    assert done.stdout.endswith(f"Wrote {output}.\n") and done.stderr == ""
    assert [entry.name for entry in tmp_path.iterdir()] == [output.name], "the partial file was left"
    assert load_profile_for(output, probe).top_heads == 2
    metadata = read_metadata(str(output))
    assert (metadata["trials"], metadata["trials_counted"], metadata["seed"]) == ("7", "7", "1")
    assert metadata["lengths"] == "256,512" and metadata["minikv_version"]
    again = tmp_path / "again.safetensors"
    assert not invoke(
        "calibrate", model, "-o", again, *OPTIONS, "--backend", "torch", "--top-heads", 2
    ).exit_code
    for name, tensor in load_file(output).items():
        assert torch.equal(tensor, load_file(again)[name])


def test_ctrl_c_stops_between_measurements_and_the_next_run_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pressed:
        requested = True

        def __enter__(self) -> Pressed:
            return self

        def __exit__(self, *_: object) -> None: ...

    arguments = ("calibrate", model, "-o", tmp_path / "p", *OPTIONS, "--backend", "torch")
    with monkeypatch.context() as patch:
        patch.setattr("minikv.cli.calibrate.Interrupts", Pressed)
        stopped = invoke(*arguments)
    assert stopped.exit_code == 130
    assert stopped.stderr == "minikv: Interrupted after 1 of 10 measurements. Run it again to go on.\n"
    lines = (tmp_path / "p.partial").read_text().splitlines()
    assert [json.loads(line).get("key") for line in lines] == [None, "trial 0 0"]
    assert "seed 1, not 2" in error_of(invoke(*arguments, "--seed", 2))
    assert invoke(*arguments).exit_code == 0
    assert not (tmp_path / "p.partial").exists()


def test_an_existing_file_is_kept_without_overwrite(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "p"
    output.write_text("mine")
    assert "exists already; give --overwrite" in error_of(invoke("calibrate", model, "-o", output))
    assert output.read_text() == "mine"


def test_an_output_that_cannot_be_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "p"
    assert f"There is no folder {missing.parent}" in error_of(invoke("calibrate", "nope", "-o", missing))
    assert "is not a regular file" in error_of(invoke("calibrate", "nope", "-o", "/dev/null", "--overwrite"))
    assert "is a folder" in error_of(invoke("calibrate", "nope", "-o", tmp_path))
    assert "trials must be" in error_of(invoke("calibrate", "nope", "-o", tmp_path / "p", "--trials", 0))
