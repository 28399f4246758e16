"""`minikv generate`: one completion, streamed as text or printed as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minikv.cli import console
from minikv.cli.interrupts import Interrupts
from minikv.cli.options import COMPRESSION, ENGINE, SAMPLING, TEMPLATE, load_llm, takes
from minikv.cli.prompting import job_of, read_prompt
from minikv.cli.streaming import follow
from minikv.cli.tier_lines import tier_lines
from minikv.config import format_size
from minikv.errors import ConfigError, RequestError
from minikv.results import Result

if TYPE_CHECKING:
    from minikv import LLM, Job


@takes(engine=ENGINE, compression=COMPRESSION, sampling=SAMPLING, template=TEMPLATE)
@console.guarded
def generate(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, Hub id or built-in name.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, after any files.")] = None,
    file: Annotated[
        list[str] | None, typer.Option("--file", "-f", help="Text to put before the prompt; - is stdin.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template or not; default: if there is one."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message (with --chat).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    *,
    engine: dict[str, Any],
    compression: dict[str, Any],
    sampling: dict[str, Any],
    template: dict[str, Any],
) -> None:
    """Complete one prompt, given with -p, in files and on standard input."""
    if not as_json and ("n" in sampling or "logprobs" in sampling):
        raise ConfigError("Several completions and log probabilities need --json to hold them.")
    text = read_prompt(prompt, file or [])
    from minikv import SamplingParams

    params = SamplingParams(**sampling)
    with load_llm(model, engine, compression, progress=console.stderr_is_terminal()) as llm:
        job = job_of(llm, text, params, chat, system, template)
        with Interrupts() as interrupts:
            complete = _complete_json if as_json else _complete_text
            result = complete(llm, job, interrupts)
        _note_stats(llm, result)
    if result.finish_reason == "abort":
        raise typer.Exit(console.EXIT_INTERRUPTED)


def _complete_text(llm: LLM, job: Job, interrupts: Interrupts) -> Result:
    ends_line = True

    def emit(text: str) -> None:
        nonlocal ends_line
        ends_line = text.endswith("\n")
        console.write_text(text)

    try:
        return _stream(llm, job, interrupts, emit)
    finally:
        if not ends_line:
            console.write_text("\n")


def _complete_json(llm: LLM, job: Job, interrupts: Interrupts) -> Result:
    if job.params.n > 1:
        result = _all_choices(llm, job, interrupts)
    else:
        result = _stream(llm, job, interrupts, None)
    shown = result.to_dict()
    if llm.tier_stats is not None:
        shown["tiers"] = llm.tier_stats
    console.write_text(json.dumps(shown, ensure_ascii=False, allow_nan=False) + "\n")
    return result


def _stream(llm: LLM, job: Job, interrupts: Interrupts, emit: Callable[[str], object] | None) -> Result:
    """The result of one completion; after Ctrl-C, what there is, with finish reason `abort`."""
    with closing(llm.stream_job(job, lambda: interrupts.requested)) as pieces:
        result = follow(pieces, None, emit).result
    assert result is not None
    return result


def _all_choices(llm: LLM, job: Job, interrupts: Interrupts) -> Result:
    """Several completions of one prompt. There is nothing whole to print after Ctrl-C."""

    def check(*_: object) -> None:
        if interrupts.requested:
            raise typer.Exit(console.EXIT_INTERRUPTED)

    with closing(llm.run([job], on_progress=check)) as results:
        _, result = next(results)
    failed = next((choice for choice in result.choices or (result,) if choice.finish_reason == "error"), None)
    if failed is not None:
        raise RequestError(failed.message or "The request failed.")
    return result


def _note_stats(llm: LLM, result: Result) -> None:
    usage, seconds = result.usage, result.timings.decode_s
    rate = f", {(usage.completion_tokens - 1) / seconds:.1f} tok/s" if seconds > 0 else ""
    kv = f"KV {format_size(result.kv.bytes)} of {format_size(result.kv.full_bytes)}"
    ending = {"length": ", cut at --max-tokens", "context": ", context full", "abort": ", interrupted"}
    console.note(
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} tok{rate}, {kv}"
        f"{ending.get(result.finish_reason, '')}"
    )
    for line in tier_lines(llm):
        console.note(line)
