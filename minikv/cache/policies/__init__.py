"""Policies: which entries of a sequence stay under a budget. `base` says what a policy is."""

from minikv.cache.policies.base import (
    Allocation,
    Evidence,
    LayerView,
    MergingPolicy,
    Policy,
    QueryStatistics,
    Rows,
)
from minikv.cache.policies.profile import HeadProfile
from minikv.cache.policies.registry import MERGING_NAMES, POLICY_NAMES, check_policy_name, make_policy
from minikv.cache.policies.select import select

__all__ = [
    "Allocation",
    "Evidence",
    "LayerView",
    "MergingPolicy",
    "Policy",
    "QueryStatistics",
    "Rows",
    "HeadProfile",
    "MERGING_NAMES",
    "POLICY_NAMES",
    "check_policy_name",
    "make_policy",
    "select",
]
