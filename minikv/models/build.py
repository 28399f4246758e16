"""Which decoder runs a model on a backend, and what its weights will weigh."""

from __future__ import annotations

from minikv.errors import ConfigError
from minikv.kernels.backend import AttentionBackend
from minikv.kernels.cpu.backend import CpuBackend
from minikv.models.config import ModelConfig
from minikv.models.decoder import Decoder
from minikv.models.int8_linear import activation_levels
from minikv.models.packed_decoder import KEPT, PackedDecoder
from minikv.models.weights import WeightSource

WEIGHTS = ("auto", "q4", "q8", "bf16", "f32")
# What the backends without packed weights can use.
_PLAIN_WEIGHTS = {"torch": ("auto", "q8", "f32"), "reference": ("auto", "f32"), "triton": ("auto", "f32")}
_DEVICE_WEIGHTS = ("auto", "bf16")
_BYTES_PER_WEIGHT = {"q4": 20 / 32, "q8": 34 / 32, "bf16": 2.0, "f16": 2.0, "f32": 4.0}


def check_weights_kind(kind: str, backend: AttentionBackend) -> None:
    """Raise ConfigError for a kind of weights that is unknown or that the backend cannot use."""
    if kind not in WEIGHTS:
        raise ConfigError(f"weights must be one of {', '.join(WEIGHTS)}, not {kind!r}.")
    possible = WEIGHTS if isinstance(backend, CpuBackend) else _PLAIN_WEIGHTS[backend.name]
    if backend.device.type != "cpu":
        possible = _DEVICE_WEIGHTS
    if kind not in possible:
        listed = f"{', '.join(possible[:-1])} or {possible[-1]}"
        where = f"backend {backend.name}" if backend.device.type == "cpu" else f"device {backend.device.type}"
        raise ConfigError(f"weights must be {listed} with {where}, not {kind}.")


def weight_bytes(config: ModelConfig, kind: str, backend: AttentionBackend) -> int:
    """About what the weights take in memory once loaded."""
    if kind == "auto":
        kind = KEPT.get(config.dtype, "q8")
    if not isinstance(backend, CpuBackend):
        kind = _plain_kind(kind, backend)
    return int(config.num_parameters() * _BYTES_PER_WEIGHT[kind])


def _plain_kind(kind: str, backend: AttentionBackend) -> str:
    """What a kind of the compiled kernels, or of the file, becomes on a backend in plain torch."""
    if backend.device.type != "cpu":
        return "bf16"
    if "q8" not in _PLAIN_WEIGHTS[backend.name] or kind not in ("q4", "q8") or activation_levels() is None:
        return "f32"
    return "q8"


def build_decoder(
    config: ModelConfig, weights: WeightSource, backend: AttentionBackend, kind: str = "auto"
) -> Decoder | PackedDecoder:
    """The decoder for a backend, its weights loaded and packed as `kind`."""
    check_weights_kind(kind, backend)
    if isinstance(backend, CpuBackend):
        return PackedDecoder(config, weights, backend, kind)
    if backend.device.type != "cpu":
        kind = "bf16"
    elif "q8" not in _PLAIN_WEIGHTS[backend.name]:
        kind = "f32"
    return Decoder(config, weights, backend, kind)
