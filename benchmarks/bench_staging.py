"""A prompt larger than the pool, computed against what is below it layer by layer: seconds, memory, replies.

A long document with a question and a second question, in a pool that holds everything and in one that holds
a layer of it, from ordinary memory and from a file. The ways take turns, each in a process of its own, on
the same prompts; ratios are of the same round, and all must say the same.

Usage: python benchmarks/bench_staging.py [--document N] [--policy P:BUDGET] [--hot SIZE] [--rounds N]
       [--threads N] [--chunk N] [--model NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import machine, peak_rss, run_worker, say
from minikv import LLM, CacheConfig, SamplingParams, TierConfig
from minikv.cache.budget import read_budget
from minikv.engine import Engine
from minikv.evals.text import reference_prose
from minikv.scheduler.request import FinishEvent, Lanes, TokenEvent

WAYS = ("whole", "warm", "cold")
QUESTIONS = ("\n\nWhat is this text about?", "\n\nWho is spoken of at the end?")


def main() -> None:
    args = _arguments()
    if args.way:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(args, args.way, Path(folder))))
        return
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        order = WAYS if number % 2 == 0 else tuple(reversed(WAYS))
        rounds.append({way: _worker(args, way) for way in order})
        if len({json.dumps(found["said"]) for found in rounds[-1].values()}) > 1:
            raise SystemExit("The ways do not say the same.")
        say(f"round {number + 1}: {_line(rounds[-1:], 'warm')}; {_line(rounds[-1:], 'cold')}")
    facts = machine(("torch",)) | {"model": args.model, "document": args.document, "policy": args.policy}
    result = facts | {"rounds": rounds}
    for way in WAYS:
        print(_line(rounds, way))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(args: argparse.Namespace, way: str, folder: Path) -> dict[str, Any]:
    """Both questions in one way, with a fresh model."""
    policy, _, budget = args.policy.partition(":")
    evicted = "drop" if policy == "sekv" else "demote"
    cache = CacheConfig(policy=policy, budget=read_budget(budget), evicted=evicted)
    hot = "2GiB" if way == "whole" else args.hot
    warm, cold = (None, f"{folder / 'kv'}:4GiB") if way == "cold" else ("4GiB", None)
    tiers = TierConfig(hot=hot, warm=warm, cold=cold, prefixes=False)
    with LLM(args.model, cache=cache, tiers=tiers, threads=args.threads, prefill_chunk=args.chunk) as llm:
        ids = llm.tokenizer.encode(reference_prose())[: args.document]
        if len(ids) < args.document:
            raise SystemExit(f"The text has {len(ids):,} tokens; ask for a document of at most as many.")
        lanes, found = Lanes(), []
        for question in QUESTIONS:
            ids += llm.tokenizer.encode(question)
            found.append(_ask(llm.engine, ids, lanes, args.answer))
            ids += found[-1]["said"]
        staged = llm.engine.scheduler.starting.num_staged
    return {
        "first_s": found[0]["first_s"],
        "second_s": found[1]["first_s"],
        "pool_bytes": max(each["pool_bytes"] for each in found),
        "rss": peak_rss(),
        "staged": staged,
        "said": [each["said"] for each in found],
    }


def _ask(engine: Engine, ids: list[int], lanes: Lanes, answer: int) -> dict[str, Any]:
    """Seconds to the first token, what was said, and most bytes of the pool in use between steps."""
    engine.add(ids, SamplingParams(max_tokens=answer, ignore_eos=True), lanes=lanes)
    started, first, said, most = time.perf_counter(), 0.0, [], 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                first = first or time.perf_counter() - started
                said.append(event.token_id)
            elif isinstance(event, FinishEvent) and event.reason != "length":
                raise SystemExit(event.message or event.reason)
        most = max(most, engine.store.pool.bytes_in_use)
    return {"first_s": first, "said": said, "pool_bytes": most}


def _worker(args: argparse.Namespace, way: str) -> dict[str, Any]:
    names = ("document", "policy", "hot", "answer", "chunk", "model", "threads")
    options = [part for name in names for part in (f"--{name}", str(getattr(args, name)))]
    return run_worker(__file__, [*options, "--way", way], args.threads)


def _line(rounds: list[dict[str, Any]], way: str) -> str:
    def middle(name: str) -> float:
        return median(one[way][name] for one in rounds)

    def ratio(name: str) -> float:
        return median(one[way][name] / one["whole"][name] for one in rounds)

    return (
        f"{way}: first question {ratio('first_s'):.2f} of the time ({middle('first_s'):.1f} s), second "
        f"{ratio('second_s'):.2f} ({middle('second_s'):.2f} s), pool {middle('pool_bytes') / 2**20:.1f} MiB, "
        f"process {middle('rss') / 2**20:.0f} MiB, staged {middle('staged'):.0f}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prompts larger than the pool, staged layer by layer.")
    parser.add_argument("--document", type=int, default=7600)
    parser.add_argument("--policy", default="snapkv:0.1")
    parser.add_argument("--hot", default="40MiB")
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
