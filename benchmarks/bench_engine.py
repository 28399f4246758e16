"""Speed and memory of the engine beside transformers, on the same float32 weights.

Both run in one process, in turns, and generate the same number of tokens; peak memory is taken
in a process of its own for each. Prints what the machine allows first, then what was measured.

Usage: python benchmarks/bench_engine.py [--quick] [--json FILE] [--model NAME] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from common import TEXT, Clocks, machine, matmul_rate, peak_rss, read_bandwidth, run_worker, say, timed

SEED = 20_000
ENGINES = ("minikv", "transformers")
BATCH = 8


class Engine(Protocol):
    """Greedy generation: `counts[i]` token ids after `prompts[i]`, end-of-text ignored."""

    def generate(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]: ...


class Ours:
    """minikv behind the same method as the peer."""

    def __init__(self, model: str, threads: int) -> None:
        from minikv import LLM, CacheConfig

        # The peer's precision throughout, so that both do the same work.
        cache = CacheConfig(kv_dtype="float32")
        self.llm = LLM(model, weights="f32", cache=cache, max_seqs=BATCH, threads=threads)

    def generate(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
        """See `Engine`."""
        from minikv import SamplingParams

        params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]
        results = self.llm.generate(list(prompts), params)
        failed = [result.message for result in results if result.finish_reason != "length"]
        if failed:
            raise SystemExit(f"minikv did not generate the tokens asked for: {failed[0]}")
        return [list(result.token_ids) for result in results]


@dataclass(frozen=True)
class Sizes:
    """Tokens per workload and rounds; `prompt` and `new` are for batch 1 and 8, `mixed` requests
    have between a sixth and the whole of each."""

    rounds: int
    prefill: int
    prompt: int
    new: int
    mixed: int


@dataclass(frozen=True)
class Run:
    """Prompts and how many tokens to generate after each."""

    prompts: list[list[int]]
    counts: list[int]


FULL = Sizes(rounds=5, prefill=512, prompt=128, new=64, mixed=24)
QUICK = Sizes(rounds=3, prefill=256, prompt=64, new=24, mixed=16)


def cut_prompts(ids: list[int], lengths: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Pieces of the text at random places."""
    starts = [rng.randrange(len(ids) - length) for length in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def make_runs(ids: list[int], sizes: Sizes) -> dict[str, Run]:
    """What each engine does in every round. `first` runs stop after the prefill's own token."""
    rng = random.Random(SEED)
    one = cut_prompts(ids, [sizes.prompt], rng)
    batch = cut_prompts(ids, [sizes.prompt] * BATCH, rng)
    lengths = [rng.randint(sizes.prompt // 6, sizes.prompt) for _ in range(sizes.mixed)]
    counts = [rng.randint(sizes.new // 6, sizes.new) for _ in range(sizes.mixed)]
    return {
        "prefill": Run(cut_prompts(ids, [sizes.prefill], rng), [1]),
        "first 1": Run(one, [1]),
        "whole 1": Run(one, [1 + sizes.new]),
        "first 8": Run(batch, [1] * BATCH),
        "whole 8": Run(batch, [1 + sizes.new] * BATCH),
        "mixed": Run(cut_prompts(ids, lengths, rng), counts),
    }


def do_run(engine: Engine, run: Run) -> list[list[int]]:
    """minikv gets all requests at once and serves eight at a time; the peer gets them eight by
    eight, padded. Only the tokens asked for are counted, for either engine."""
    step = len(run.prompts) if isinstance(engine, Ours) else BATCH
    out = []
    for at in range(0, len(run.prompts), step):
        out += engine.generate(run.prompts[at : at + step], run.counts[at : at + step])
    return out


def rates_of(seconds: dict[str, Clocks], runs: dict[str, Run], sizes: Sizes) -> dict[str, Clocks]:
    """Tokens per second of each workload, on the clock and per processor second, of one round."""

    def rate(tokens: int, seconds: Clocks) -> Clocks:
        return Clocks(tokens / seconds.wall, tokens / seconds.cpu)

    return {
        "prefill, batch 1": rate(sizes.prefill, seconds["prefill"]),
        "prefill, batch 8": rate(BATCH * sizes.prompt, seconds["first 8"]),
        # The first token belongs to the prefill, so the difference of the runs is decode alone.
        "decode, batch 1": rate(sizes.new, seconds["whole 1"] - seconds["first 1"]),
        "decode, batch 8": rate(BATCH * sizes.new, seconds["whole 8"] - seconds["first 8"]),
        "generated end to end, batch 1": rate(1 + sizes.new, seconds["whole 1"]),
        "generated end to end, batch 8": rate(BATCH * (1 + sizes.new), seconds["whole 8"]),
        "generated end to end, mixed lengths": rate(sum(runs["mixed"].counts), seconds["mixed"]),
    }


def load(name: str, options: argparse.Namespace) -> tuple[Engine, list[int]]:
    """The engine called `name` and the token ids of the text."""
    if name == "minikv":
        ours = Ours(options.model, options.threads)
        return ours, ours.llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    import torch

    from minikv.models.sources import open_model, resolve_model
    from peer import Peer, load_peer

    torch.set_num_threads(options.threads)
    opened = open_model(resolve_model(options.model))
    ids = opened.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    return Peer(load_peer(opened)), ids


def work_speed(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Rounds over all runs, the engines in turns within each run; who begins changes every round.

    Round 0 warms up and is not counted.
    """
    loaded = {name: load(name, options) for name in ENGINES}
    runs = make_runs(loaded["minikv"][1], sizes)
    rates: dict[str, dict[str, list[Clocks]]] = {}
    same: list[bool] = []
    for number in range(sizes.rounds + 1):
        seconds: dict[str, dict[str, Clocks]] = {name: {} for name in ENGINES}
        for key, run in runs.items():
            outputs = {}
            for name in ENGINES if number % 2 else ENGINES[::-1]:
                seconds[name][key], outputs[name] = timed(lambda n=name, r=run: do_run(loaded[n][0], r))
            if number == 0:
                same += [a == b for a, b in zip(*outputs.values(), strict=True)]
        say(f"round {number} of {sizes.rounds} done")
        for name in ENGINES if number else ():
            for workload, rate in rates_of(seconds[name], runs, sizes).items():
                rates.setdefault(workload, {}).setdefault(name, []).append(rate)
    return {
        "rates": {
            workload: {name: [vars(rate) for rate in listed] for name, listed in by_engine.items()}
            for workload, by_engine in rates.items()
        },
        "sequences": len(same),
        "sequences_with_equal_ids": sum(same),
    }


def work_memory(name: str, options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Peak memory of one engine after the batch-8 workload."""
    engine, ids = load(name, options)
    prompts = cut_prompts(ids, [sizes.prompt] * BATCH, random.Random(SEED))
    engine.generate(prompts, [1 + sizes.new] * BATCH)
    return {"peak_rss": peak_rss()}


def work_theory(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """What the machine allows: bytes a decoded token must read, operations a prompt token needs."""
    import torch

    from minikv.models.sources import open_model, resolve_model

    torch.set_num_threads(options.threads)
    config = open_model(resolve_model(options.model)).config
    embedding = config.vocab_size * config.hidden_size
    layers = config.num_parameters() - embedding * (1 if config.tied_embeddings else 2)
    weights = 4 * (layers + embedding)  # the head is read for every token, the table of inputs is not
    kv_token = config.kv_bytes_per_token(torch.float32)
    return {
        "machine": machine(),
        "weight_bytes": weights,
        "kv_bytes_per_token": kv_token,
        "bytes_per_decoded_token": weights + kv_token * (sizes.prompt + sizes.new // 2),
        "operations_per_prompt_token": 2 * layers,
        "read_bandwidth": read_bandwidth(),
        "matmul_rate": matmul_rate(),
    }


def print_theory(theory: dict[str, Any], options: argparse.Namespace) -> None:
    """The floor, before any measurement."""
    facts = theory["machine"]
    print(f"{facts['processor']}, {facts['cores']} cores, {options.threads} threads used")
    print(f"Python {facts['python']}, torch {facts['torch']}, transformers {facts['transformers']}")
    per_token, bandwidth = theory["bytes_per_decoded_token"], theory["read_bandwidth"]
    per_prompt_token, rate = theory["operations_per_prompt_token"], theory["matmul_rate"]
    print(
        f"\nA decoded token reads {per_token / 1e6:.0f} MB: {theory['weight_bytes'] / 1e6:.0f} MB of float32"
        f" weights and the KV cache, {theory['kv_bytes_per_token']:,} bytes per token."
        f"\nOne pass over memory reads {bandwidth / 1e9:.1f} GB/s here, which allows"
        f" {bandwidth / per_token:.1f} tokens/s at batch 1."
        f"\nA prompt token needs {per_prompt_token / 1e6:.0f} M operations; a large product does"
        f" {rate / 1e9:.0f} G/s here, which allows {rate / per_prompt_token:.0f} tokens/s.\n",
        flush=True,
    )


def print_speed(speed: dict[str, Any], theory: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The table, then the ratios that are required; returns the medians and ratios."""
    print("Tokens per second, medians. Ratio of each round: median, lowest-highest, median by CPU time.")
    print(f"{'':36}{'minikv':>8}{'transformers':>14}{'ratio':>8}{'':15}{'by CPU':>8}")
    table = {}
    for workload, by_engine in speed["rates"].items():
        rounds = list(zip(*(by_engine[name] for name in ENGINES), strict=True))
        ratios = sorted(ours["wall"] / theirs["wall"] for ours, theirs in rounds)
        row = {name: median(rate["wall"] for rate in by_engine[name]) for name in ENGINES}
        row["ratio"] = median(ratios)
        row["ratio_cpu"] = median(ours["cpu"] / theirs["cpu"] for ours, theirs in rounds)
        table[workload] = row
        print(
            f"{workload:36}{row['minikv']:8.1f}{row['transformers']:14.1f}{row['ratio']:8.2f}"
            f"{f'   {ratios[0]:.2f}-{ratios[-1]:.2f}':15}{row['ratio_cpu']:8.2f}"
        )
    floor = theory["read_bandwidth"] / theory["bytes_per_decoded_token"]
    reached = table["decode, batch 1"]["minikv"] / floor
    print(f"\nDecode at batch 1 reaches {reached:.0%} of what reading float32 weights allows.")
    print(f"Greedy ids are equal in {speed['sequences_with_equal_ids']} of {speed['sequences']} sequences.")
    for workload, least in (("decode, batch 1", 1.0), ("generated end to end, batch 8", 2.0)):
        ratio = table[workload]["ratio"]
        print(f"{workload}: {ratio:.2f}x transformers (required: at least {least:.1f}x)", flush=True)
    return table


def report(options: argparse.Namespace, sizes: Sizes, forwarded: list[str]) -> None:
    """Run the workers one after another, print the report, write the JSON."""

    def worker(task: str) -> dict[str, Any]:
        return run_worker(__file__, ["--worker", task, *forwarded], options.threads)

    theory = worker("theory")
    print_theory(theory, options)
    speed = worker("speed")
    table = print_speed(speed, theory)
    memory = {name: worker(name)["peak_rss"] for name in ENGINES}
    print(
        f"peak memory, batch 8: minikv {memory['minikv'] / 1e6:.0f} MB, transformers"
        f" {memory['transformers'] / 1e6:.0f} MB, ratio {memory['minikv'] / memory['transformers']:.2f}"
    )
    if options.json:
        whole = {"seed": SEED, "model": options.model, "threads": options.threads, "sizes": vars(sizes)}
        whole |= {"theory": theory, "speed": speed, "table": table, "peak_rss": memory}
        Path(options.json).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line; a worker prints one JSON object, otherwise the report is printed."""
    parser = argparse.ArgumentParser(description="Speed and memory of minikv beside transformers.")
    parser.add_argument("--quick", action="store_true", help="shorter prompts and fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="write every figure to FILE as well")
    parser.add_argument("--model", default="smollm2-135m", help="a model with default RoPE (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads for either engine (%(default)s)")
    parser.add_argument("--worker", choices=("theory", "speed", *ENGINES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    tasks: dict[str, Callable[[], dict[str, Any]]] = {
        "theory": lambda: work_theory(options, sizes),
        "speed": lambda: work_speed(options, sizes),
        **{name: lambda name=name: work_memory(name, options, sizes) for name in ENGINES},
    }
    if options.worker:
        print(json.dumps(tasks[options.worker]()))
        return
    forwarded = ["--model", options.model, "--threads", str(options.threads)]
    report(options, sizes, forwarded + ["--quick"] * options.quick)


if __name__ == "__main__":
    sys.exit(main())
