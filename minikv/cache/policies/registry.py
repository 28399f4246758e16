"""Policies by name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from minikv.cache.policies.adakv import AdaKV
from minikv.cache.policies.base import AnyPolicy, MergingPolicy, Policy
from minikv.cache.policies.compresskv import CompressKV
from minikv.cache.policies.expected import Expected
from minikv.cache.policies.full import Full
from minikv.cache.policies.profile import HeadProfile
from minikv.cache.policies.snapkv import SnapKV
from minikv.cache.policies.window import Window
from minikv.errors import ConfigError, shown

if TYPE_CHECKING:
    from minikv.cache.spans.router import Router
    from minikv.models.rope import Rope

POLICY_NAMES = (
    "full",
    "window",
    "snapkv",
    "adakv",
    "expected",
    "compresskv",
    "adakv:expected",
    "adakv:compresskv",
    "gracekv",
    "sekv",
)
MERGING_NAMES = ("gracekv", "sekv")
"""Those that are a `MergingPolicy`."""
ZOOMING_NAMES = ("sekv",)
"""Those whose merged entries are zoomed in again, from a tier below the pool."""


def check_policy_name(name: str) -> None:
    """ConfigError, with the nearest names, unless `name` is one of `POLICY_NAMES`."""
    if isinstance(name, str) and name in POLICY_NAMES:
        return
    near = difflib.get_close_matches(str(name).lower(), POLICY_NAMES, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(POLICY_NAMES)}."
    raise ConfigError(f"There is no policy {shown(name)}; {hint}")


def make_policy(
    name: str,
    *,
    window: int,
    num_layers: int,
    num_query_heads: int,
    num_kv_heads: int,
    profile: HeadProfile | None = None,
    rope: Rope | None = None,
    router: Router | None = None,
) -> AnyPolicy:
    """The policy `name` for a model of these shapes: a `Policy`, or a `MergingPolicy` for those of
    `MERGING_NAMES`.

    window: last content queries that attention is read from; profile: for compresskv, None to do without;
    rope: the model's, needed for expected and gracekv. router: for sekv, None to do without.
    ConfigError for an unknown name or a profile of other shapes.
    """
    check_policy_name(name)
    assert num_query_heads % num_kv_heads == 0
    if name == "gracekv":
        return _gracekv(window, rope)
    if name == "sekv":
        return _sekv(router)
    allocation, _, scoring = name.rpartition(":")
    if name == "adakv":
        allocation, scoring = "adakv", "snapkv"
    policy = _scoring(scoring, window, profile, rope, pooled=allocation == "adakv")
    if profile is not None and scoring == "compresskv":
        _check_shapes(profile, num_layers, num_query_heads)
    return AdaKV(policy) if allocation == "adakv" else policy


def _gracekv(window: int, rope: Rope | None) -> MergingPolicy:
    from minikv.cache.policies.gracekv import GraceKV

    assert rope is not None, "gracekv needs the model's rope"
    return GraceKV(window, rope)


def _sekv(router: Router | None) -> MergingPolicy:
    from minikv.cache.policies.sekv import SeKV

    return SeKV(router=router)


def _scoring(name: str, window: int, profile: HeadProfile | None, rope: Rope | None, pooled: bool) -> Policy:
    if name == "full":
        return Full()
    if name == "window":
        return Window()
    if name == "snapkv":
        return SnapKV(window)
    if name == "expected":
        assert rope is not None, "expected attention needs the model's rope"
        return Expected(rope)
    # Heads that share their scores cannot compete for a budget.
    return CompressKV(window, profile, sharing="own" if pooled else "layer")


def _check_shapes(profile: HeadProfile, num_layers: int, num_query_heads: int) -> None:
    layers, heads = profile.retrieval_scores.shape
    if (layers, heads) != (num_layers, num_query_heads):
        raise ConfigError(
            f"The profile is of a model with {layers} layers and {heads} query heads, but this model has "
            f"{num_layers} and {num_query_heads}."
        )
