"""SnapKV: entries that the last queries of the prompt attend to (arXiv 2404.14469)."""

from __future__ import annotations

from torch import Tensor

from minikv.cache.policies.allocation import uniform
from minikv.cache.policies.attention import smooth, window_mass
from minikv.cache.policies.base import Allocation, Evidence, LayerView


class SnapKV:
    """score = attention of the last `window` queries, smoothed over `kernel` neighbouring entries, mean over
    the query heads of each KV head's own group.

    Costs `window` rows of attention per query head.
    """

    name = "snapkv"

    def __init__(self, window: int, kernel: int = 5) -> None:
        self.evidence = Evidence(window=window)
        self.kernel = kernel

    def score(self, view: LayerView) -> Tensor:
        """[kv_heads, n] float32 in [0, 1]; needs the queries of all heads."""
        mass = smooth(window_mass(view), view, self.kernel)
        return mass.view(-1, view.group, mass.shape[1]).mean(dim=1)

    def allocate(self, question: Allocation) -> Tensor:
        """The same for every lane."""
        return uniform(question)
