"""The command line and the report that the benchmarks of two engines share."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from common import machine
from duel import FULL, MEMORY_CONTEXT, OTHER_WORK, OURS, QUICK, Duel


def make_parser(description: str, workloads: Sequence[str]) -> argparse.ArgumentParser:
    """The options that every such benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.add_argument("--model", default="smollm2-135m", help="name or file of the model (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads for either engine (%(default)s)")
    work = [*workloads, *OTHER_WORK]
    parser.add_argument("--only", nargs="+", choices=work, default=work, metavar="WORK", help=", ".join(work))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser


def make_duel(rival: str, options: argparse.Namespace, more: Sequence[str] = ()) -> Duel:
    """Of the two engines, with the options that their processes share and `more` of their own.

    To be called before anything imports minikv: see `Duel`.
    """
    arguments = ["--threads", str(options.threads), *more]
    return Duel(rival, arguments, QUICK if options.quick else FULL, dict(os.environ))


def run_and_report(duel: Duel, options: argparse.Namespace, detail: str, packages: Sequence[str]) -> None:
    """Measure and print. `detail` and the versions of `packages` say what was compared."""
    result = duel.run(options.only)
    facts = machine(packages)
    result["setting"] = {"model": options.model, "threads": options.threads, "detail": detail, **facts}
    if options.json:
        print(json.dumps(result, indent=2))
        return
    versions = ", ".join(f"{name} {facts[name]}" for name in packages)
    print(f"{facts['processor']}, {options.threads} threads; {versions}; {detail}\n")
    if result["raw"]:
        print_speed(result["raw"], duel.rival)
    if "cold_start" in result:
        print_cold_starts(result["cold_start"])
    if "peak_rss" in result:
        peaks = [f"{name} {peak / 1e6:.0f} MB" for name, peak in result["peak_rss"].items()]
        print(f"peak memory at {MEMORY_CONTEXT:,} tokens: {', '.join(peaks)}")


def print_speed(raw: dict[str, Any], rival: str) -> None:
    """The table of rates and ratios; a ratio above 1 means that minikv is faster."""
    heads = (f"{OURS}, tok/s", f"{rival}, tok/s")
    print(f"{'median (best)':14}{heads[0]:>20}{heads[1]:>22}{'ratio':>8}{'rounds':>13}{'of best':>9}")
    for name, figures in raw.items():
        rates = [figures[engine]["tokens_per_second"] for engine in (OURS, rival)]
        cells = [f"{rate['median']:.1f} ({rate['best']:.1f})" for rate in rates]
        ratio = figures["ratio"]
        span = f"{ratio['lowest']:.2f}-{ratio['highest']:.2f}"
        print(f"{name:14}{cells[0]:>20}{cells[1]:>22}{ratio['median']:8.2f}{span:>13}{ratio['of_best']:9.2f}")


def print_cold_starts(starts: dict[str, Any]) -> None:
    """A line per clock."""
    for clock, words in (("from_process_start", "process start"), ("from_imports", "end of imports")):
        seconds = [
            f"{name} {clocks[clock]['median']:.2f} s (best {clocks[clock]['best']:.2f})"
            for name, clocks in starts.items()
        ]
        print(f"{words} to first token: {', '.join(seconds)}")
