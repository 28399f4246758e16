"""Decoding with what is zoomed in (policy sekv) against the full cache, step by step in one process.

Two copies of a sequence, one compressed, are given the same tokens in turn, and each step is timed. With
`--shape qwen2.5-0.5b` weights are random and of that shape, and nothing is prefilled: the KV pool is filled
with random rows, and surprisal and last queries are random too.

Usage: python benchmarks/bench_zoom.py [--model NAME | --shape qwen2.5-0.5b] [--tokens N] [--budget X]
       [--steps N] [--sequences N] [--threads N] [--json]
"""

from __future__ import annotations

# Before torch, to which it says how threads wait.
import minikv  # noqa: F401  # isort: skip

import argparse
import json
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench_large_cache import QWEN
from common import TEXT, Clocks, machine, say, timed
from minikv.cache.budget import read_budget
from minikv.cache.evidence import Recorded
from minikv.cache.policies.base import AnyPolicy
from minikv.cache.policies.registry import make_policy
from minikv.cache.policies.sekv import SeKV
from minikv.config import CacheConfig
from minikv.kernels.cpu.backend import PAGE_SIZE, CpuBackend
from minikv.loading import LoadedModel
from minikv.models.config import ModelConfig, expected_shapes
from minikv.models.embedding import DenseEmbedding
from minikv.models.packed_decoder import PackedDecoder
from minikv.models.weights import EMBEDDING
from minikv.probe import Probe

CHUNK = 256
WARM_UP = 5


class RandomSource:
    """A weight source of seeded random tensors."""

    path = "random"

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = dict(expected_shapes(config))
        self._random = torch.Generator().manual_seed(0)

    def names(self) -> list[str]:
        """See `WeightSource`."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return tuple(self._shapes[name])

    def stored_dtype(self, name: str) -> str:
        """See `WeightSource`."""
        return "float32"

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `WeightSource`; norms are ones."""
        shape = self.shape(name)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype)
        return (torch.randn(shape, generator=self._random) / shape[-1] ** 0.5).to(dtype)

    def blocks(self, name: str) -> None:
        """See `WeightSource`; these are plain numbers."""

    def sample(self, name: str) -> bytes:
        """See `WeightSource`."""
        return name.encode()

    def embedding(self) -> DenseEmbedding:
        """See `WeightSource`."""
        return DenseEmbedding(self.load(EMBEDDING, torch.float16))

    def close(self) -> None:
        """See `WeightSource`."""


@dataclass
class Pair:
    """One context in full and compressed, with `facts` of how it came about."""

    probe: Probe
    full: list[int]
    compressed: list[int]
    facts: dict[str, Any]


def random_pair(options: argparse.Namespace) -> Pair:
    """Random weights of a shape, over random rows."""
    kernels = CpuBackend(options.threads)
    # A longer context than the shape's own is no matter where nothing is text.
    shape = replace(QWEN, max_context=max(QWEN.max_context, room(options)))
    loaded = LoadedModel(
        "random",
        shape,
        None,  # type: ignore[arg-type]  # nothing here is text
        "0" * 64,
        PackedDecoder(shape, RandomSource(shape), kernels, "q4"),
        kernels,
        "",
        torch.float16,
        PAGE_SIZE,
    )
    say("weights are there")
    probe = Probe(loaded, max_context=room(options), max_seqs=2 * options.sequences + 1)
    seq = probe.open()
    fill(probe, seq, options.tokens)
    say("the pool is filled")
    policy = SeKV()
    config, window = probe.config, policy.evidence.window
    recorded = Recorded(
        queries=torch.randn(config.num_layers, config.num_query_heads, window, config.head_dim),
        query_heads=torch.arange(config.num_query_heads).expand(config.num_layers, -1),
        query_positions=torch.arange(options.tokens - window, options.tokens),
        surprisal=torch.rand(options.tokens) * 8,
        residual_norms=torch.full((config.num_layers, window), 30.0),
    )
    return pair_of(probe, seq, policy, recorded, options, {"prefill": "none: rows are random"})


def fill(probe: Probe, seq: int, tokens: int) -> None:
    """Random rows in the place of a prefill."""
    store, pool = probe.store, probe.store.pool
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        reserved = store.reserve(seq, count)
        assert reserved, "the pool holds all tokens"
        slots = torch.from_numpy(store.next_slots(seq, count))
        for layer in slots:
            pool.write_rows(layer, *torch.randn(2, *layer.shape, pool.head_dim))
        pool.write_entries(slots, torch.arange(start, start + count).expand(slots.shape))
        store.append(seq, count)
    probe._num_tokens[seq] = tokens


def real_pair(options: argparse.Namespace) -> Pair:
    """A model that read a text, timed with and without what the policy has recorded."""
    probe = Probe.load(
        options.model,
        threads=options.threads,
        max_context=room(options),
        max_seqs=2 * options.sequences + 1,
    )
    ids = tokens_of(probe, options.tokens)
    config = probe.config
    policy = make_policy(
        "sekv",
        window=CacheConfig.window,
        num_layers=config.num_layers,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        rope=probe.model.rope,
    )
    recorder, plain, seq = probe.record(policy.evidence, range(len(ids))), probe.open(), probe.open()
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number, first in enumerate(range(0, len(ids), CHUNK)):
        part = ids[first : first + CHUNK]
        # Chunk by chunk in turn, and neither always first: a machine that others use drifts.
        for recording in (number % 2 == 0, number % 2 != 0):
            feed = partial(probe.feed, seq if recording else plain, part, "none", chunk=CHUNK)
            clock, _ = timed(lambda f=feed, r=recording: f(recorder=recorder if r else None))
            taken[recording].append(clock.wall)
    probe.close(plain)
    share = statistics.median(b / a for a, b in zip(taken[False], taken[True], strict=True)) - 1
    prefill = sum(taken[False])
    facts = {"prefill": prefill, "recording": share * prefill}
    say("the text is read")
    return pair_of(probe, seq, policy, recorder.result(), options, facts)


def pair_of(
    probe: Probe,
    seq: int,
    policy: AnyPolicy,
    recorded: Recorded,
    options: argparse.Namespace,
    facts: dict[str, Any],
) -> Pair:
    """Copies of a sequence, and as many that are compressed."""
    full = [probe.fork(seq) for _ in range(options.sequences)]
    before = probe.store.bytes_of(seq)
    cache = CacheConfig(policy="sekv", budget=read_budget(options.budget))
    compressed = [*(probe.fork(seq) for _ in range(options.sequences - 1)), seq]
    clocks = [timed(lambda s=s: probe.compress(s, policy, cache, recorded))[0] for s in compressed]
    facts["spans"] = statistics.median(clock.wall for clock in clocks)
    facts["full_bytes"], facts["kv_bytes"] = before, probe.store.bytes_of(seq)
    return Pair(probe, full, compressed, facts)


def room(options: argparse.Namespace) -> int:
    """Tokens of the longest sequence."""
    return options.tokens + options.steps + WARM_UP + 1


def tokens_of(probe: Probe, count: int) -> list[int]:
    """Of a text, from its beginning again where it is too short."""
    ids = probe.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    return (ids * (count // len(ids) + 1))[:count]


def measure(pair: Pair, steps: int) -> dict[str, Any]:
    """Seconds of steps by two clocks, in turn, and what was moved meanwhile."""
    probe, sides = pair.probe, (pair.full, pair.compressed)
    given = torch.randint(1, probe.config.vocab_size, (WARM_UP + steps,)).tolist()
    clocks: list[list[Clocks]] = [[], []]
    rows = moved = 0
    for step, token in enumerate(given):
        if step == WARM_UP:
            rows, moved = probe.zoomed.rows, probe.zoomed.bytes
        for side, found in zip(sides, clocks, strict=True):
            clock, _ = timed(lambda s=side, t=token: probe.feed_many(s, [[t]] * len(s), reply=True))
            found.append(clock)
    full, ours = (found[WARM_UP:] for found in clocks)
    tokens, lanes = steps * len(pair.compressed), probe.store.num_lanes
    return pair.facts | {
        "full_step": statistics.median(clock.wall for clock in full),
        "sekv_step": statistics.median(clock.wall for clock in ours),
        "ratio": statistics.median(b.wall / a.wall for a, b in zip(full, ours, strict=True)),
        "cpu_ratio": statistics.median(b.cpu / a.cpu for a, b in zip(full, ours, strict=True)),
        "moved_rows_of_a_lane": (probe.zoomed.rows - rows) / tokens / lanes,
        "moved_bytes": (probe.zoomed.bytes - moved) / tokens,
    }


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print what was measured."""
    name = options.shape or options.model
    print(f"{name}, {options.tokens:,} tokens, budget {options.budget}, {options.sequences} at once")
    share = found["kv_bytes"] / found["full_bytes"]
    print(f"  KV {found['kv_bytes'] / 2**20:.1f} of {found['full_bytes'] / 2**20:.1f} MiB ({share:.1%})")
    step = [1e3 * found[key] for key in ("full_step", "sekv_step")]
    print(
        f"  step: {step[0]:.1f} ms with the full cache, {step[1]:.1f} ms with sekv: {found['ratio']:.2f}; "
        f"by processor time {found['cpu_ratio']:.2f}"
    )
    print(
        f"  moved per token: {found['moved_bytes'] / 2**20:.2f} MiB, "
        f"{found['moved_rows_of_a_lane']:.1f} rows of each lane; the full cache reads "
        f"{found['full_bytes'] / 2**20:.1f} MiB"
    )
    if isinstance(found["prefill"], str):
        print(f"  prefill {found['prefill']}; spans were built in {found['spans']:.2f} s")
        return
    more = found["recording"] + found["spans"]
    print(
        f"  prefill {found['prefill']:.1f} s; recording {found['recording']:.2f} s and building spans "
        f"{found['spans']:.2f} s more ({more / found['prefill']:.1%})"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=["qwen2.5-0.5b"], help="random weights in the place of a model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sequences", type=int, default=1, help="as many of both kinds, in one batch each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    found = measure((random_pair if options.shape else real_pair)(options), options.steps)
    if options.json:
        print(json.dumps({"machine": machine(["torch"]), **vars(options), **found}, indent=2))
    else:
        report(found, options)


if __name__ == "__main__":
    main()
