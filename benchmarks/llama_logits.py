"""llama.cpp as a source of logits, for benchmarks that ask how exact it is and not how fast."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from bench_llama_cpp import MISSING, LlamaCpp, find_gguf


class LlamaLogits(LlamaCpp):
    """One sequence of a given text, chunk by chunk; float16 KV, flash attention off.

    It may share its process with minikv: two OpenMP runtimes cost each other time, which nothing
    here measures.
    """

    def __init__(self, model: str, threads: int, length: int) -> None:
        if find_spec("llama_cpp") is None:
            raise SystemExit(MISSING)
        super().__init__(find_gguf(model), threads, flash_attention=False)
        self.open(1, length)
        self._place = 0

    def logits(self, ids: list[int]) -> Tensor:
        """Log-probabilities [n, vocab], float64, after each of the next `ids` of the text."""
        import numpy as np

        places = range(self._place, self._place + len(ids))
        rows = [(token, place, 0) for token, place in zip(ids, places, strict=True)]
        self._decode(rows, every_logit=True)
        self._place += len(ids)
        # One row per token of the batch, in its order. The next call writes the same memory, from
        # which `double` copies.
        logits = self._api.llama_get_logits(self._context)
        table = torch.from_numpy(np.ctypeslib.as_array(logits, (len(ids), self.vocab_size)))
        return torch.log_softmax(table.double(), dim=-1)
