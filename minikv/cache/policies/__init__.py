"""Policies: which entries of a sequence stay under a budget. `base` says what a policy is."""

from minikv.cache.policies.base import Allocation, Evidence, LayerView, Policy, QueryStatistics
from minikv.cache.policies.profile import HeadProfile
from minikv.cache.policies.registry import POLICY_NAMES, check_policy_name, make_policy
from minikv.cache.policies.select import select

__all__ = [
    "Allocation",
    "Evidence",
    "LayerView",
    "Policy",
    "QueryStatistics",
    "HeadProfile",
    "POLICY_NAMES",
    "check_policy_name",
    "make_policy",
    "select",
]
