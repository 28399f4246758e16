"""Many questions on one document, with the prefix store and without: seconds, tokens computed, answers.

The two take turns, each time with a model loaded anew and nothing kept from before; ratios are of the same
round. The document is the reference prose that the evaluations use, the questions ask for words of it.

Usage: python benchmarks/bench_prefix.py [--document N] [--questions N] [--answer N] [--policies P:BUDGET,Q]
       [--rounds N] [--threads N] [--model NAME] [--json]
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from common import Clocks, say, timed
from minikv import LLM, CacheConfig, SamplingParams, TierConfig
from minikv.cache.budget import read_budget
from minikv.evals.text import reference_prose

SYSTEM = "Answer questions about this text with few words.\n\n"


def prompts(llm: LLM, document: int, questions: int) -> list[list[int]]:
    """Token ids: `document` tokens that all have in common, and a question of each."""
    text = llm.tokenizer.encode(SYSTEM + reference_prose())[:document]
    form = "\n\nQuestion {}: What does the text say of number {}?\nAnswer:"
    return [text + llm.tokenizer.encode(form.format(n, 7 * n)) for n in range(questions)]


def answer(options: argparse.Namespace, cache: CacheConfig, stored: bool) -> dict[str, Any]:
    """All answers of a fresh engine, with what they took."""
    tiers = TierConfig(hot="1GiB", warm="1GiB" if stored else None)
    with LLM(options.model, cache=cache, tiers=tiers, threads=options.threads) as llm:
        asked = prompts(llm, options.document, options.questions)
        params = SamplingParams(max_tokens=options.answer, ignore_eos=True)
        taken, results = timed(lambda: llm.generate(asked, params))
        report = {} if llm.engine.storage is None else llm.engine.storage.report()
    reused = sum(result.usage.reused_tokens for result in results)
    return {
        "seconds": taken,
        "computed": sum(map(len, asked)) - reused,
        "answers": [result.token_ids for result in results],
        "report": report,
    }


def compare(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One policy, as a report."""
    policy, _, budget = name.partition(":")
    cache = CacheConfig(policy=policy, budget=read_budget(budget) if budget else None)
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        # Neither is always the first.
        runs = {stored: answer(options, cache, stored) for stored in (number % 2 == 0, number % 2 != 0)}
        rounds.append(runs_compared(runs[True], runs[False]))
        say(f"{name}, round {number + 1}: {rounds[-1]['share']:.3f} of the time")
    last = rounds[-1]
    return last | {
        "policy": name,
        "share": median(r["share"] for r in rounds),
        "share_cpu": median(r["share_cpu"] for r in rounds),
        "shares": [r["share"] for r in rounds],
        "identical": all(r["identical"] for r in rounds),
    }


def runs_compared(with_store: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    """One round."""
    one: Clocks = with_store["seconds"]
    other: Clocks = without["seconds"]
    return {
        "share": one.wall / other.wall,
        "share_cpu": one.cpu / other.cpu,
        "seconds": one.wall,
        "seconds_without": other.wall,
        "computed": with_store["computed"],
        "computed_without": without["computed"],
        "identical": with_store["answers"] == without["answers"],
        "report": with_store["report"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--document", type=int, default=4000, help="tokens")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--policies", default="full,expected:1/16,gracekv:1/16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [compare(options, name) for name in options.policies.split(",")]
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for one in found:
        print(
            f"{one['policy']}: {one['seconds']:.1f} s instead of {one['seconds_without']:.1f} s, "
            f"{one['share']:.3f} of the time ({one['share_cpu']:.3f} of the processor's); "
            f"{one['computed']} prompt tokens computed instead of "
            f"{one['computed_without']}; answers {'identical' if one['identical'] else 'DIFFERENT'}; "
            f"warm held {one['report']['warm_bytes'] / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
