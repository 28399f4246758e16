"""`minikv batch`: a file of requests in, a file of results out, resumable."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from minikv.cli import console
from minikv.cli.apart import check_apart
from minikv.cli.batch_feed import feed
from minikv.cli.batch_lines import InputLine, read_line
from minikv.cli.batch_output import DoneLine, OutputFile
from minikv.cli.batch_progress import Meter
from minikv.cli.batch_run import BatchRun
from minikv.cli.chat import DEFAULT_MODEL
from minikv.cli.interrupts import Interrupts
from minikv.cli.options import COMPRESSION, ENGINE, SAMPLING, load_llm, takes
from minikv.cli.tier_lines import tier_lines
from minikv.errors import ConfigError, RequestError


@takes(engine=ENGINE, compression=COMPRESSION, sampling=SAMPLING)
@console.guarded
def batch(
    source: Annotated[str, typer.Argument(metavar="IN.jsonl", help="Requests, one a line; - is stdin.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Results, one a line.")],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Directory, .gguf file, Hub id or built-in name.")
    ] = DEFAULT_MODEL,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run ended.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: run lines that failed again.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    *,
    engine: dict[str, Any],
    compression: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Run a file of requests: OpenAI batch lines, or plain lines with a prompt or messages.

    Sampling and compression options are the defaults for lines that do not set a value themselves.
    """
    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other.")
    if retry_failed and not resume:
        raise typer.BadParameter("--retry-failed needs --resume.")
    if source != "-":
        check_apart(engine, Path(source), "the input")
    check_apart(engine, output, "the output")
    with ExitStack() as stack:
        requests = stack.enter_context(_open_input(source))
        _check_output(requests, output, known=resume or overwrite)
        file = stack.enter_context(OutputFile(output))
        seekable = stat.S_ISREG(os.fstat(requests.fileno()).st_mode)
        if resume and not seekable:
            raise ConfigError("--resume needs an input file that can be read twice, not a pipe.")
        done = file.recover(drop_failed=retry_failed) if resume else []
        total = _match(done, input_lines(requests, source), source, output) if seekable else None
        if seekable:
            requests.seek(0)
        lines: Iterable[InputLine | None] = input_lines(requests, source)
        if not seekable:
            lines = feed(lines)
        _run(model, engine, compression, sampling, file, done, lines, total, fresh=overwrite)


def _run(
    model: str,
    engine: dict[str, Any],
    compression: dict[str, Any],
    sampling: dict[str, Any],
    file: OutputFile,
    done: list[DoneLine],
    lines: Iterable[InputLine | None],
    total: int | None,
    *,
    fresh: bool,
) -> None:
    from minikv import SamplingParams

    SamplingParams(**sampling)  # a default that is wrong is one error, not one for each line
    meter = Meter(total, done)
    stopped, tiers = False, list[str]()
    if total is None or total > len(done):
        with load_llm(model, engine, compression, progress=console.stderr_is_terminal()) as llm:
            if fresh:  # only now: a mistake in the command must not cost the earlier results
                file.clear()
            with Interrupts() as interrupts, meter:
                skip = {line.id for line in done}
                stopped = BatchRun(llm, file, sampling, skip, meter, interrupts).serve(lines)
            tiers = tier_lines(llm)
    elif fresh:
        file.clear()
    if stopped:
        again = "" if total is None else " Run it again with --resume to go on."
        console.complain(f"Interrupted after {meter.progress_text()}.{again}")
        raise typer.Exit(console.EXIT_INTERRUPTED)
    for line in (meter.summary(), *tiers):
        console.complain(line)
    if meter.failed:
        raise typer.Exit(console.EXIT_FAILED)


def _open_input(source: str) -> BinaryIO:
    if source == "-":
        if sys.stdin is None:
            raise RequestError("Standard input is closed, so there are no requests to read.")
        return sys.stdin.buffer
    try:
        return open(source, "rb")
    except OSError as error:
        raise RequestError(f"Cannot read {source}: {console.reason(error)}.") from None


def _check_output(requests: BinaryIO, output: Path, *, known: bool) -> None:
    try:
        if not output.exists():
            return
    except OSError as error:
        raise console.OutputError(f"Cannot write {output}: {console.reason(error)}.") from None
    if os.path.samestat(os.fstat(requests.fileno()), output.stat()):
        raise ConfigError("The output must be another file than the input.")
    if output.is_file() and output.stat().st_size > 0 and not known:
        raise ConfigError(f"{output} holds results already; give --resume to go on or --overwrite.")


def input_lines(requests: BinaryIO, source: str) -> Iterator[InputLine]:
    """The lines that are not blank. Raises RequestError when reading fails."""
    number = 0
    try:
        for number, data in enumerate(requests, 1):
            if data.strip():
                yield read_line(data, number)
    except OSError as error:
        raise RequestError(f"Cannot read {source} after line {number}: {console.reason(error)}.") from None


def _match(done: list[DoneLine], lines: Iterable[InputLine], source: str, output: Path) -> int:
    """The number of input lines, once every finished line is found among them."""
    left = {line.id: line.custom_id for line in done}
    same = len(left) == len(done)
    count = 0
    for line in lines:
        count += 1
        same = same and left.pop(line.id, line.custom_id) == line.custom_id
    if left or not same:
        raise ConfigError(
            f"{output} does not hold results for {source} as it is now; "
            "resume with the input that it was made from, or give another output file."
        )
    return count
