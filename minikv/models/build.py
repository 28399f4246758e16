"""Which decoder runs a model on a backend, and what its weights will weigh."""

from __future__ import annotations

from minikv.errors import ConfigError, shown
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
# By the names that vLLM knows as well; the kind of weights that each one makes.
DTYPES = {
    "bf16": "bf16",
    "fp16": "f16",
    "fp32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "half": "f16",
    "float32": "f32",
    "float": "f32",
}
_DTYPE_CHOICES = "auto, bf16, fp16 or fp32"
_BYTES_PER_WEIGHT = {"q4": 20 / 32, "q8": 34 / 32, "bf16": 2.0, "f16": 2.0, "f32": 4.0}


def check_dtype_name(dtype: str) -> None:
    """Raise ConfigError for a dtype that does not exist."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype must be {_DTYPE_CHOICES}, not {shown(dtype)}.")


def weights_kind(weights: str, dtype: str, of_file: str, backend: AttentionBackend) -> str:
    """The kind of weights that a decoder gets: on the CPU as `weights` says, on a device as `dtype` does,
    where auto is the file's own type (`of_file`, such as float16) if that has 16 bits, or else bf16.

    Raises ConfigError for either where it is unknown, means nothing or cannot be served.
    """
    check_dtype_name(dtype)
    if weights not in WEIGHTS:
        raise ConfigError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}.")
    where = backend.device.type
    if where == "cpu":
        if dtype != "auto":
            raise ConfigError(
                f"dtype {dtype} is for device cuda; on the CPU weights says how weights are kept: "
                f"{', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]}."
            )
        return _checked_weights(weights, backend)
    if weights != "auto":
        raise ConfigError(
            f"weights {weights} is for the CPU; on device {where} dtype says the type of weights and "
            f"activations: {_DTYPE_CHOICES}."
        )
    if dtype == "auto":
        return "f16" if KEPT.get(of_file) == "f16" else "bf16"
    return DTYPES[dtype]


def _checked_weights(kind: str, backend: AttentionBackend) -> str:
    possible = WEIGHTS if isinstance(backend, CpuBackend) else _PLAIN_WEIGHTS[backend.name]
    if kind not in possible:
        listed = f"{', '.join(possible[:-1])} or {possible[-1]}"
        raise ConfigError(f"weights must be {listed} with backend {backend.name}, not {kind}.")
    return kind


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
        return kind
    if "q8" not in _PLAIN_WEIGHTS[backend.name] or kind not in ("q4", "q8") or activation_levels() is None:
        return "f32"
    return "q8"


def build_decoder(
    config: ModelConfig, weights: WeightSource, backend: AttentionBackend, kind: str = "auto"
) -> Decoder | PackedDecoder:
    """The decoder for a backend, its weights loaded and packed as `kind`, which `weights_kind` gave."""
    if isinstance(backend, CpuBackend):
        return PackedDecoder(config, weights, backend, kind)
    if backend.device.type == "cpu" and "q8" not in _PLAIN_WEIGHTS[backend.name]:
        kind = "f32"
    return Decoder(config, weights, backend, kind)
