"""What rounding costs: next-token distributions of the compiled kernels beside dequantised float32.

Over the first tokens of a real text, teacher forced: perplexity, mean and largest KL divergence from
float32, and how often the likeliest token is the same, for each kind of weights and KV entries.
With --llama also of llama.cpp on the same file and tokens, with float16 KV and without flash attention,
and the differences of the mean divergences from its own.

Usage: python benchmarks/bench_accuracy.py [--llama] [--model NAME] [--tokens N] [--json]
"""

from __future__ import annotations

# Before torch, to which it says how threads wait.
import minikv  # noqa: F401  # isort: skip

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from common import ROOT, TEXT
from minikv.models.sources import open_model, resolve_model
from minikv.probe import Probe

CHUNK = 128
LLAMA = "llama.cpp, float16 KV"
SETTINGS = {
    "auto weights, float32 KV": ("auto", "float32"),
    "auto weights, float16 KV": ("auto", "float16"),
    "auto weights, int8 KV": ("auto", "int8"),
    "f32 weights, float32 KV": ("f32", "float32"),
    "f32 weights, float16 KV": ("f32", "float16"),
    "q8 weights, float16 KV": ("q8", "float16"),
}
_RESAMPLES = 10_000


class Source(Protocol):
    """Whatever reads a text chunk by chunk."""

    def logits(self, ids: list[int]) -> Tensor:
        """Log-probabilities [n, vocab], float64, after each of the next `ids` of the text."""
        ...


@dataclass
class Sums:
    """Over the tokens seen so far."""

    nll: float = 0.0
    same: int = 0
    kls: list[Tensor] = field(default_factory=list)  # per chunk, one number per token

    def kl(self) -> Tensor:
        """Of every token, in their order."""
        return torch.cat(self.kls)


class Runner:
    """One decoder over one lane set, chunk by chunk."""

    def __init__(self, model: str, backend: str, weights: str, kv_dtype: str, length: int):
        self.probe = Probe.load(
            model, backend=backend, weights=weights, kv_dtype=kv_dtype, max_context=length, max_seqs=1
        )
        self.seq = self.probe.open()

    def logits(self, ids: list[int]) -> Tensor:
        """See `Source`."""
        logits = self.probe.feed(self.seq, ids, logits="all")
        assert logits is not None
        return torch.log_softmax(logits.double(), dim=-1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--llama", action="store_true", help="measure llama.cpp too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sources: dict[str, Source] = {}
    if options.llama:  # first, so that a lack of llama.cpp shows at once
        from llama_logits import LlamaLogits

        sources[LLAMA] = LlamaLogits(options.model, torch.get_num_threads(), options.tokens)
    text = TEXT.read_text(encoding="utf-8") + (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    ids = open_model(resolve_model(options.model)).tokenizer.encode(text)[: options.tokens + 1]
    for name, (weights, kv_dtype) in SETTINGS.items():
        sources[name] = Runner(options.model, "cpu", weights, kv_dtype, len(ids))
    reference = Runner(options.model, "torch", "f32", "float32", len(ids))
    report(measure(reference, sources, ids), options.json)


def measure(reference: Source, sources: Mapping[str, Source], ids: list[int]) -> dict[str, Sums]:
    """The sums of the reference and of every source over the text. No more than two chunks of
    log-probabilities exist at a time."""
    sums = {name: Sums() for name in ("float32", *sources)}
    for start in range(0, len(ids) - 1, CHUNK):
        targets = ids[start + 1 : start + 1 + CHUNK]
        chunk = ids[start : start + len(targets)]
        expected = reference.logits(chunk)
        add(sums["float32"], expected, expected, targets)
        for name, source in sources.items():
            add(sums[name], source.logits(chunk), expected, targets)
    return sums


def add(sums: Sums, logits: Tensor, expected: Tensor, targets: list[int]) -> None:
    """Count a chunk of log-probabilities [n, vocab] against those expected."""
    rows = torch.arange(len(targets))
    sums.nll -= float(logits[rows, torch.tensor(targets)].sum())
    sums.kls.append((expected.exp() * (expected - logits)).sum(-1))
    sums.same += int((logits.argmax(-1) == expected.argmax(-1)).sum())


def compare(kl: Tensor, rival: Tensor) -> dict[str, float]:
    """How far the mean of `kl` is above that of `rival`, token by token: the difference, its
    standard error, and the span of the middle 95% of its bootstrap."""
    difference = kl - rival
    count = len(difference)
    generator = torch.Generator().manual_seed(0)
    means = torch.stack(
        [difference[torch.randint(count, (count,), generator=generator)].mean() for _ in range(_RESAMPLES)]
    )
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    error = float(difference.std()) / count**0.5
    return {"difference": float(difference.mean()), "standard_error": error, "low": low, "high": high}


def report(sums: dict[str, Sums], as_json: bool) -> None:
    """One line per setting."""
    tokens = len(sums["float32"].kl())
    rows = {
        name: {
            "perplexity": float(torch.tensor(s.nll / tokens).exp()),
            "mean_kl": float(s.kl().mean()),
            "largest_kl": float(s.kl().max()),
            "same_top1": s.same / tokens,
        }
        for name, s in sums.items()
    }
    against = {n: compare(sums[n].kl(), sums[LLAMA].kl()) for n in SETTINGS if LLAMA in sums}
    if as_json:
        print(json.dumps({"tokens": tokens, "settings": rows, "mean_kl_against_llama_cpp": against}))
        return
    base = rows["float32"]["perplexity"]
    print(f"{tokens} tokens; against dequantised float32 weights, float32 KV, plain torch")
    for name, row in rows.items():
        change = 100 * (row["perplexity"] / base - 1)
        print(
            f"{name:28}  perplexity {row['perplexity']:8.4f} ({change:+.2f} %)  KL mean {row['mean_kl']:.6f} "
            f"largest {row['largest_kl']:.4f}  same top-1 {100 * row['same_top1']:.2f} %"
        )
    if against:
        print("\nmean KL less that of llama.cpp, paired by token: below zero minikv is closer to float32")
    for name, row in against.items():
        print(
            f"{name:28}  {row['difference']:+.6f}  standard error {row['standard_error']:.6f}  "
            f"95 % bootstrap {row['low']:+.6f} to {row['high']:+.6f}"
        )


if __name__ == "__main__":
    main()
