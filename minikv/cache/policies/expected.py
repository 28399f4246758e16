"""Expected attention: what queries still to come will attend to (arXiv 2510.00636)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.policies.allocation import uniform
from minikv.cache.policies.base import Allocation, Evidence, LayerView

if TYPE_CHECKING:
    from minikv.models.rope import Rope

_BLOCK_ROWS = 1024


class Expected:
    """score = (p + eps) |W_O v|, mean over the query heads of each KV head's group.

    Queries to come are taken as Gaussian with the mean and covariance of those seen, turned by the mean
    rotation over the next `future` positions: mu, S. Then exp(q k / sqrt(d)) has the expectation
    exp(mu k / sqrt(d) + k S k / (2 d)); p is this times the entry's mass, normalised over the lane.
    |W_O v| is the norm of what the entry adds to the layer's output. Where p is far below `eps`, the
    estimate says little and the norm decides.

    Costs two quadratic forms of width head_dim per entry and query head.
    """

    name = "expected"

    def __init__(self, rope: Rope, future: int = 512, eps: float = 1e-4) -> None:
        self.evidence = Evidence(query_statistics=True, output_gram=True)
        self.rope = rope
        self.future = future
        self.eps = eps

    def score(self, view: LayerView) -> Tensor:
        """[kv_heads, n] float32, at least 0; needs query statistics."""
        logits = self._logits(view)
        chance = logits.masked_fill_(~view.valid[:, None], torch.finfo(logits.dtype).min).softmax(dim=-1)
        return ((chance + self.eps) * output_norms(view)).mean(dim=1)

    def allocate(self, question: Allocation) -> Tensor:
        """The same for every lane."""
        return uniform(question)

    def _logits(self, view: LayerView) -> Tensor:
        """Expected attention logits: [kv_heads, group, n]."""
        assert view.statistics is not None
        kv_heads, _, width = view.keys.shape
        rotation = self._rotation(view)
        mean = (view.statistics.mean @ rotation).view(kv_heads, view.group, width)
        covariance = (rotation.t() @ view.statistics.covariance @ rotation).view(
            kv_heads, view.group, width, width
        )
        linear = mean @ view.keys.transpose(1, 2) / math.sqrt(width)
        spread = _quadratic(view.keys, covariance) / (2 * width)
        return linear + spread + view.log_mass[:, None]

    def _rotation(self, view: LayerView) -> Tensor:
        """[head_dim, head_dim]: a row vector times it is turned by the mean rotation of the positions to
        come. Dynamic RoPE is taken as it stands at the present length."""
        positions = torch.arange(view.num_tokens, view.num_tokens + self.future)
        cos, sin = self.rope.cos_sin(positions, torch.full_like(positions, view.num_tokens))
        width = view.keys.shape[2]
        eye = torch.eye(width)
        halves = torch.cat((-eye[:, width // 2 :], eye[:, : width // 2]), dim=1)
        return (eye * cos.mean(dim=0) + halves * sin.mean(dim=0)).to(view.keys.device)


def output_norms(view: LayerView) -> Tensor:
    """|W_O v| of each entry through each query head of its group: [kv_heads, group, n]."""
    assert view.output_gram is not None
    gram = view.output_gram.unflatten(0, (-1, view.group))
    return _quadratic(view.values, gram).clamp(min=0).sqrt()


def _quadratic(x: Tensor, forms: Tensor) -> Tensor:
    """x A x for rows x [kv_heads, n, d] and each form A [kv_heads, group, d, d]: [kv_heads, group, n]."""
    # In blocks: x A of all rows at once would take `group` times the memory of the layer's keys.
    blocks = x[:, None].split(_BLOCK_ROWS, dim=2)
    return torch.cat([((block @ forms) * block).sum(dim=-1) for block in blocks], dim=-1)
