"""Full: nothing is preferred; what the budget allows stays."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.cache.policies.allocation import uniform
from minikv.cache.policies.base import Allocation, Evidence, LayerView


class Full:
    """Keep every entry. Under a budget, which the configuration refuses, the first entries would stay."""

    name = "full"

    def __init__(self) -> None:
        self.evidence = Evidence()

    def score(self, view: LayerView) -> Tensor:
        """All entries alike."""
        return torch.zeros(view.positions.shape, device=view.positions.device)

    def allocate(self, question: Allocation) -> Tensor:
        """The same for every lane."""
        return uniform(question)
