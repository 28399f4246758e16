"""The trained correction of how much attention a token is expected to draw (arXiv 2606.31145, section 3.3, in
a smaller form).

Codes of a key have an error, which is greater in some components than in others, and of which the exponential
makes mass. The estimate of a query head's score is

    (sum over components of scale * query * code) + query * mean + bias

with numbers for each query head: head_dim / 4 + 1 of them. The published form has a matrix on mean keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Router:
    """scale: [layers, query_heads, components]; bias: [layers, query_heads], in units of a score before it is
    divided by the root of head_dim; float32."""

    scale: Tensor
    bias: Tensor

    @classmethod
    def plain(cls, layers: int, query_heads: int, head_dim: int) -> Router:
        """The one that takes codes as they are."""
        shape = (layers, query_heads)
        return cls(torch.ones(*shape, head_dim // 4), torch.zeros(shape))

    def on(self, device: torch.device) -> Router:
        """The same, with its numbers on a device."""
        return Router(self.scale.to(device), self.bias.to(device))

    @property
    def num_parameters(self) -> int:
        """Numbers that were learned."""
        return self.scale.numel() + self.bias.numel()

    def of_rows(self, layer: int, kv_heads: int, rows: int) -> tuple[Tensor, Tensor]:
        """Scales [kv_heads, group * rows, components] and biases [kv_heads, group * rows, 1] for so many rows
        of each query head, one head after the other."""
        scale = self.scale[layer].view(kv_heads, -1, self.scale.shape[-1])
        bias = self.bias[layer].view(kv_heads, -1, 1)
        return scale.repeat_interleave(rows, dim=1), bias.repeat_interleave(rows, dim=1)
