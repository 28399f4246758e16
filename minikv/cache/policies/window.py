"""Window: the sinks and the latest entries (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from torch import Tensor

from minikv.cache.policies.allocation import uniform
from minikv.cache.policies.base import Allocation, Evidence, LayerView


class Window:
    """score = position. The framework protects the sinks; the rest of the budget goes to the latest.

    The published form also renumbers positions inside the window; here they stay logical. Costs nothing.
    """

    name = "window"

    def __init__(self) -> None:
        self.evidence = Evidence()

    def score(self, view: LayerView) -> Tensor:
        """Later is higher."""
        return view.positions.float()

    def allocate(self, question: Allocation) -> Tensor:
        """The same for every lane."""
        return uniform(question)
