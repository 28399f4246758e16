"""What a policy makes of a layer once, for copies of one context under several budgets."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from minikv.cache.merging import is_merging
from minikv.cache.policies.base import LayerView, MergingPolicy, Policy
from minikv.cache.spans.routing import Zooming


class ScoredOnce:
    """A policy on copies of one context: a layer's scores do not depend on the budget, so they are
    computed for the first copy only. spared: seconds that this has saved so far."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.evidence = policy.evidence
        self.refit_from = getattr(policy, "refit_from", None)
        self.allocate = policy.allocate
        self.spared = 0.0
        self._policy = policy
        self._scores: dict[int, tuple[Tensor, float]] = {}

    def score(self, view: LayerView) -> Tensor:
        if view.layer in self._scores:
            scores, seconds = self._scores[view.layer]
            self.spared += seconds
            return scores
        started = time.perf_counter()
        scores = self._policy.score(view)
        self._scores[view.layer] = scores, time.perf_counter() - started
        return scores


class MeasuredOnce:
    """The same of a merging policy and what it measures, which depends on what is protected as well."""

    def __init__(self, policy: MergingPolicy) -> None:
        self.name = policy.name
        self.evidence = policy.evidence
        self.refit_from = getattr(policy, "refit_from", None)
        self.zooms = getattr(policy, "zooms", False)
        self.resident = getattr(policy, "resident", 1.0)
        self.zooming = getattr(policy, "zooming", Zooming(0))
        self.router = getattr(policy, "router", None)
        self.assign = policy.assign
        self.merge = policy.merge
        self.spared = 0.0
        self._policy = policy
        self._measured: dict[int, tuple[Tensor, Any, float]] = {}

    def measure(self, view: LayerView, protected: Tensor) -> Any:
        if view.layer in self._measured:
            before, measured, seconds = self._measured[view.layer]
            if torch.equal(before, protected):
                self.spared += seconds
                return measured
        started = time.perf_counter()
        measured = self._policy.measure(view, protected)
        self._measured[view.layer] = protected, measured, time.perf_counter() - started
        return measured


PolicyOnce = ScoredOnce | MeasuredOnce


def score_once(policy: Any) -> PolicyOnce:
    return MeasuredOnce(policy) if is_merging(policy) else ScoredOnce(policy)
