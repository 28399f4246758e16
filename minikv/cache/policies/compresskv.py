"""CompressKV: what retrieval heads attend to, and layer budgets by eviction error (arXiv 2508.02401)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from minikv.cache.policies.allocation import by_layer_errors, uniform
from minikv.cache.policies.attention import smooth, window_mass
from minikv.cache.policies.base import Allocation, Evidence, LayerView
from minikv.cache.policies.profile import HeadProfile

Sharing = Literal["layer", "own", "weighted"]


class CompressKV:
    """score = attention of the last `window` queries of a layer's retrieval heads, smoothed.

    sharing: "layer", the published form: one score per position, the mean over the layer's retrieval heads,
    for all KV heads. "own": a KV head takes the mean over the retrieval heads of its own group, if there
    are any, else the layer's. "weighted": a KV head takes the mean over all query heads of its group,
    weighted by their retrieval scores.

    Without a profile every head counts as a retrieval head, and layers get the same budget.
    """

    name = "compresskv"

    def __init__(
        self, window: int, profile: HeadProfile | None = None, kernel: int = 5, sharing: Sharing = "layer"
    ) -> None:
        heads = profile.heads() if profile is not None and sharing != "weighted" else None
        self.evidence = Evidence(window=window, heads=heads)
        self.profile = profile
        self.kernel = kernel
        self.sharing: Sharing = sharing

    def score(self, view: LayerView) -> Tensor:
        """[kv_heads, n] float32 in [0, 1]; needs the queries of the heads in `evidence`."""
        mass = smooth(window_mass(view), view, self.kernel)
        if self.sharing == "layer":
            return _of_layer(mass, view)
        assert view.query_heads is not None
        weights = torch.ones(len(view.query_heads), device=mass.device)
        if self.sharing == "weighted" and self.profile is not None:
            weights = self.profile.retrieval_scores[view.layer].to(mass.device)[view.query_heads]
        return _of_groups(mass, weights, view)

    def allocate(self, question: Allocation) -> Tensor:
        """Layers by their errors, the heads of a layer the same."""
        if self.profile is None:
            return uniform(question)
        return by_layer_errors(question, self.profile.layer_errors)


def _of_layer(mass: Tensor, view: LayerView) -> Tensor:
    """Mean over heads [k, n] by position, handed to every lane: [kv_heads, n].

    Lanes that were compressed before may hold different positions, so places are matched by position; a
    head counts where its lane holds the position.
    """
    assert view.query_heads is not None
    lanes = view.query_heads // view.group
    places = view.positions.clamp(min=0)
    sums = mass.new_zeros(len(lanes), view.num_tokens).scatter_add_(1, places[lanes], mass)
    held = view.valid.float()
    counts = held.new_zeros(len(held), view.num_tokens).scatter_add_(1, places, held)
    means = sums.sum(dim=0) / (counts[lanes] > 0).sum(dim=0).clamp(min=1)
    return means[places]


def _of_groups(mass: Tensor, weights: Tensor, view: LayerView) -> Tensor:
    """Weighted mean over the heads of each lane's own group: [kv_heads, n]; without any, the layer's mean."""
    assert view.query_heads is not None
    lanes = view.query_heads // view.group
    mixing = mass.new_zeros(len(view.keys), len(lanes))
    mixing[lanes, torch.arange(len(lanes), device=mass.device)] = weights
    total = mixing.sum(dim=1, keepdim=True)
    own = mixing @ mass / total.clamp(min=1e-20)
    return torch.where(total > 0, own, _of_layer(mass, view))
