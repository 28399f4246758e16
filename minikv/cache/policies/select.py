"""From scores and counts to the entries that stay."""

from __future__ import annotations

import torch
from torch import Tensor


def select(scores: list[Tensor], counts: Tensor) -> Tensor:
    """The `counts` highest entries of each lane; of equal scores the lower position stays.

    scores: per layer [kv_heads, n] float32 (n may differ between layers), -inf past a lane's end.
    counts: [layers, kv_heads] int64, at most each lane's length. Returns [layers, kv_heads, n_max] bool.
    """
    longest = max(layer.shape[1] for layer in scores)
    keep = torch.zeros(len(scores), counts.shape[1], longest, dtype=torch.bool)
    for mask, layer, count in zip(keep, scores, counts, strict=True):
        assert not layer.isnan().any(), "a score is NaN"
        order = layer.argsort(dim=1, descending=True, stable=True)
        taken = torch.arange(layer.shape[1]) < count[:, None]
        mask[:, : layer.shape[1]].scatter_(1, order, taken)
    return keep
