"""What an attention backend provides, and the probe that chooses one at load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from minikv.errors import ConfigError
from minikv.kernels.batch import Batch
from minikv.kernels.slots import SlotKernels

if TYPE_CHECKING:
    from minikv.cache.pool import PagePool

BACKENDS = ("cpu", "torch", "reference", "triton", "flashinfer")
ON_DEVICES = ("triton", "flashinfer")


CPU = torch.device("cpu")


class EntryKernels(Protocol):
    """One way to rewrite a pool's entries when lanes are compressed; what `PagePool` has in torch."""

    def move(self, pool: PagePool, source: Tensor, target: Tensor) -> None:
        """As `PagePool.move_rows`."""
        ...

    def replace(self, pool: PagePool, target: Tensor, keys: Tensor, values: Tensor, source: Tensor) -> None:
        """As `PagePool.replace_rows`."""
        ...


class AttentionBackend(Protocol):
    """One way to run attention over lanes. All log-sum-exps and masses are natural logarithms."""

    name: str
    page_size: int
    keys_transposed: bool  # how key pages lie in the pool
    device: torch.device  # where the pool, the weights and the forward pass are
    threads: int  # of the host, for what is computed there

    @property
    def slots(self) -> SlotKernels | None:
        """Kernels for policies that make trees; None where those are to use torch."""
        ...

    @property
    def entries(self) -> EntryKernels | None:
        """Kernels that rewrite a pool's entries; None where torch is to do it."""
        ...

    def plan(self, batch: Batch) -> None:
        """Prepare `batch.plan` once per pass, before the first layer."""
        ...

    def rotate_and_write(self, qkv: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys to their positions and write keys and values to their slots.

        qkv: [T, query_heads + 2 * kv_heads, head_dim]. Returns q [T, query_heads, head_dim] and
        k, v [T, kv_heads, head_dim]; k and v carry the rounding of the KV dtype, so that a row is
        the same value whether it is read from the pass or from the pool.
        """
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
        """softmax(q k / sqrt(head_dim) + log_mass) v over each query's lane.

        Returns out [T, query_heads, head_dim] and its log-sum-exp [T, query_heads]; a query that
        sees nothing gets zero and -inf.
        """
        ...


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of entries from the two partial results.

    out: [..., head_dim], lse: [...] natural log, -inf for an empty set.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    anchor = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    weight_a = torch.exp(lse_a - anchor).unsqueeze(-1)
    weight_b = torch.exp(lse_b - anchor).unsqueeze(-1)
    return out_a * weight_a + out_b * weight_b, lse


def check_backend_name(name: str, device: str) -> None:
    """Raise ConfigError for a backend or a device that does not exist, or one that is not for the other."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, not {device!r}.")
    if name not in ("auto", *BACKENDS):
        raise ConfigError(
            f"backend must be auto, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, not {name!r}."
        )
    if device == "cuda" and name not in ("auto", *ON_DEVICES):
        raise ConfigError(
            f"backend {name} runs on the CPU; use backend {' or '.join(ON_DEVICES)} with device cuda."
        )


def choose_backend(
    name: str,
    device: str,
    threads: int,
    head_dim: int,
    page_size: int | None = None,
    kv_dtype: str = "auto",
) -> tuple[AttentionBackend, str]:
    """The backend for `name` (`auto` or one of `BACKENDS`) and a clause saying why.

    `auto` takes the compiled kernels where they were built and fit the model, else plain torch; on
    device cuda, which is used only where it is asked for, FlashInfer's where they can serve, else Triton's.
    Raises ConfigError when the one asked for cannot be used.
    """
    from minikv.kernels.reference import ReferenceBackend
    from minikv.kernels.torch_cpu import TorchBackend

    check_backend_name(name, device)
    if name == "torch":
        return TorchBackend(threads), "plain torch kernels, as asked"
    if name == "reference":
        return ReferenceBackend(), "the slow float64 oracle, as asked"
    if name == "triton":
        return _triton_backend(device, threads, head_dim, page_size, "as asked")
    if name == "flashinfer" or device == "cuda":
        return _flashinfer_backend(name, device, threads, head_dim, page_size, kv_dtype)
    from minikv.kernels.cpu.backend import CpuBackend, why_unusable

    problem = why_unusable(head_dim, page_size)
    if problem is None:
        backend = CpuBackend(threads)
        return backend, f"compiled kernels, {backend.isa}, {threads} thread{'' if threads == 1 else 's'}"
    if name == "cpu":
        raise ConfigError(f"backend cpu cannot be used: {problem}; use backend torch.")
    return TorchBackend(threads), f"plain torch kernels, because {problem}"


def _flashinfer_backend(
    name: str, device: str, threads: int, head_dim: int, page_size: int | None, kv_dtype: str
) -> tuple[AttentionBackend, str]:
    from minikv.kernels.flashinfer.probe import load

    library = load(device, head_dim, page_size, kv_dtype)
    if isinstance(library, str):
        if name == "flashinfer":
            raise ConfigError(f"backend flashinfer cannot be used: {library}.")
        return _triton_backend(device, threads, head_dim, page_size, f"because {library}")
    from minikv.kernels.flashinfer.backend import FlashInferBackend

    place = torch.device("cuda", torch.cuda.current_device())
    why = "as asked" if name == "flashinfer" else "because they are installed and fit the model"
    version = getattr(library, "__version__", "")
    return (
        FlashInferBackend(library, place, threads),
        f"FlashInfer {version} on {torch.cuda.get_device_name(place)}, with Triton kernels, {why}",
    )


def _triton_backend(
    device: str, threads: int, head_dim: int, page_size: int | None, why: str
) -> tuple[AttentionBackend, str]:
    from minikv.kernels.triton.probe import interpreted, why_unusable

    problem = why_unusable(device, head_dim, page_size)
    if problem is not None:
        raise ConfigError(f"backend triton cannot be used: {problem}.")
    from minikv.kernels.triton.backend import TritonBackend

    if interpreted():
        return TritonBackend(threads=threads), f"Triton kernels interpreted on the CPU, {why}"
    place = torch.device("cuda", torch.cuda.current_device())
    return TritonBackend(place, threads), f"Triton kernels on {torch.cuda.get_device_name(place)}, {why}"
