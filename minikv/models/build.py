"""Which decoder runs a model on a backend, and what its weights will weigh."""

from __future__ import annotations

from minikv.errors import ConfigError
from minikv.kernels.backend import AttentionBackend
from minikv.kernels.cpu.backend import CpuBackend
from minikv.models.config import ModelConfig
from minikv.models.decoder import Decoder
from minikv.models.packed_decoder import KEPT, PackedDecoder
from minikv.models.weights import WeightSource

WEIGHTS = ("auto", "q4", "q8", "bf16", "f32")
_BYTES_PER_WEIGHT = {"q4": 20 / 32, "q8": 34 / 32, "bf16": 2.0, "f16": 2.0, "f32": 4.0}


def check_weights_kind(kind: str, backend: AttentionBackend) -> None:
    """Raise ConfigError for a kind of weights that is unknown or that the backend cannot use."""
    if kind not in WEIGHTS:
        raise ConfigError(f"weights must be one of {', '.join(WEIGHTS)}, not {kind!r}.")
    if kind not in ("auto", "f32") and not isinstance(backend, CpuBackend):
        raise ConfigError(
            f"weights {kind} needs the compiled kernels, and backend {backend.name} has f32 only."
        )


def weight_bytes(config: ModelConfig, kind: str, backend: AttentionBackend) -> int:
    """About what the weights take in memory once loaded."""
    if not isinstance(backend, CpuBackend):
        kind = "f32"
    elif kind == "auto":
        kind = KEPT.get(config.dtype, "q8")
    return int(config.num_parameters() * _BYTES_PER_WEIGHT[kind])


def build_decoder(
    config: ModelConfig, weights: WeightSource, backend: AttentionBackend, kind: str = "auto"
) -> Decoder | PackedDecoder:
    """The decoder for a backend, its weights loaded and packed as `kind`."""
    check_weights_kind(kind, backend)
    if isinstance(backend, CpuBackend):
        return PackedDecoder(config, weights, backend, kind)
    return Decoder(config, weights, backend)
