"""One compression that has something to do: what it is of, and what the policy and a refit may see of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from minikv.cache.ceiling import Ceiling
from minikv.cache.evidence import Recorded
from minikv.cache.policies.base import AnyPolicy
from minikv.cache.showing import for_refit, shown_to
from minikv.cache.stage import Stage
from minikv.config import CacheConfig


def refits(policy: AnyPolicy, cache: CacheConfig, ratio: float = math.inf) -> bool:
    """Whether what a policy leaves is to be refitted: as asked, or else from the `ratio` on, of entries there
    were to those that stay, from which the policy does so by itself."""
    if cache.refit is not None:
        return cache.refit
    least = getattr(policy, "refit_from", None)
    return least is not None and ratio >= least


@dataclass(frozen=True)
class Task:
    """Everything that was settled before a policy is asked.

    valid, protected: [layers, kv_heads, n] bool; lengths: [layers, kv_heads] int64; positions:
    [layers, kv_heads, n] int32; total: entries that may stay; ceiling, room: of a budget in bytes. stage: of
    entries that come before those of the lanes.
    """

    seq: int
    stage: Stage | None
    policy: Any  # a Policy or a MergingPolicy
    cache: CacheConfig
    num_tokens: int
    recorded: Recorded
    lengths: Tensor
    valid: Tensor
    positions: Tensor
    protected: Tensor
    total: int
    ceiling: Ceiling | None
    room: int

    @cached_property
    def floors(self) -> Tensor:
        """[layers, kv_heads] int64, protected entries of each lane."""
        return self.protected.sum(dim=-1)

    @cached_property
    def shown(self) -> Recorded:
        """What the policy may see."""
        return shown_to(self.recorded, self.policy.evidence)

    @cached_property
    def refit_evidence(self) -> Recorded | None:
        """What a refit may see; None if there is to be none, or if nothing was recorded for it."""
        wanted = for_refit(self.cache.window)
        ratio = int(self.lengths.sum()) / self.total
        if not refits(self.policy, self.cache, ratio) or not self.recorded.serves(wanted):
            return None
        return shown_to(self.recorded, wanted)

    @property
    def beside(self) -> int:
        """Entries of each lane that are staged."""
        return 0 if self.stage is None else self.stage.num_tokens

    @property
    def end(self) -> int:
        """Position after the last entry that may be changed."""
        free = self.valid & ~self.protected
        return int(self.positions[free].max()) + 1

    def protected_of(self, layer: int) -> Tensor:
        """[kv_heads, n] bool, n the longest lane of the layer."""
        return self.protected[layer, :, : int(self.lengths[layer].max())]
