"""From the name of a model to a decoder that runs, and what belongs to it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from minikv.config import CacheConfig, format_size
from minikv.errors import ConfigError, ModelError, shown
from minikv.kernels.backend import CPU, AttentionBackend, check_backend_name, choose_backend
from minikv.memory import available_bytes, is_shortage, shortage
from minikv.models.build import DTYPES, build_decoder, check_dtype_name, weight_bytes, weights_kind
from minikv.models.config import ModelConfig
from minikv.models.decoder import Decoder
from minikv.models.graphs import CudaGraphs
from minikv.models.packed_decoder import PackedDecoder
from minikv.models.sources import OpenModel, open_model, resolve_model
from minikv.text.tokenizer import Tokenizer
from minikv.threads import default_threads, warn_if_threads_spin

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
    cuda_graphs: bool = True,
    progress: bool = False,
) -> LoadedModel:
    """Find, fetch if needed, check and load a model; the arguments are those of `LLM`.

    Raises ModelError when the model cannot be used, or its weights need more than `free_bytes` or than a
    device has free, and ConfigError for an option that cannot be.
    """
    warn_if_threads_spin()
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
        backend,
        device,
        threads or default_threads(),
        opened.config.head_dim,
        cache.page_size,
        # Where all is in float32, so are queries, whatever entries are stored in.
        "float32" if DTYPES.get(dtype) == "f32" else cache.kv_dtype,
    )
    try:
        kind = weights_kind(weights, dtype, opened.config.dtype, kernels)
        decoder = _load_weights(opened, kernels, kind, free_bytes)
        # The plans of other kernels cannot be used again.
        if cuda_graphs and kernels.device.type == "cuda" and kernels.name == "triton":
            assert isinstance(decoder, Decoder)
            decoder.use_graphs(CudaGraphs())
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


def _load_weights(
    model: OpenModel, backend: AttentionBackend, kind: str, free: int
) -> Decoder | PackedDecoder:
    """The decoder. ModelError with the bytes where its weights cannot fit, before the system has to kill
    something, or turn out not to."""
    needed, device = weight_bytes(model.config, kind, backend), backend.device
    try:
        if device != CPU:
            free = available_bytes(device)
        if needed <= free:
            return build_decoder(model.config, model.weights, backend, kind)
        fault = f"and {format_size(free)} are free"
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        fault = f"and memory ran out{shortage(error, CPU if isinstance(error, MemoryError) else device)}"
    where = "" if device == CPU else f" on device {device.type}"
    instead = "weights in fewer bits" if device == CPU else "dtype bf16"
    raise ModelError(
        f"{model.name} needs {format_size(needed)} for its weights{where}, {fault}; use a smaller model or "
        f"{instead}, or free some memory."
    )
