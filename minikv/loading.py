"""From the name of a model to a decoder that runs, and what belongs to it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from minikv.config import CacheConfig, format_size
from minikv.errors import ConfigError, ModelError, shown
from minikv.kernels.backend import CPU, AttentionBackend, check_backend_name, choose_backend
from minikv.memory import available_bytes
from minikv.models.build import build_decoder, check_dtype_name, weight_bytes, weights_kind
from minikv.models.config import ModelConfig
from minikv.models.decoder import Decoder
from minikv.models.packed_decoder import PackedDecoder
from minikv.models.sources import OpenModel, open_model, resolve_model
from minikv.text.tokenizer import Tokenizer
from minikv.threads import default_threads

MAX_THREADS = 256


@dataclass
class LoadedModel:
    """A decoder on its backend, with the tokenizer and identity of its model.

    kv_dtype, page_size: how its KV entries are to be stored. reason: why this backend, as a clause. weights:
    what the weights were made, as asked on the CPU, `bf16`, `f16` or `f32` on a device.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: str
    decoder: Decoder | PackedDecoder
    kernels: AttentionBackend
    reason: str
    kv_dtype: torch.dtype
    page_size: int
    weights: str = "auto"

    @property
    def instructions(self) -> str:
        """The instruction set of compiled kernels; "" of others."""
        return getattr(self.kernels, "isa", "")


def load_model(
    model: str | os.PathLike[str],
    cache: CacheConfig,
    free_bytes: int,
    *,
    device: str = "auto",
    backend: str = "auto",
    weights: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    offline: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Find, fetch if needed, check and load a model; the arguments are those of `LLM`.

    Raises ModelError when the model cannot be used, or its weights need more than `free_bytes` or than a
    device has free, and ConfigError for an option that cannot be.
    """
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model must be a name or a path, not {shown(model)}.")
    if threads is not None:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
            raise ConfigError(
                f"threads must be a whole number from 1 to {MAX_THREADS}, not {shown(threads)}."
            )
        torch.set_num_threads(threads)
    check_backend_name(backend, device)
    check_dtype_name(dtype)
    opened = open_model(
        resolve_model(os.fspath(model), revision=revision, offline=offline, progress=progress)
    )
    kernels, reason = choose_backend(
        backend, device, threads or default_threads(), opened.config.head_dim, cache.page_size
    )
    try:
        kind = weights_kind(weights, dtype, opened.config.dtype, kernels)
        if kernels.device != CPU:
            free_bytes = available_bytes(kernels.device)
        _check_memory(opened, weight_bytes(opened.config, kind, kernels), free_bytes)
        decoder = build_decoder(opened.config, opened.weights, kernels, kind)
    finally:
        opened.weights.close()
    return LoadedModel(
        opened.name,
        opened.config,
        opened.tokenizer,
        opened.fingerprint,
        decoder,
        kernels,
        reason,
        _kv_dtype(cache.kv_dtype, kernels, kind),
        cache.page_size or kernels.page_size,
        kind,
    )


def _kv_dtype(name: str, backend: AttentionBackend, weights: str) -> torch.dtype:
    if name == "auto":
        if backend.device != CPU:
            return {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[weights]
        return torch.float16 if backend.name == "cpu" else torch.float32
    return getattr(torch, name)


def _check_memory(model: OpenModel, needed: int, free: int) -> None:
    """Refuse a model whose weights cannot fit, before the system has to kill something."""
    if needed > free:
        raise ModelError(
            f"{model.name} needs {format_size(needed)} for its weights, and {format_size(free)} are free; "
            "use a smaller model or weights in fewer bits, or free some memory."
        )
