"""minikv beside llama.cpp on the same GGUF file, both with float16 KV caches.

llama.cpp is driven through the C functions of llama-cpp-python, so that no class written in Python
stands between the clock and its work. Flash attention is off unless asked for: on a CPU llama.cpp
is faster without it.

Usage: python benchmarks/bench_llama_cpp.py [--quick] [--json] [--model NAME] [--threads N]
       [--flash-attention] [--only WORK ...]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from duel import OURS, WORKLOADS, serve
from duel_report import make_duel, make_parser, run_and_report
from ours import Minikv

RIVAL = "llama.cpp"
MISSING = "llama-cpp-python is not installed; `make bench-llama` builds it in an environment of its own."
_PROMPT_BATCH = 2048  # tokens per call, llama.cpp's own default


class LlamaCpp:
    """See `duel.Engine`. One context per workload; several sequences have a KV stream each."""

    def __init__(self, path: str, threads: int, flash_attention: bool) -> None:
        self._api: Any = importlib.import_module("llama_cpp")
        self.imported_at = time.perf_counter()
        self._threads, self._flash_attention = threads, flash_attention
        self._quiet = self._api.llama_log_callback(lambda level, text, data: None)
        self._api.llama_log_set(self._quiet, None)
        self._api.llama_backend_init()
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = self._api.llama_model_load_from_file(path.encode(), settings)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}.")
        self.vocab_size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._batch = self._api.llama_batch_init(_PROMPT_BATCH, 0, 1)
        self._last: list[int] = []
        self._positions: list[int] = []

    def open(self, sequences: int, tokens: int) -> None:
        """See `duel.Engine`."""
        api = self._api
        if self._context:
            api.llama_free(self._context)
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = sequences * tokens, sequences
        settings.n_batch = _PROMPT_BATCH
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED if self._flash_attention else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        settings.type_k = settings.type_v = api.GGML_TYPE_F16
        settings.kv_unified = False
        self._context = api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp has no room for {sequences} x {tokens} tokens.")

    def fill(self, prompts: Sequence[list[int]]) -> None:
        """See `duel.Engine`."""
        self._last, self._positions = [], []
        for sequence, ids in enumerate(prompts):
            for start in range(0, len(ids), _PROMPT_BATCH):
                part = ids[start : start + _PROMPT_BATCH]
                places = range(start, start + len(part))
                self._decode([(token, place, sequence) for token, place in zip(part, places, strict=True)])
            self._last.append(self._likeliest(-1))
            self._positions.append(len(ids))

    def step(self) -> None:
        """See `duel.Engine`."""
        sequences = range(len(self._last))
        self._decode(list(zip(self._last, self._positions, sequences, strict=True)), every_logit=True)
        self._last = [self._likeliest(row) for row in sequences]
        self._positions = [position + 1 for position in self._positions]

    def clear(self) -> None:
        """See `duel.Engine`."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _decode(self, rows: list[tuple[int, int, int]], every_logit: bool = False) -> None:
        """One call with (token, position, sequence) rows; logits of the last row or of all."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = every_logit or row == len(rows) - 1
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode failed with status {status}.")

    def _likeliest(self, row: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


def find_gguf(name: str) -> str:
    """The model's file. Ends the program when the model is none that both engines can read."""
    from minikv import MinikvError
    from minikv.models.sources import resolve_model

    try:
        files = resolve_model(name)
    except MinikvError as error:
        raise SystemExit(str(error)) from None
    if files.kind != "gguf":
        raise SystemExit(f"llama.cpp reads GGUF files only, and {name} is {files.kind}.")
    return str(files.path)


def serve_one(options: argparse.Namespace) -> None:
    """Be the contestant that `--serve` names."""
    if options.serve == OURS:
        serve(lambda: Minikv(options.model, options.threads, "float16"))
    else:
        serve(lambda: LlamaCpp(options.model, options.threads, options.flash_attention))


def main() -> None:
    """Parse the command line; a contestant's process serves, otherwise the report is printed."""
    parser = make_parser("minikv beside llama.cpp on the same GGUF file.", list(WORKLOADS))
    parser.add_argument("--flash-attention", action="store_true", help="switch it on in llama.cpp")
    options = parser.parse_args()
    if find_spec("llama_cpp") is None:
        raise SystemExit(MISSING)
    if options.serve:
        serve_one(options)
        return
    duel = make_duel(RIVAL, options, ["--flash-attention"] * options.flash_attention)
    # Resolved here: the process of llama.cpp must not import what resolves a name.
    duel.arguments.extend(["--model", find_gguf(options.model)])
    detail = f"KV float16, llama.cpp's flash attention {'on' if options.flash_attention else 'off'}"
    run_and_report(duel, options, detail, ("torch", "llama-cpp-python"))


if __name__ == "__main__":
    sys.exit(main())
