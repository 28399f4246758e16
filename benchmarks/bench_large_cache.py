"""A long context of another model's shape, compressed: seconds, and the most memory the process held.

Keys, values and queries are random, of the shape of Qwen2.5-0.5B. Measured are the work of a policy and its
memory beside that of the cache itself.

Usage: python benchmarks/bench_large_cache.py [--tokens N] [--policies P,Q] [--budget X] [--threads N]
       [--json]
"""

from __future__ import annotations

# Before torch, to which it says how threads wait.
import minikv  # noqa: F401  # isort: skip

import argparse
import json
import resource
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common import peak_rss, say
from minikv.cache.budget import read_budget
from minikv.cache.compress import Compressor, evidence_for
from minikv.cache.evidence import Recorded
from minikv.cache.lanes import LaneStore
from minikv.cache.policies.base import Evidence
from minikv.cache.policies.registry import make_policy
from minikv.cache.pool import PagePool
from minikv.config import CacheConfig
from minikv.evals.plan import with_refit
from minikv.kernels.torch_cpu import TorchBackend
from minikv.models.config import ModelConfig
from minikv.models.hf_config import normalise_config
from minikv.models.rope import Rope

PAGE = 32
CHUNK = 1024
QWEN = normalise_config(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
)


class RandomWeights:
    """What the compressor asks of a decoder, drawn once."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.rope = Rope(config.rope, config.head_dim)
        self.backend = TorchBackend()
        self._output = torch.randn(config.hidden_size, config.num_query_heads * config.head_dim) / 30

    def output_weight(self, layer: int) -> Tensor:
        """See `minikv.cache.compress.Weights`; the same for all layers."""
        return self._output


def filled(config: ModelConfig, tokens: int) -> tuple[LaneStore, int]:
    """A store with one sequence of random entries."""
    lanes = config.num_layers * config.num_kv_heads
    pool = PagePool(-(-tokens // PAGE) * lanes, PAGE, config.head_dim, torch.float16)
    store = LaneStore(pool, 1, config.num_layers, config.num_kv_heads, tokens)
    seq = store.open()
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        reserved = store.reserve(seq, count)
        assert reserved, "the pool holds all tokens"
        slots = torch.from_numpy(store.next_slots(seq, count))
        for layer in slots:
            rows = torch.randn(2, *layer.shape, config.head_dim)
            pool.write_rows(layer, rows[0], rows[1])
        pool.write_entries(slots, torch.arange(start, start + count).expand(slots.shape))
        store.append(seq, count)
    return store, seq


def recorded(config: ModelConfig, evidence: Evidence, tokens: int) -> Recorded:
    """Random evidence of the kinds asked for."""
    layers, heads, width = config.num_layers, config.num_query_heads, config.head_dim
    window = evidence.window
    found = Recorded(
        queries=torch.randn(layers, heads, window, width),
        query_heads=torch.arange(heads).expand(layers, heads),
        query_positions=torch.arange(tokens - window, tokens),
        residual_norms=torch.full((layers, window), 30.0),
    )
    return (
        replace(found, future=torch.randn(layers, heads, evidence.future, width))
        if evidence.future
        else found
    )


def measure(name: str, budget: float | int | str, tokens: int) -> dict[str, Any]:
    """One policy on a cache of its own."""
    base, refit = with_refit(name)
    weights = RandomWeights(QWEN)
    policy = make_policy(
        base,
        window=CacheConfig.window,
        num_layers=QWEN.num_layers,
        num_query_heads=QWEN.num_query_heads,
        num_kv_heads=QWEN.num_kv_heads,
        rope=weights.rope,
    )
    cache = CacheConfig(policy=base, budget=budget, refit=refit)
    store, seq = filled(QWEN, tokens)
    full, before = store.bytes_of(seq), peak_rss()
    evidence = recorded(QWEN, evidence_for(policy, cache), tokens)
    started = time.perf_counter()
    Compressor(store, weights).compress(seq, policy, cache, tokens, evidence)
    return {
        "seconds": time.perf_counter() - started,
        "full_bytes": full,
        "kv_bytes": store.bytes_of(seq),
        "peak_before": before,
        "peak_after": peak_rss(),
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--policies", default="gracekv", help="peaks of later ones include earlier ones")
    parser.add_argument("--budget", default="0.05")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    report = {}
    for name in options.policies.split(","):
        report[name] = measure(name, read_budget(options.budget), options.tokens)
        say(f"{name} done")
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for name, found in report.items():
        mib = {key: value / 2**20 for key, value in found.items() if "bytes" in key or "peak" in key}
        print(
            f"{name}: {found['seconds']:.1f} s; KV {mib['kv_bytes']:.0f} of {mib['full_bytes']:.0f} MiB; "
            f"at most {mib['peak_after']:.0f} MiB held, {mib['peak_before']:.0f} before the compression"
        )


if __name__ == "__main__":
    main()
