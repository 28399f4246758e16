"""AdaKV: any scores, with the heads of a layer competing for its budget (arXiv 2407.11550)."""

from __future__ import annotations

from torch import Tensor

from minikv.cache.policies.allocation import across_heads
from minikv.cache.policies.base import Allocation, LayerView, Policy


class AdaKV:
    """Scores of `scoring`; its layer budgets too, divided over the heads of a layer by pooled top-k.

    floor: the part of its even share that a head always keeps.
    """

    def __init__(self, scoring: Policy, floor: float = 0.2) -> None:
        self.name = "adakv" if scoring.name == "snapkv" else f"adakv:{scoring.name}"
        self.evidence = scoring.evidence
        self.scoring = scoring
        self.floor = floor

    def score(self, view: LayerView) -> Tensor:
        """The scores of `scoring`, unchanged."""
        return self.scoring.score(view)

    def allocate(self, question: Allocation) -> Tensor:
        """Layer sums as `scoring` allocates them, heads by their scores."""
        return across_heads(question, self.floor, self.scoring.allocate(question))
