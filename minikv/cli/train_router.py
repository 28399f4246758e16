"""`minikv train-router`: learn what tokens draw from a model's own attention, and keep it for policy sekv."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minikv.cli import console
from minikv.cli.calibrate import LOADING, check_output, described, load, show_progress
from minikv.cli.interrupts import Interrupts
from minikv.cli.options import Option, takes
from minikv.version import version

if TYPE_CHECKING:
    from minikv.calibration.train import Training
    from minikv.probe import Probe

TRAINING = (
    Option("texts", "int", "Texts that are learned from.", "32"),
    Option("held", "int", "Further texts on which the result is measured.", "6"),
    Option("length", "int", "Tokens of a text.", "1024"),
    Option("steps", "int", "Steps with each text.", "10"),
    Option("rate", "float", "Of learning at the start.", "0.01"),
    Option("shares", "float", "Weight of attention as a target.", "1"),
    Option("logits", "float", "Weight of the model's answers as a target; 0: without.", "1"),
    Option("seed", "int", "Of all texts.", "0"),
)


@takes(training=TRAINING, engine=LOADING)
@console.guarded
def train_router(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, Hub id or built-in name.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The router.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file, and what another run left unfinished.")
    ] = False,
    *,
    training: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Train the router of policy sekv: how much attention a token will draw. The model stays as it is.

    It learns from the full cache's attention, and from what the model says with the full cache.

    A run that was stopped goes on where it ended when it is given again.
    """
    from minikv.calibration.frozen import Frozen
    from minikv.calibration.journal import Journal
    from minikv.calibration.train import RouterSettings, Training

    settings = RouterSettings(**training)
    check_output(output, overwrite)
    probe = load(model, engine)
    partial = output.with_name(f"{output.name}.partial")
    with Journal(partial, described(dataclasses.asdict(settings), probe), fresh=overwrite) as journal:
        where = {name: engine[name] for name in ("revision", "offline") if name in engine}
        frozen = Frozen.open(model, **where) if settings.logits else None
        run = Training(probe, settings, journal, frozen)
        console.note(f"{run.num_parameters:,} parameters, {100 * run.share:.4f}% of the model's")
        if not _train(run):
            console.complain(f"Interrupted after {run.done} of {run.total} texts. Run it again to go on.")
            raise typer.Exit(console.EXIT_INTERRUPTED)
        text = _finish(run, probe, output)
        journal.remove()
    console.write_text(f"{text}Wrote {output}.\n")


def _train(run: Training) -> bool:
    """Take all texts under a progress bar; False when Ctrl-C ended it early."""
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        show = show_progress(run, stack, "texts")
        for _ in run.steps():
            show()
            if interrupts.requested:
                return run.done == run.total
    return True


def _finish(run: Training, probe: Probe, output: Path) -> str:
    """Write the router; the report."""
    from minikv.calibration.profile import identity_of
    from minikv.calibration.router_file import save_router

    found = run.comparisons()
    names = ("loss", "recall", "answers") if run.settings.logits else ("loss", "recall")
    means = {
        which: {name: sum(getattr(getattr(one, which), name) for one in found) / len(found) for name in names}
        for which in ("plain", "trained")
    }
    facts = {"model": probe.name, "minikv_version": version(), **dataclasses.asdict(run.settings)}
    facts |= {f"{which}_{name}": mean for which, of in means.items() for name, mean in of.items()}
    save_router(output, run.router(), identity_of(probe), facts)
    return (
        f"{run.num_parameters:,} parameters, {100 * run.share:.4f}% of the model's\n"
        f"on {len(found)} texts that were not learned from:\n"
        f"          KL of shares  recall of attention mass  KL of logits\n"
        f"codes   {_line(means['plain'])}\n"
        f"router  {_line(means['trained'])}\n"
    )


def _line(means: dict[str, float]) -> str:
    answers = f"{means['answers']:12.4f}" if "answers" in means else f"{'-':>12}"
    return f"{means['loss']:14.4f}  {100 * means['recall']:23.1f}%  {answers}"
