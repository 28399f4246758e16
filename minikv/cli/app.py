"""The `minikv` command. Nothing here or in what it imports loads torch: `--help` must be quick."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from minikv.cli import console
from minikv.cli.batch import batch
from minikv.cli.bench import bench
from minikv.cli.calibrate import calibrate
from minikv.cli.chat import chat
from minikv.cli.eval import evaluate
from minikv.cli.generate import generate
from minikv.cli.info import info
from minikv.cli.inspect import inspect
from minikv.cli.pull import pull
from minikv.cli.train_router import train_router
from minikv.version import version

app = typer.Typer(
    name="minikv",
    help="A small LLM inference engine built around its KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.write_text(f"minikv {version()}\n")
        raise typer.Exit


@app.callback()
def _common(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """A small LLM inference engine built around its KV cache."""


for _command in (chat, generate, batch, pull, info, inspect, bench, calibrate):
    app.command()(_command)
app.command("eval")(evaluate)
app.command("train-router")(train_router)


def main() -> None:
    """Run the command line. What happens outside a command (--help, --version) fails in one line too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Text of a model may hold what the terminal's encoding cannot: show a stand-in for it.
            stream.reconfigure(errors="replace")
    try:
        console.guarded(lambda: app(prog_name="minikv"))()
    except typer.Exit as end:
        sys.exit(end.exit_code)
