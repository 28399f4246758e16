"""`minikv eval`: how good the answers are under each policy and budget, beside the full cache."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minikv.cli import console
from minikv.cli.interrupts import Interrupts
from minikv.cli.options import COMPRESSION, ENGINE, Option, takes
from minikv.errors import ConfigError
from minikv.version import version

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import Tensor

    from minikv.cache.policies.profile import HeadProfile
    from minikv.cache.spans.router import Router
    from minikv.evals.plan import EvalPlan
    from minikv.evals.records import Record, ResultsFile
    from minikv.evals.summary import Row
    from minikv.evals.sweep import Sweep
    from minikv.loading import LoadedModel

GRID = (
    Option(
        "tasks",
        "text",
        "needle, multi-needle, kv-lookup, multi-turn, quote, perplexity, fidelity.",
        "needle,fidelity",
        metavar="A,B",
    ),
    Option(
        "policies",
        "text",
        "As in --kv-policy, with +refit, -refit or +demote behind; the full cache is always measured.",
        "snapkv,adakv,compresskv",
        metavar="P,Q",
    ),
    Option("budgets", "text", "Budgets as in --kv-budget.", "0.5,0.25,0.1", metavar="X,Y"),
    Option("lengths", "ints", "Tokens of a sample: context, question and answer.", "1024", metavar="N,N"),
    Option("samples", "int", "Contexts per length.", "5"),
    Option("seed", "int", "Of the first context; the others count on from it.", "0"),
    Option("agnostic", "flag", "Compress before the question is known."),
)
_LISTS = ("tasks", "policies", "budgets")
_METHOD_NAMES = ("kv_sinks", "kv_recent", "kv_window", "kv_profile")
METHOD = tuple(option for option in COMPRESSION if option.name in _METHOD_NAMES)
_TIERS = ("kv_hot", "kv_warm", "kv_cold", "kv_error", "kv_prefixes", "kv_async_copies")
_NO_ENGINE = (*_TIERS, "max_context", "max_seqs", "prefill_chunk", "max_batch_tokens")
LOADING = tuple(option for option in ENGINE if option.name not in _NO_ENGINE)
# Contexts, questions and measures; results of another number are not gone on with.
_EVALUATION = 1


@takes(grid=GRID, compression=METHOD, engine=LOADING)
@console.guarded
def evaluate(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, Hub id or built-in name.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for results, summary and plots.")
    ],
    *,
    grid: dict[str, Any],
    compression: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Measure answers under KV cache policies and budgets, beside the full cache.

    What DIR holds already is not computed again, so an interrupted run goes on when repeated.
    """
    from minikv.evals.records import ResultsFile

    plan = _plan(grid, compression)
    with ResultsFile(output) as results:
        sweep = _sweep(plan, model, engine, results)
        finished = _measure(sweep, plan, results)
        records = plan.chosen(results.records)
        _report(records, plan, output)
    if not finished:
        console.complain(
            f"Interrupted after {len(records)} of {sweep.total()} answers. Run it again to go on."
        )
        raise typer.Exit(console.EXIT_INTERRUPTED)


def _plan(grid: dict[str, Any], compression: dict[str, Any]) -> EvalPlan:
    from minikv.evals.plan import EvalPlan, read_budgets

    fields = {name.removeprefix("kv_"): value for name, value in compression.items()} | grid
    for name in _LISTS:
        if name in fields:
            fields[name] = tuple(part for text in fields[name].split(",") if (part := text.strip()))
    if "budgets" in fields:
        fields["budgets"] = read_budgets(fields["budgets"])
    return EvalPlan(**fields)


def _sweep(plan: EvalPlan, model: str, engine: dict[str, Any], results: ResultsFile) -> Sweep:
    """Everything loaded and checked. Raises the errors of all parts."""
    from minikv import CacheConfig
    from minikv.cache.ceiling import Ceiling
    from minikv.config import TierConfig
    from minikv.evals.copies import SEQUENCES
    from minikv.evals.haystacks import Writer
    from minikv.evals.sweep import Sweep, variants_of
    from minikv.evals.text import Prose, reference_prose, text_hash
    from minikv.loading import load_model
    from minikv.memory import available_bytes
    from minikv.probe import Probe

    rest = dict(engine)
    cache = CacheConfig(**{key: rest.pop(key) for key in ("kv_dtype",) if key in rest})
    loaded = load_model(model, cache, available_bytes(), progress=console.stderr_is_terminal(), **rest)
    longest = max(plan.lengths)
    if longest > loaded.config.max_context:
        raise ConfigError(
            f"A length of {longest} tokens is more than the context of {loaded.name}, which is "
            f"{loaded.config.max_context}."
        )
    text = reference_prose()
    profile = _profile(plan, loaded)
    router = _router(plan, loaded)
    results.settle(_settings(plan, loaded, text_hash(text), profile, router))
    # The page pool takes half of the free memory at most; copies that demote get half of what is left.
    tiers = TierConfig(warm=available_bytes() // 4) if plan.demotes else None
    probe = Probe(loaded, max_context=longest, max_seqs=SEQUENCES, tiers=tiers)
    writer = Writer(probe.tokenizer, Prose(text, probe.tokenizer))
    variants = variants_of(plan, probe, profile, router)
    for variant in variants:
        if (limit := variant.cache.limit) is not None and limit.kind == "bytes":
            Ceiling.of(limit, probe.store)  # too few bytes are to be known before the first answer
    return Sweep(probe, plan, writer, variants, results.records)


def _profile(plan: EvalPlan, loaded: LoadedModel) -> HeadProfile | None:
    from minikv.calibration.profile import find_shipped, load_profile_for

    if plan.profile is not None and _retrieves(plan):
        return load_profile_for(plan.profile, loaded)
    profile = find_shipped(loaded.fingerprint)
    if profile is None and _retrieves(plan):
        console.note("No profile for this model: compresskv takes all heads, and layers alike.")
    return profile


def _router(plan: EvalPlan, loaded: LoadedModel) -> Router | None:
    """Where compresskv is measured as well, a profile is its own, and sekv has what it has by default."""
    from minikv.calibration.router_file import named_router

    zooms = any("sekv" in policy for policy in plan.policies)
    return named_router(None if _retrieves(plan) else plan.profile, loaded) if zooms else None


def _retrieves(plan: EvalPlan) -> bool:
    return any("compresskv" in policy for policy in plan.policies)


def _settings(
    plan: EvalPlan,
    loaded: LoadedModel,
    text: str,
    profile: HeadProfile | None,
    router: Router | None,
) -> dict[str, Any]:
    """All that decides an answer's figures and is not in its record."""
    return {
        "evaluation": _EVALUATION,
        "minikv": version(),
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "weights": loaded.weights,
        "backend": loaded.kernels.name,
        "kv_dtype": str(loaded.kv_dtype).removeprefix("torch."),
        "text": text,
        "sinks": plan.sinks,
        "recent": plan.recent,
        "window": plan.window,
        "profile": None if profile is None else _profile_hash(profile),
        "router": None if router is None else _hash_of(router.scale, router.bias),
    }


def _profile_hash(profile: HeadProfile) -> str:
    return _hash_of(profile.retrieval_scores, profile.layer_errors, extra=bytes([profile.top_heads]))


def _hash_of(*tensors: Tensor, extra: bytes = b"") -> str:
    import hashlib

    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data + extra).hexdigest()[:16]


def _measure(sweep: Sweep, plan: EvalPlan, results: ResultsFile) -> bool:
    """Compute what is missing, under a bar; False when Ctrl-C ended it early."""
    total, done = sweep.total(), len(plan.chosen(results.records))
    started = time.perf_counter()
    new = 0
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        bar = _bar(total, done, stack)
        for records in sweep.records():
            results.write(records)
            new += len(records)
            bar(done + new)
            if interrupts.requested:
                return done + new == total
    if new:
        console.note(f"{new} answers in {time.perf_counter() - started:.0f} s")
    return True


def _bar(total: int, done: int, stack: ExitStack) -> Any:
    """A bar on stderr, if that is a terminal: a function that takes the number of answers."""
    if not console.stderr_is_terminal():
        return lambda count: None
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.completed} of {task.total} answers"), TimeRemainingColumn())
    progress: Progress = stack.enter_context(
        Progress(*columns, console=console.error_console(), transient=True)
    )
    task = progress.add_task("eval", total=total, completed=done)
    return lambda count: progress.update(task, completed=count)


def _report(records: list[Record], plan: EvalPlan, folder: Path) -> None:
    """Tables to stdout, the summary and the plots to the folder."""
    from minikv.evals import plots
    from minikv.evals.summary import summarise, write_summary

    if not records:
        return
    rows = summarise(records, plan.variants)
    _print_tables(rows)
    written = [write_summary(folder, rows)]
    if plots.available():
        written += plots.draw(records, rows, folder)
    else:
        console.complain(plots.NEEDED)
    console.note(f"Wrote {', '.join(path.name for path in written)} to {folder}.")


def _print_tables(rows: list[Row]) -> None:
    from minikv.evals.summary import plain, tables

    if not console.stdout_is_terminal():
        console.write_text("\n".join(plain(table) for table in tables(rows)))
        return
    from rich.console import Console
    from rich.table import Table

    screen = Console(markup=False, highlight=False, emoji=False)
    for table in tables(rows):
        shown = Table(title=table.title, title_justify="left", title_style="bold", box=None)
        for i, name in enumerate(table.head):
            shown.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
        for line in table.lines:
            shown.add_row(*line)
        screen.print(shown)
