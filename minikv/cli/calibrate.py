"""`minikv calibrate`: measure a model's heads and layers, and keep the result as a profile."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from minikv.cli import console
from minikv.cli.interrupts import Interrupts
from minikv.cli.options import ENGINE, Option, takes
from minikv.errors import ConfigError
from minikv.version import version

if TYPE_CHECKING:
    from minikv.calibration.run import Calibration
    from minikv.probe import Probe

MEASUREMENT = (
    Option("trials", "int", "Questions about facts hidden in a text.", "300"),
    Option("lengths", "ints", "Tokens of their prompts.", "512,1024,2048", metavar="N,N"),
    Option("texts", "int", "Texts on which the layers are measured.", "30"),
    Option("seed", "int", "Of all texts and resamples.", "0"),
    Option("max_nll", "float", "Questions count whose answer's tokens cost at most this, in nats.", "0.7"),
    Option("top_heads", "int", "Retrieval heads per layer.", "4"),
)
_LOADING = ("kv_dtype", "device", "backend", "weights", "dtype", "threads", "revision", "offline")
LOADING = tuple(option for option in ENGINE if option.name in _LOADING)
# The haystack, a copy of it for a question, and one to spare.
_SEQUENCES = 3


class Run(Protocol):
    """Work in parts, some of which are done."""

    @property
    def total(self) -> int: ...
    @property
    def done(self) -> int: ...


@takes(measurement=MEASUREMENT, engine=LOADING)
@console.guarded
def calibrate(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, Hub id or built-in name.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The profile.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file, and what another run left unfinished.")
    ] = False,
    *,
    measurement: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Make a calibration profile: which heads retrieve, and which layers suffer from eviction.

    A run that was stopped goes on where it ended when it is given again.
    """
    from minikv.calibration.journal import Journal
    from minikv.calibration.run import Calibration, Settings

    settings = Settings(**measurement)
    check_output(output, overwrite)
    probe = load(model, engine)
    partial = output.with_name(f"{output.name}.partial")
    with Journal(partial, described(dataclasses.asdict(settings), probe), fresh=overwrite) as journal:
        calibration = Calibration(probe, settings, journal)
        if not _measure(calibration):
            count = f"{calibration.done} of {calibration.total} measurements"
            console.complain(f"Interrupted after {count}. Run it again to go on.")
            raise typer.Exit(console.EXIT_INTERRUPTED)
        text = _finish(calibration, probe, output)
        journal.remove()
    console.write_text(f"{text}Wrote {output}.\n")


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written, or must not be."""
    try:
        if output.is_dir():
            raise ConfigError(f"{output} is a folder; give the name of a file in it.")
        if output.exists() and not output.is_file():
            raise ConfigError(f"{output} is not a regular file; give another name.")
        if output.exists() and not overwrite:
            raise ConfigError(f"{output} exists already; give --overwrite or another name.")
        if not output.parent.is_dir():
            raise ConfigError(f"There is no folder {output.parent} for the profile.")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise console.OutputError(f"Cannot write {output}: {error}.") from None


def load(model: str, engine: dict[str, Any]) -> Probe:
    """The model, for a run that holds few sequences at once."""
    from minikv import CacheConfig
    from minikv.loading import load_model
    from minikv.memory import available_bytes
    from minikv.probe import Probe

    rest = dict(engine)
    cache = CacheConfig(**{key: rest.pop(key) for key in ("kv_dtype",) if key in rest})
    loaded = load_model(model, cache, available_bytes(), progress=console.stderr_is_terminal(), **rest)
    return Probe(loaded, max_seqs=_SEQUENCES)


def described(settings: dict[str, Any], probe: Probe) -> dict[str, Any]:
    """All that decides a measurement, so that no others are mixed with it."""
    return {
        "minikv": version(),
        "model": probe.fingerprint,
        "backend": probe.backend_name,
        "kv_dtype": str(probe.kv_dtype).removeprefix("torch."),
        "weights": probe.weights,
        **settings,
    }


def _measure(calibration: Calibration) -> bool:
    """Make all measurements under a progress bar; False when Ctrl-C ended it early."""
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        show = show_progress(calibration, stack, "measurements")
        for _ in calibration.steps():
            show()
            if interrupts.requested:
                return calibration.done == calibration.total
    return True


def show_progress(run: Run, stack: ExitStack, what: str) -> Any:
    """Starts a bar on stderr, if that is a terminal; a function that brings it up to date."""
    if not console.stderr_is_terminal():
        return lambda: None
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.fields[status]}", markup=False), TimeRemainingColumn())
    progress = stack.enter_context(Progress(*columns, console=console.error_console(), transient=True))
    task = progress.add_task("run", total=run.total, completed=run.done, status="")

    def show() -> None:
        progress.update(task, completed=run.done, status=f"{run.done} of {run.total} {what}")

    show()
    return show


def _finish(calibration: Calibration, probe: Probe, output: Path) -> str:
    """Write the profile; the report."""
    from minikv.calibration.profile import identity_of, save_profile
    from minikv.cli.calibrate_report import report

    measurement = calibration.measurement()
    facts = {"model": probe.name, "minikv_version": version(), **calibration.facts()}
    save_profile(output, measurement, identity_of(probe), facts)
    return report(measurement, calibration.outcomes)
