"""What rounding costs: next-token distributions of the compiled kernels beside dequantised float32.

Over the first tokens of a real text, teacher forced: perplexity, mean and largest KL divergence from
float32, and how often the likeliest token is the same, for each kind of weights and KV entries.

Usage: python benchmarks/bench_accuracy.py [--model NAME] [--tokens N] [--json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from common import ROOT, TEXT
from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool
from minikv.kernels.backend import choose_backend
from minikv.models.build import build_decoder
from minikv.models.sources import open_model, resolve_model
from minikv.sampling import Sampler, SamplingParams
from minikv.scheduler.batching import build_batch
from minikv.scheduler.request import Request
from minikv.scheduler.scheduler import Scheduled

CHUNK = 128


@dataclass
class Sums:
    """Over the tokens seen so far."""

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    largest_kl: float = 0.0
    same: int = 0


class Runner:
    """One decoder over one lane set, chunk by chunk."""

    def __init__(self, model: str, backend: str, weights: str, kv_dtype: torch.dtype, length: int):
        opened = open_model(resolve_model(model))
        config = opened.config
        kernels, _ = choose_backend(backend, "cpu", torch.get_num_threads(), config.head_dim)
        self.decoder = build_decoder(config, opened.weights, kernels, weights)
        pages = -(-length // 32) * config.num_layers * config.num_kv_heads
        pool = PagePool(pages, 32, config.head_dim, kv_dtype, keys_transposed=kernels.keys_transposed)
        self.store = LaneStore(pool, 1, config.num_layers, config.num_kv_heads, length)
        params = SamplingParams()
        self.request = Request(
            0, [], params, Sampler(params, (), config.vocab_size), frozenset(), seq=self.store.open()
        )

    def logits(self, ids: list[int]) -> Tensor:
        """Logits of the next tokens of the text."""
        request = self.request
        request.tokens = request.tokens + ids
        assert self.store.reserve(0, len(ids))
        batch = build_batch(self.store, [Scheduled(request, len(ids))])
        batch.logit_rows = torch.arange(len(ids))
        logits = self.decoder.forward(batch)
        self.store.append(0, len(ids))
        request.num_computed += len(ids)
        return torch.log_softmax(logits.double(), dim=-1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text = TEXT.read_text(encoding="utf-8") + (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    ids = open_model(resolve_model(options.model)).tokenizer.encode(text)[: options.tokens + 1]
    length = len(ids)
    reference = Runner(options.model, "torch", "f32", torch.float32, length)
    settings = {
        "auto weights, float32 KV": ("auto", torch.float32),
        "auto weights, float16 KV": ("auto", torch.float16),
        "auto weights, int8 KV": ("auto", torch.int8),
        "f32 weights, float32 KV": ("f32", torch.float32),
        "f32 weights, float16 KV": ("f32", torch.float16),
        "q8 weights, float16 KV": ("q8", torch.float16),
    }
    runners = {n: Runner(options.model, "cpu", w, kv, length) for n, (w, kv) in settings.items()}
    sums = {name: Sums() for name in ("float32", *settings)}
    for start in range(0, length - 1, CHUNK):
        chunk, targets = ids[start : start + CHUNK], ids[start + 1 : start + 1 + CHUNK]
        chunk = chunk[: len(targets)]
        expected = reference.logits(chunk)
        add(sums["float32"], expected, expected, targets)
        for name, runner in runners.items():
            add(sums[name], runner.logits(chunk), expected, targets)
    report(sums, options.json)


def add(sums: Sums, logits: Tensor, expected: Tensor, targets: list[int]) -> None:
    """Count a chunk of log-probabilities [n, vocab] against those expected."""
    rows = torch.arange(len(targets))
    kl = (expected.exp() * (expected - logits)).sum(-1)
    sums.tokens += len(targets)
    sums.nll -= float(logits[rows, torch.tensor(targets)].sum())
    sums.kl += float(kl.sum())
    sums.largest_kl = max(sums.largest_kl, float(kl.max()))
    sums.same += int((logits.argmax(-1) == expected.argmax(-1)).sum())


def report(sums: dict[str, Sums], as_json: bool) -> None:
    """One line per setting."""
    rows = {
        name: {
            "perplexity": float(torch.tensor(s.nll / s.tokens).exp()),
            "mean_kl": s.kl / s.tokens,
            "largest_kl": s.largest_kl,
            "same_top1": s.same / s.tokens,
        }
        for name, s in sums.items()
    }
    if as_json:
        print(json.dumps({"tokens": sums["float32"].tokens, "settings": rows}))
        return
    base = rows["float32"]["perplexity"]
    print(f"{sums['float32'].tokens} tokens; against dequantised float32 weights, float32 KV, plain torch")
    for name, row in rows.items():
        change = 100 * (row["perplexity"] / base - 1)
        print(
            f"{name:28}  perplexity {row['perplexity']:8.4f} ({change:+.2f} %)  KL mean {row['mean_kl']:.6f} "
            f"largest {row['largest_kl']:.4f}  same top-1 {100 * row['same_top1']:.2f} %"
        )


if __name__ == "__main__":
    main()
