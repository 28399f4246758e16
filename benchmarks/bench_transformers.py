"""minikv beside transformers, which runs the same weights dequantised to float32.

Usage: python benchmarks/bench_transformers.py [--quick] [--json] [--model NAME] [--threads N]
       [--backend NAME] [--weights TYPE] [--only WORK ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from duel import OURS, serve
from duel_report import make_duel, make_parser, run_and_report
from ours import Minikv

RIVAL = "transformers"
WORK = ("decode@128", "decode@2048", "decode@8192", "prefill@512", "prefill@2048", "batch8")


class Transformers:
    """The forward pass of transformers with its dynamic cache, without what `generate` adds."""

    def __init__(self, model: str, threads: int) -> None:
        # torch before minikv, which would set how OpenMP's threads wait.
        import torch
        from transformers import DynamicCache

        from minikv.models.sources import open_model, resolve_model
        from peer import load_peer

        self.imported_at = time.perf_counter()
        torch.set_num_threads(threads)
        opened = open_model(resolve_model(model))
        self._model = load_peer(opened)
        self._new_cache = DynamicCache
        self._cache: DynamicCache | None = None
        self._last = torch.empty(0, 1, dtype=torch.int64)
        self._torch = torch
        self.vocab_size = opened.config.vocab_size

    def open(self, sequences: int, tokens: int) -> None:
        """The cache grows as it is filled."""

    def fill(self, prompts: Sequence[list[int]]) -> None:
        """See `duel.Engine`. The prompts are of one length, so no row is padded."""
        self._cache = self._new_cache()
        self._last = self._torch.tensor(prompts)
        self.step()

    def step(self) -> None:
        """See `duel.Engine`."""
        with self._torch.inference_mode():
            out = self._model(self._last, cache=self._cache, use_cache=True, logits_to_keep=1)
            self._last = out.logits[:, -1].argmax(-1, keepdim=True)

    def clear(self) -> None:
        """See `duel.Engine`."""
        self._cache = None


def main() -> None:
    """Parse the command line; a contestant's process serves, otherwise the report is printed."""
    parser = make_parser("minikv beside transformers on float32 weights.", WORK)
    parser.add_argument("--backend", default="auto", help="minikv's backend (%(default)s)")
    parser.add_argument("--weights", default="auto", help="minikv's weights in memory (%(default)s)")
    options = parser.parse_args()
    ours = {"backend": options.backend, "weights": options.weights}
    if options.serve == OURS:
        serve(lambda: Minikv(options.model, options.threads, **ours))
        return
    if options.serve:
        serve(lambda: Transformers(options.model, options.threads))
        return
    detail = f"minikv with backend {options.backend}, weights {options.weights}; transformers in float32"
    more = ["--model", options.model, "--backend", options.backend, "--weights", options.weights]
    duel = make_duel(RIVAL, options, more)
    run_and_report(duel, options, detail, ("torch", "transformers"))


if __name__ == "__main__":
    sys.exit(main())
