"""`minikv bench`: what memory allows, what was measured, and the share of the one in the other."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minikv.cli import bench_measure, console
from minikv.cli.bench_plan import BenchPlan, obstacle
from minikv.cli.options import COMPRESSION, ENGINE, Option, load_llm, takes
from minikv.config import format_size
from minikv.threads import default_threads

if TYPE_CHECKING:
    from minikv import LLM

PLAN = (
    Option(
        "contexts", "ints", "Tokens in the cache at which decoding is timed.", "128,2048,8192", metavar="N,N"
    ),
    Option("batch_sizes", "ints", "Sequences that decode together.", "1,8", metavar="N,N"),
    Option("prompt_lengths", "ints", "Tokens of the prompts to prefill.", "512,2048", metavar="N,N"),
    Option("repeat", "int", "Prefills per length, and groups of 16 decode steps per context.", "3"),
)


@takes(measurement=PLAN, engine=ENGINE, compression=COMPRESSION)
@console.guarded
def bench(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, Hub id or built-in name.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    measurement: dict[str, Any],
    engine: dict[str, Any],
    compression: dict[str, Any],
) -> None:
    """Measure prefill, decode and memory beside what the memory's speed allows.

    `none` for a list leaves its measurement out.
    """
    plan = BenchPlan(**measurement)
    threads = engine.get("threads", default_threads())
    bandwidth = bench_measure.read_bandwidth(threads)
    engine = {"kv_prefixes": False} | engine  # a prompt that is measured again is to be computed again
    with load_llm(model, engine, compression, progress=console.stderr_is_terminal()) as llm:
        setting = {"threads": threads, **_setting(llm, plan)}
        facts = _run(llm, plan, setting, bandwidth, show=_nothing if as_json else console.write_text)
        if llm.tier_stats is not None:
            facts["tiers"] = llm.tier_stats
    if as_json:
        console.write_text(json.dumps(facts, ensure_ascii=False, indent=2) + "\n")


def _nothing(text: str) -> None:
    """Where the report goes when JSON is asked for."""


def _run(
    llm: LLM, plan: BenchPlan, setting: dict[str, Any], bandwidth: float, show: Callable[[str], None]
) -> dict[str, Any]:
    """All figures, in the shape of the JSON; each line of the report is shown as soon as it is known."""
    left_out: list[str] = []
    points = list(_fitting(llm, plan, left_out))
    theory = _theory(llm, points, bandwidth)
    facts = {**setting, "theory": theory, "decode": [], "prefill": [], "left_out": left_out}
    show(_describe(facts))
    show("".join(f"Left out: {sentence}\n" for sentence in left_out))
    bench_measure.time_prefill(llm, min(llm.max_context, 8))  # first use of every kernel
    if points:
        show("\nDecode\n" + _head(_DECODE_COLUMNS))
    for (context, batch_size), floor in zip(points, theory["floors"], strict=True):
        facts["decode"].append(_decode(llm, context, batch_size, plan.steps_at(context), floor["ms"]))
        show(_decode_line(facts["decode"][-1]))
    lengths = [n for n in sorted(set(plan.prompt_lengths)) if obstacle(llm, n) is None]
    if lengths:
        show("\nPrefill\n" + _head(_PREFILL_COLUMNS))
    for length in lengths:
        facts["prefill"].append(_prefill(llm, length, plan.repeat))
        show(_prefill_line(facts["prefill"][-1]))
    facts["peak_memory_bytes"] = bench_measure.peak_memory()
    show(f"\nLoaded in {llm.load_seconds:.2f} s; peak memory {_size(facts['peak_memory_bytes'])}.\n")
    return facts


def _fitting(llm: LLM, plan: BenchPlan, left_out: list[str]) -> Iterator[tuple[int, int]]:
    """The decode points that fit; what does not goes to `left_out`, prompt lengths too."""
    for context, batch_size in plan.decode_points:
        problem = obstacle(llm, context, batch_size)
        if problem is None:
            yield context, batch_size
        else:
            left_out.append(f"decode at context {context:,}, batch size {batch_size}: {problem}.")
    for length in sorted(set(plan.prompt_lengths)):
        problem = obstacle(llm, length)
        if problem is not None:
            left_out.append(f"prefill of {length:,} tokens: {problem}.")


def _setting(llm: LLM, plan: BenchPlan) -> dict[str, Any]:
    return {
        "model": llm.name,
        "architecture": llm.config.architecture,
        "parameters": llm.config.num_parameters(),
        "weights": llm.config.dtype,
        "backend": llm.backend_name,
        "backend_reason": llm.backend_reason,
        "kv_dtype": llm.kv_dtype,
        "policy": llm.engine.config.cache.policy,
        "budget": llm.engine.config.cache.budget,
        "processor": _processor(),
        "repeat": plan.repeat,
        "seed": bench_measure.SEED,
        "load_s": llm.load_seconds,
    }


def _theory(llm: LLM, points: list[tuple[int, int]], bandwidth: float) -> dict[str, Any]:
    weights, per_token = bench_measure.weights_read(llm), llm.kv_bytes_per_token
    floors = []
    for context, batch_size in points:
        each = bench_measure.kv_bytes_kept(llm, context)
        read = weights + batch_size * each
        floor = {"context": context, "batch_size": batch_size, "kv_bytes_per_sequence": each}
        floors.append({**floor, "bytes_per_step": read, "ms": 1e3 * read / bandwidth})
    return {
        "read_bandwidth": bandwidth,
        "weight_bytes": weights,
        "kv_bytes_per_token": per_token,
        "floors": floors,
    }


def _decode(llm: LLM, context: int, batch_size: int, steps: int, floor_ms: float) -> dict[str, Any]:
    seconds, held = bench_measure.time_steps(llm, context, batch_size, steps)
    typical, best = median(seconds), min(seconds)
    return {
        "context": context,
        "batch_size": batch_size,
        "steps": steps,
        "ms_per_step": {"median": 1e3 * typical, "best": 1e3 * best},
        "tokens_per_second": {"median": batch_size / typical, "best": batch_size / best},
        "floor_ms": floor_ms,
        "share_of_floor": {"median": floor_ms / 1e3 / typical, "best": floor_ms / 1e3 / best},
        "kv_bytes": held,
        "peak_memory_bytes": bench_measure.peak_memory(),
    }


def _prefill(llm: LLM, length: int, repeat: int) -> dict[str, Any]:
    seconds = [bench_measure.time_prefill(llm, length) for _ in range(repeat)]
    rates = {"median": length / median(seconds), "best": length / min(seconds)}
    return {"prompt_tokens": length, "seconds": median(seconds), "tokens_per_second": rates}


# The report for people

_FLOOR_COLUMNS = {"context": 9, "batch": 7, "KV each": 12, "MB/step": 10, "floor ms": 10, "tok/s": 9}
_DECODE_COLUMNS = {"context": 9, "batch": 7, "ms/step": 9, "(best)": 8, "tok/s": 9, "floor ms": 10}
_DECODE_COLUMNS |= {"of floor": 10, "(best) ": 8, "KV held": 11, "peak memory": 13}
_PREFILL_COLUMNS = {"prompt": 9, "tok/s": 9, "(best)": 8}


def _head(columns: dict[str, int]) -> str:
    return _cells(columns, list(columns))


def _cells(columns: dict[str, int], cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, columns.values(), strict=True)) + "\n"


def _describe(facts: dict[str, Any]) -> str:
    theory = facts["theory"]
    text = (
        f"{facts['model']}: {facts['architecture']}, {facts['parameters'] / 1e6:.1f}M parameters, "
        f"{facts['weights']}; KV cache {facts['kv_dtype']}{_policy(facts)}\n"
        f"{facts['processor']}; backend {facts['backend']} ({facts['backend_reason']})\n\n"
        "What memory allows\n"
        f"  one pass over memory reads {theory['read_bandwidth'] / 1e9:.1f} GB/s\n"
        f"  every step reads {theory['weight_bytes'] / 1e6:,.1f} MB of weights\n"
        f"  and {theory['kv_bytes_per_token']:,} bytes of KV cache per token held\n"
    )
    return (
        text
        + (_head(_FLOOR_COLUMNS) if theory["floors"] else "")
        + "".join(map(_floor_line, theory["floors"]))
    )


def _policy(facts: dict[str, Any]) -> str:
    return "" if facts["budget"] is None else f", policy {facts['policy']}, budget {facts['budget']}"


def _floor_line(floor: dict[str, Any]) -> str:
    cells = (
        f"{floor['context']:,}",
        f"{floor['batch_size']}",
        format_size(floor["kv_bytes_per_sequence"]),
        f"{floor['bytes_per_step'] / 1e6:,.1f}",
        f"{floor['ms']:.2f}",
        f"{1e3 * floor['batch_size'] / floor['ms']:,.1f}",
    )
    return _cells(_FLOOR_COLUMNS, cells)


def _decode_line(row: dict[str, Any]) -> str:
    cells = (
        f"{row['context']:,}",
        f"{row['batch_size']}",
        f"{row['ms_per_step']['median']:.2f}",
        f"{row['ms_per_step']['best']:.2f}",
        f"{row['tokens_per_second']['median']:,.1f}",
        f"{row['floor_ms']:.2f}",
        f"{row['share_of_floor']['median']:.0%}",
        f"{row['share_of_floor']['best']:.0%}",
        format_size(row["kv_bytes"]),
        _size(row["peak_memory_bytes"]),
    )
    return _cells(_DECODE_COLUMNS, cells)


def _prefill_line(row: dict[str, Any]) -> str:
    rate = row["tokens_per_second"]
    cells = (f"{row['prompt_tokens']:,}", f"{rate['median']:,.1f}", f"{rate['best']:,.1f}")
    return _cells(_PREFILL_COLUMNS, cells)


def _size(count: int | None) -> str:
    return "unknown" if count is None else format_size(count)


def _processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
