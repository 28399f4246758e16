"""`minikv inspect`: what a policy leaves of a prompt's KV cache, as a map, a table, a picture or JSON."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minikv.cli import console
from minikv.cli.apart import check_apart
from minikv.cli.interrupts import Interrupts
from minikv.cli.options import COMPRESSION, ENGINE, TEMPLATE, load_llm, takes
from minikv.cli.prompting import job_of, read_prompt
from minikv.cli.streaming import follow
from minikv.errors import ConfigError, RequestError, shown

if TYPE_CHECKING:
    from rich.text import Text

    from minikv import LLM, Job
    from minikv.cli.inspect_facts import Held


@takes(compression=COMPRESSION, engine=ENGINE, template=TEMPLATE)
@console.guarded
def inspect(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, Hub id or built-in name.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, after any files.")] = None,
    file: Annotated[
        list[str] | None, typer.Option("--file", "-f", help="Text to put before the prompt; - is stdin.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Draw a picture as well: a .png file."),
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="A row for every KV head, not every layer.")] = False,
    layer: Annotated[
        int | None, typer.Option("--layer", metavar="N", help="One layer alone, with its KV heads.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template or not; default: if there is one."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message (with --chat).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a map.")] = False,
    *,
    compression: dict[str, Any],
    engine: dict[str, Any],
    template: dict[str, Any],
) -> None:
    """Show what the KV cache of a prompt holds after compression, by layer, head and token."""
    if output is not None:
        _check_output(output)
        check_apart(engine, output, "the picture")
    text = read_prompt(prompt, file or [])
    from minikv import SamplingParams

    params = SamplingParams(max_tokens=1)
    with load_llm(model, engine, compression, progress=console.stderr_is_terminal()) as llm:
        layers = _layers(layer, llm.config.num_layers)
        held = _compute(llm, job_of(llm, text, params, chat, system, template))
        by_head = heads or layer is not None
        if output is not None:
            from minikv.cli.inspect_plot import draw

            draw(held, layers, by_head, output)
            console.note(f"Wrote {output}.")
        if as_json:
            console.write_text(json.dumps(held.to_dict(layers), ensure_ascii=False, allow_nan=False) + "\n")
        else:
            _print(held, layers, by_head)


def _check_output(path: Path) -> None:
    """Raise, before a long prompt is computed, for a picture that could not be drawn afterwards."""
    from minikv.evals import plots

    if path.suffix.lower() != ".png":
        raise ConfigError(f"A picture is written as a .png file, not as {shown(path.name)}.")
    if not plots.available():
        raise ConfigError(plots.NEEDED)
    if not path.parent.is_dir():
        raise RequestError(f"Cannot write {path}: there is no folder {path.parent}.")


def _layers(wanted: int | None, count: int) -> range:
    if wanted is None:
        return range(count)
    if wanted not in range(count):
        raise ConfigError(f"--layer takes the number of a layer from 0 to {count - 1}, not {shown(wanted)}.")
    return range(wanted, wanted + 1)


def _compute(llm: LLM, job: Job) -> Held:
    """Read the prompt as a request does, and look at the lanes that it leaves."""
    from minikv.cli.inspect_facts import Held
    from minikv.scheduler.request import Lanes

    lanes = Lanes()
    with Interrupts() as interrupts:
        with closing(llm.stream_job(job, lambda: interrupts.requested, lanes)) as pieces:
            result = follow(pieces, None, None).result
    if result is None or result.finish_reason == "abort":
        raise typer.Exit(console.EXIT_INTERRUPTED)
    return Held.of(llm, lanes)


def _print(held: Held, layers: range, by_head: bool) -> None:
    from rich.console import Console

    from minikv.cli.inspect_report import report

    screen = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    lines: list[Text] = report(screen, held, layers, by_head)
    if console.stdout_is_terminal():
        for line in lines:
            screen.print(line)
        return
    # By way of the one place that knows what to do about a full disk or a reader that went away.
    with screen.capture() as printed:
        for line in lines:
            screen.print(line)
    console.write_text(printed.get())
