"""The trained estimate of how much attention a span draws (arXiv 2606.31145, section 3.3, in a smaller form).

Bounds of a span's keys say how high the score of one of them can be. None reaches that, and the less so the
more the numbers of the key change within the span. The estimate of the log mass of a span of n tokens is

    bound of (scale * q) + mass * log n + bias

with numbers for each query head: head_dim + 2 of them, where the published form has a matrix on mean keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Router:
    """scale: [layers, query_heads, head_dim]; mass, bias: [layers, query_heads]; all float32."""

    scale: Tensor
    mass: Tensor
    bias: Tensor

    @classmethod
    def plain(cls, layers: int, query_heads: int, head_dim: int) -> Router:
        """The one that takes bounds as they are."""
        shape = (layers, query_heads)
        return cls(torch.ones(*shape, head_dim), torch.zeros(shape), torch.zeros(shape))

    @property
    def num_parameters(self) -> int:
        """Numbers that were learned."""
        return self.scale.numel() + self.mass.numel() + self.bias.numel()

    def queries(self, layer: int, q: Tensor) -> Tensor:
        """Queries [rows, query_heads, head_dim] of a layer as they meet bounds."""
        return q * self.scale[layer]

    def offsets(self, layer: int, log_mass: Tensor, group: int) -> Tensor:
        """What is added to the bounds of a layer's spans: [kv_heads, group, spans], from the logarithms of
        their tokens [kv_heads, spans], -inf where there is no span."""
        mass, bias = (part[layer].view(-1, group, 1) for part in (self.mass, self.bias))
        return torch.where(log_mass.isfinite()[:, None], mass * log_mass[:, None] + bias, -torch.inf)
