"""What a compression policy is: scores per layer, and entries per lane.

A policy is a pure function of keys, values and evidence. It moves no memory, knows neither engine
nor scheduler, and can be tested without a model. The framework (`minikv.cache.compress`) protects
sinks, the recent window and pinned ranges, asks for scores one layer at a time, lets the policy
divide the budget, and rewrites the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Evidence:
    """What a policy wants recorded while a prompt is computed.

    window: the queries of this many last content tokens (0: none).
    heads: [layers, k] int64, query heads whose queries are wanted; None for all.
    query_statistics: mean and covariance of the unrotated queries of all content tokens.
    surprisal: -log p of every prompt token given those before it.
    output_weight: whether `score` reads the output projection, which takes time to unpack.
    """

    window: int = 0
    heads: Tensor | None = None
    query_statistics: bool = False
    surprisal: bool = False
    output_weight: bool = False


@dataclass(frozen=True)
class QueryStatistics:
    """Unrotated queries of one layer: mean [query_heads, head_dim], covariance [query_heads, head_dim,
    head_dim], both float32."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class LayerView:
    """One layer of one sequence, read from the pool as float32; n is the longest lane.

    keys, values: [kv_heads, n, head_dim], keys rotated to their positions.
    log_mass: [kv_heads, n]; positions: [kv_heads, n] int64, -1 past a lane's end.
    valid: [kv_heads, n] bool, false past a lane's end.
    queries: [k, W, head_dim] rotated, of the query heads `query_heads` [k] int64 (ascending), None if
        none were recorded; query_positions: [W] int64.
    statistics: of all query heads, None if none were recorded.
    surprisal: [num_tokens] float32 by position, NaN where not known; None if not recorded.
    output_weight: [hidden, query_heads * head_dim], the output projection; empty if not asked for.
    num_tokens: logical length of the sequence; group: query heads per KV head.
    """

    layer: int
    keys: Tensor
    values: Tensor
    log_mass: Tensor
    positions: Tensor
    valid: Tensor
    num_tokens: int
    group: int
    output_weight: Tensor
    queries: Tensor | None = None
    query_heads: Tensor | None = None
    query_positions: Tensor | None = None
    statistics: QueryStatistics | None = None
    surprisal: Tensor | None = None


@dataclass(frozen=True)
class Allocation:
    """The question of `Policy.allocate`.

    scores: per layer [kv_heads, n] float32; +inf for protected entries, -inf past a lane's end.
    lengths: [layers, kv_heads] int64, entries of each lane.
    protected: [layers, kv_heads] int64, how many of them are protected.
    total: entries that all lanes together may keep; at least the sum of `protected`.
    """

    scores: list[Tensor]
    lengths: Tensor
    protected: Tensor
    total: int


class Policy(Protocol):
    """A way to choose the entries that stay."""

    name: str
    evidence: Evidence

    def score(self, view: LayerView) -> Tensor:
        """How much each entry matters: [kv_heads, n] float32, higher stays. Numbers past a lane's end
        are ignored."""
        ...

    def allocate(self, question: Allocation) -> Tensor:
        """Entries that each lane keeps: [layers, kv_heads] int64.

        Sums to min(total, all entries); no lane gets fewer than its protected entries or more than
        it has. What a short lane cannot use goes to others.
        """
        ...
