"""What a policy costs and saves in one engine: prefill with it beside prefill without, and decoding over
compressed lanes beside the full cache.

Rounds alternate between the two; ratios are of the same round. Random token ids with a fixed seed.

Usage: python benchmarks/bench_compression.py [--policies P,Q] [--budget X] [--prompt N] [--context N]
       [--rounds N] [--threads N] [--model NAME] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median
from typing import Any

from common import say
from minikv import LLM, CacheConfig, SamplingParams
from minikv.cache.budget import read_budget

STEPS = 24


class Bench:
    """One engine that runs a prompt under a policy, or under none."""

    def __init__(self, model: str, threads: int | None, context: int):
        self._llm = LLM(model, threads=threads, max_seqs=1)
        self._engine = self._llm.engine
        self._vocab = self._llm.config.vocab_size
        self.context = min(context, self._llm.max_context) - STEPS - 1

    def prompt(self, count: int, seed: int) -> list[int]:
        """Random ids."""
        return [random.Random(seed + i).randrange(self._vocab) for i in range(count)]

    def run(self, ids: list[int], cache: CacheConfig | None, steps: int) -> tuple[float, list[float], int]:
        """Seconds to the first token, seconds of each of the next `steps` tokens, bytes of KV held."""
        params = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
        start = time.perf_counter()
        self._engine.add(ids, params, cache=cache)
        while not self._engine.step():
            pass
        first, seconds, held = time.perf_counter() - start, [], self._engine.store.pool.bytes_in_use
        while self._engine.has_work:
            start = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - start)
        return first, seconds, held


def compare(
    bench: Bench, cache: CacheConfig, count: int, rounds: int, steps: int
) -> tuple[list[float], list[float], int, int]:
    """Per round: prefill seconds with the policy over those without, decode seconds without over those
    with it; and the bytes held with and without."""
    prefill, decode, bytes_with, bytes_without = [], [], 0, 0
    for number in range(rounds):
        ids = bench.prompt(count, seed=1000 * number)
        results = {}
        for which in (None, cache) if number % 2 else (cache, None):
            results[which is not None] = bench.run(ids, which, steps)
        prefill.append(results[True][0] / results[False][0])
        if steps:
            decode.append(median(results[False][1]) / median(results[True][1]))
        bytes_with, bytes_without = results[True][2], results[False][2]
    return prefill, decode, bytes_with, bytes_without


def span(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policies", default="snapkv,compresskv,adakv")
    parser.add_argument("--budget", default="0.05")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.model, options.threads, options.context)
    bench.run(bench.prompt(256, 1), None, 2)
    report: dict[str, Any] = {}
    for name in options.policies.split(","):
        cache = CacheConfig(policy=name, budget=read_budget(options.budget))
        prefill, _, _, _ = compare(bench, cache, options.prompt, options.rounds, 0)
        _, decode, held, full = compare(bench, cache, bench.context, max(1, options.rounds // 2), STEPS)
        report[name] = {
            f"prefill@{options.prompt}": span(prefill),
            f"decode@{bench.context}": span(decode),
            "kv_bytes": held,
            "full_bytes": full,
        }
        say(f"{name} done")
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for name, figures in report.items():
        cells = [
            f"{work} {f['median']:.2f} ({f['lowest']:.2f}-{f['highest']:.2f})"
            for work, f in figures.items()
            if isinstance(f, dict)
        ]
        print(f"{name}: prefill seconds with / without, {cells[0]}; decode speed with / without, {cells[1]};")
        print(f"    KV {figures['kv_bytes'] / 2**20:.1f} of {figures['full_bytes'] / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
