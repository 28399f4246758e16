"""A request that was preempted goes on: put back from memory or from a file, against computed again.

Two requests decode in a pool that cannot hold them both for long, so that the later one, with a long context,
is preempted. When the first one is done, the time is taken until the other's next token. All ways take turns
in one process on the same prompts, and all must say the same.

Usage: python benchmarks/bench_preemption.py [--context N] [--rounds N] [--model NAME] [--threads N]
       [--kv-dtype TYPE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import TEXT, machine, say
from minikv import LLM, CacheConfig, SamplingParams, TierConfig
from minikv.scheduler.request import FinishEvent, Request, TokenEvent

SEED = 20_000
FIRST = 256  # tokens of the request that stays
WAYS = ("recompute", "warm", "cold")


@dataclass(frozen=True)
class Resumed:
    """Seconds from the step in which the request could go on to its next token, and seconds of the step that
    preempted it; tokens it said in all."""

    resume_s: float
    preempt_s: float
    tokens: list[int]


def main() -> None:
    args = _arguments()
    rng = random.Random(SEED)
    rounds: list[dict[str, Resumed]] = []
    with tempfile.TemporaryDirectory() as folder:
        engines = {way: _load(args, way, Path(folder)) for way in WAYS}
        ids = next(iter(engines.values())).tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        while len(ids) < 2 * args.context:
            ids += ids
        for number in range(args.rounds):
            say(f"round {number + 1} of {args.rounds}")
            start = rng.randrange(len(ids) - args.context - FIRST)
            first, second = ids[start : start + FIRST], ids[start + FIRST : start + FIRST + args.context - 32]
            rounds.append({way: measure(llm, first, second) for way, llm in engines.items()})
            if len({tuple(found.tokens) for found in rounds[-1].values()}) > 1:
                raise SystemExit("The ways do not say the same.")
        span_bytes = engines["warm"].full_kv_bytes(args.context)
        for llm in engines.values():
            llm.close()
    facts = machine(("torch",)) | {"model": args.model, "context": args.context, "kv_bytes": span_bytes}
    result = facts | {"rounds": args.rounds, "ways": {way: _summary(rounds, way) for way in WAYS}}
    _print(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(llm: LLM, first: list[int], second: list[int]) -> Resumed:
    """One preemption of the request `second` by the growth of `first`, and what follows."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    (one,) = engine.add(first, endless)
    (two,) = engine.add(second, SamplingParams(max_tokens=64, ignore_eos=True))
    tokens: list[int] = []
    before = scheduler.num_preemptions
    preempt_s = 0.0
    while scheduler.num_preemptions == before:
        start = time.perf_counter()
        _take(engine.step(), two, tokens)
        preempt_s = time.perf_counter() - start
    waiting: Request = scheduler.waiting[0]
    assert waiting.id == two, "the later request is preempted"
    engine.abort(one)
    said, start = len(tokens), time.perf_counter()
    while len(tokens) == said:
        _take(engine.step(), two, tokens)
    resume_s = time.perf_counter() - start
    while engine.has_work:
        _take(engine.step(), two, tokens)
    return Resumed(resume_s, preempt_s, tokens)


def _take(events: list[TokenEvent | FinishEvent], request: int, tokens: list[int]) -> None:
    for event in events:
        if event.request_id != request:
            continue
        if isinstance(event, TokenEvent):
            tokens.append(event.token_id)
        elif event.reason != "length":
            raise SystemExit(f"The request ended: {event.message}")


def _load(args: argparse.Namespace, way: str, folder: Path) -> LLM:
    cache = CacheConfig(kv_dtype=args.kv_dtype)
    options: dict[str, Any] = {"threads": args.threads, "max_seqs": 2, "cache": cache}
    with LLM(args.model, tiers=TierConfig(hot="8MiB"), **options) as llm:
        page_size = llm.engine.store.pool.page_size
        # Both fit while they are prompts; a few tokens later they do not any more.
        pages = -(-args.context // page_size) + -(-FIRST // page_size) + 1
        hot = (pages + 1) * llm.engine.store.num_lanes * llm.engine.store.pool.page_bytes
        below = 2 * llm.full_kv_bytes(args.context + page_size)
    tiers = {
        "recompute": TierConfig(hot=hot),
        "warm": TierConfig(hot=hot, warm=below),
        "cold": TierConfig(hot=hot, cold=f"{folder / 'kv.cold'}:{below}"),
    }
    return LLM(args.model, tiers=tiers[way], **options)


def _summary(rounds: list[dict[str, Resumed]], way: str) -> dict[str, Any]:
    resumed = [each[way].resume_s for each in rounds]
    ratios = [each["recompute"].resume_s / each[way].resume_s for each in rounds]
    return {
        "resume_s": median(resumed),
        "resume_s_all": resumed,
        "preempt_s": median(each[way].preempt_s for each in rounds),
        "times_faster": median(ratios),
    }


def _print(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['context']} tokens of context, {result['processor']}")
    print(f"the cache takes {result['kv_bytes'] / 2**20:.1f} MiB; medians of {result['rounds']} rounds\n")
    print("way         next token after   step that preempts   faster than recompute")
    for way, found in result["ways"].items():
        print(
            f"{way:<10}  {found['resume_s']:14.3f} s  {found['preempt_s']:17.3f} s  "
            f"{found['times_faster']:20.1f} x"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
