"""What an attention backend provides, and the probe that chooses one at load."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minikv.errors import ConfigError
from minikv.kernels.batch import Batch

BACKENDS = ("torch", "reference")


class AttentionBackend(Protocol):
    """One way to run attention over lanes. All log-sum-exps and masses are natural logarithms."""

    name: str
    page_size: int

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


def choose_backend(name: str, device: str) -> tuple[AttentionBackend, str]:
    """The backend for `name` (`auto`, `torch` or `reference`) and a sentence saying why."""
    from minikv.kernels.reference import ReferenceBackend
    from minikv.kernels.torch_cpu import TorchBackend

    if device not in ("auto", "cpu"):
        raise ConfigError(f"device must be auto or cpu, not {device!r}.")
    if name == "auto":
        return TorchBackend(), "plain torch kernels, the default on a CPU"
    if name == "torch":
        return TorchBackend(), "plain torch kernels, as asked"
    if name == "reference":
        return ReferenceBackend(), "the slow float64 oracle, as asked"
    raise ConfigError(f"backend must be auto, {' or '.join(BACKENDS)}, not {name!r}.")
