"""What calibration learned of a model's heads and layers, as far as a policy needs it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadProfile:
    """Retrieval scores of the query heads and eviction errors of the layers.

    retrieval_scores: [layers, query_heads] float32, how strongly a head attends to what is to be retrieved;
    layer_errors: [layers] float32, how much a layer's output suffers from eviction, in any unit;
    top_heads: how many heads of each layer CompressKV reads.
    """

    retrieval_scores: Tensor
    layer_errors: Tensor
    top_heads: int = 4

    def __post_init__(self) -> None:
        assert self.retrieval_scores.ndim == 2 and self.top_heads >= 1
        assert self.layer_errors.shape == self.retrieval_scores.shape[:1]
        assert bool(self.retrieval_scores.isfinite().all() and (self.retrieval_scores >= 0).all())
        assert bool(self.layer_errors.isfinite().all() and (self.layer_errors >= 0).all())

    def heads(self) -> Tensor:
        """The best `top_heads` query heads of each layer (all, if it has fewer): [layers, k] int64,
        ascending; of equal scores the lower head."""
        order = self.retrieval_scores.argsort(dim=1, descending=True, stable=True)
        return order[:, : self.top_heads].sort(dim=1).values
