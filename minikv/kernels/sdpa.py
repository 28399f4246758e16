"""Scaled dot-product attention that also returns its log-sum-exp."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def sdpa_with_lse(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, H, Q, D] over k, v [B, H, N, D]; bias [B, H, 1, N] is added to the scores.

    Returns out [B, H, Q, D] and lse [B, H, Q] (natural log). A row with every bias at -inf gets
    the log-sum-exp 0 from the fused operator: the caller knows which lanes are empty and mends it.
    `causal` needs Q = N.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    if bias is not None:
        # The fused operator reads the mask as numbers of the queries' type, whatever it holds.
        bias = bias.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if _FLASH is not None and q.device.type == "cpu":
        # The public function hides the log-sum-exp, which merging needs.
        return _FLASH(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return plain_sdpa_with_lse(q, k, v, bias, causal)


def plain_sdpa_with_lse(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The same from public operators only, for a torch without the fused one."""
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    empty = torch.isinf(lse)
    lse = lse.masked_fill(empty, 0.0)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return weights @ v, lse
