"""What each part of policy sekv is worth: the same tasks without it, at the same bytes of pages.

    sekv            without a router
    router          with the router that comes with the model, as is the default
    no anchors      spans of fixed length, cut without regard to surprisal
    grain 2, grain 4   twice and four times as many tokens share a code and come back together
    no zoom         only what the lanes hold: sinks, window, anchors
    anchors only    no spans: all of the lanes' part are anchors, and nothing is zoomed in

Usage: python benchmarks/bench_ablations.py [--tasks T,...] [--lengths N,...] [--samples N] [--budget F]
       [--only NAME,...] [--model NAME] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from common import say
from minikv.cache.policies.sekv import SeKV
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import Zooming
from minikv.cache.spans.segments import Cutting
from minikv.calibration.router_file import find_shipped_router
from minikv.evals.copies import SEQUENCES, Variant
from minikv.evals.haystacks import Writer
from minikv.evals.plan import EvalPlan
from minikv.evals.records import Record
from minikv.evals.summary import plain, summarise, tables
from minikv.evals.sweep import Sweep
from minikv.evals.text import Prose, reference_prose
from minikv.probe import Probe

_NOTHING = Zooming(0, least=2.0)  # no attention mass is above 1
_FEW = Cutting(share=0.0)


class Coarse(SeKV):
    """With a fraction of the lanes' part for spans, so that more tokens share a code."""

    def __init__(self, grain: int) -> None:
        super().__init__()
        self.resident = SeKV.resident / grain


def policies(router: Router | None) -> dict[str, SeKV]:
    """By name."""
    return {
        "sekv": SeKV(),
        "router": SeKV(router=router),
        "no anchors": SeKV(_FEW),
        "grain 2": Coarse(2),
        "grain 4": Coarse(4),
        "no zoom": SeKV(zooming=_NOTHING),
        "anchors only": SeKV(Cutting(alpha=-10.0, share=1.0, least=0), zooming=_NOTHING),
    }


def records(sweep: Sweep) -> Iterator[Record]:
    """All of them, with a line for each context."""
    for number, found in enumerate(sweep.records(), 1):
        say(f"{number} answers of all variants")
        yield from found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="needle,fidelity")
    parser.add_argument("--lengths", default="2048")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--only", default="")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json")
    options = parser.parse_args()
    plan = EvalPlan(
        tasks=tuple(options.tasks.split(",")),
        policies=("sekv",),
        budgets=(options.budget,),
        lengths=tuple(map(int, options.lengths.split(","))),
        samples=options.samples,
    )
    probe = Probe.load(
        options.model, threads=options.threads, max_context=max(plan.lengths), max_seqs=SEQUENCES
    )
    writer = Writer(probe.tokenizer, Prose(reference_prose(), probe.tokenizer))
    made = policies(find_shipped_router(probe.fingerprint))
    wanted = options.only.split(",") if options.only else list(made)
    cache = plan.cache("sekv", options.budget)
    variants = [Variant(name, options.budget, made[name], cache) for name in wanted]
    found = list(records(Sweep(probe, plan, writer, variants)))
    rows = summarise(found, [("full", None), *((name, options.budget) for name in wanted)])
    print("\n\n".join(plain(table) for table in tables(rows)))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(record) for record in found], file)


if __name__ == "__main__":
    main()
