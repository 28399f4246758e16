"""What a compression policy is: scores per layer, and entries per lane.

A policy is a pure function of keys, values and evidence. It moves no memory, knows neither engine
nor scheduler, and can be tested without a model. The framework (`minikv.cache.compress`) protects
sinks, the recent window and pinned ranges, asks for scores one layer at a time, lets the policy
divide the budget, and rewrites the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from minikv.cache.spans.codes import Basis
from minikv.kernels.slots import SlotKernels


@dataclass(frozen=True)
class Evidence:
    """What a policy wants recorded while a prompt is computed.

    window: the queries of this many last content tokens (0: none).
    heads: [layers, k] int64, query heads whose queries are wanted; None for all.
    query_statistics: mean and covariance of the unrotated queries of all content tokens.
    surprisal: -log p of every prompt token given those before it.
    future: this many queries of every head, evenly spaced over the content, unrotated; policies see them
        rotated to positions after the last one, as queries still to come.
    residual_norms: the norm of the residual stream that each of the window's queries was made from.
    output_weight: whether `score` reads the output projection, which takes time to unpack.
    output_gram: whether it reads the grams of the output projection, which are kept.
    """

    window: int = 0
    heads: Tensor | None = None
    query_statistics: bool = False
    surprisal: bool = False
    future: int = 0
    residual_norms: bool = False
    output_weight: bool = False
    output_gram: bool = False

    @property
    def records(self) -> bool:
        """Whether anything is to be recorded."""
        return bool(self.window or self.query_statistics or self.surprisal or self.future)


@dataclass(frozen=True)
class QueryStatistics:
    """Unrotated queries of one layer: mean [query_heads, head_dim], covariance [query_heads, head_dim,
    head_dim], both float32."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class LayerView:
    """One layer of one sequence, read from the pool as float32; n is the longest lane. All tensors are on one
    device: the pool's for a policy that scores, the host for one that merges.

    keys, values: [kv_heads, n, head_dim], keys rotated to their positions.
    log_mass: [kv_heads, n]. counts: [kv_heads, n] int64, tokens that each entry stands for, 0 past a
        lane's end. positions: [kv_heads, n] int64, -1 past a lane's end.
    valid: [kv_heads, n] bool, false past a lane's end.
    queries: [k, W, head_dim] rotated, of the query heads `query_heads` [k] int64 (ascending), None if
        none were recorded; query_positions: [W] int64.
    statistics: of all query heads, None if none were recorded.
    residual_norms: [W] float32, None if not recorded.
    future_queries: [query_heads, F, head_dim] of all query heads, rotated to positions from num_tokens on;
        None if not recorded.
    surprisal: [num_tokens] float32 by position, NaN where not known; None if not recorded.
    output_weight: [hidden, query_heads * head_dim], the output projection; empty if not asked for.
    output_gram: [query_heads, head_dim, head_dim] float32, W^T W of each query head's part W of it, the same
        tensor every time; None if not asked for.
    slots: kernels for what trees are measured by; None: torch does it.
    refit: whether what stays will be refitted, so that what the queries see is worth keeping.
    num_tokens: logical length of the sequence; group: query heads per KV head.
    kv_dtype: what new entries will be rounded to. basis: of codes that entries hold already, None if none do.
    """

    layer: int
    keys: Tensor
    values: Tensor
    log_mass: Tensor
    counts: Tensor
    positions: Tensor
    valid: Tensor
    num_tokens: int
    group: int
    output_weight: Tensor
    queries: Tensor | None = None
    query_heads: Tensor | None = None
    query_positions: Tensor | None = None
    residual_norms: Tensor | None = None
    future_queries: Tensor | None = None
    statistics: QueryStatistics | None = None
    surprisal: Tensor | None = None
    output_gram: Tensor | None = None
    slots: SlotKernels | None = None
    refit: bool = False
    kv_dtype: torch.dtype = torch.float32
    basis: Basis | None = None

    def on(self, device: torch.device) -> LayerView:
        """The view with all tensors on a device."""
        if all(t.device == device for t in (self.keys, self.positions)):
            return self
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: t.to(device) for name, t in held.items() if isinstance(t, Tensor)}
        if self.statistics is not None:
            mean, covariance = self.statistics.mean, self.statistics.covariance
            moved["statistics"] = QueryStatistics(mean.to(device), covariance.to(device))
        return replace(self, **moved)


def output_gram(weight: Tensor, head_dim: int) -> Tensor:
    """Grams [query_heads, head_dim, head_dim] of an output projection [hidden, query_heads * head_dim]."""
    parts = weight.unflatten(1, (-1, head_dim)).transpose(0, 1)
    return parts.transpose(1, 2) @ parts


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
        """How much each entry matters: [kv_heads, n] float32, higher stays, on the device of the view.
        Numbers past a lane's end are ignored."""
        ...

    def allocate(self, question: Allocation) -> Tensor:
        """Entries that each lane keeps: [layers, kv_heads] int64.

        Sums to min(total, all entries); no lane gets fewer than its protected entries or more than
        it has. What a short lane cannot use goes to others.
        """
        ...


@dataclass(frozen=True)
class Rows:
    """The entries that take the place of one layer's; m is the most of any lane.

    keys, values: [kv_heads, m, head_dim] float32, keys rotated to their positions. log_mass: [kv_heads, m]
    float32. positions: [kv_heads, m] int64, ascending, -1 past a lane's end. counts: [kv_heads, m] int64,
    tokens that each stands for. fixed: [kv_heads, m] bool, entries that were protected.
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor
    positions: Tensor
    counts: Tensor
    fixed: Tensor


class MergingPolicy(Protocol):
    """A way to put fewer entries in the place of those there are. The framework calls `measure` layer by
    layer, `assign` once, and `merge` layer by layer again."""

    name: str
    evidence: Evidence

    def measure(self, view: LayerView, protected: Tensor) -> Any:
        """What `assign` needs to know of a layer, in little memory. protected: [kv_heads, n] bool, entries
        that stay as they are. It may have a `seen`, a `references.Seen` or None, which spares a refit that
        looks with the same queries."""
        ...

    def assign(self, measured: list[Any], total: int) -> list[Tensor]:
        """Which new entry each old one goes into: per layer [kv_heads, n] int64, ascending places in the
        new lane from 0 without gaps, -1 where an entry is dropped or past a lane's end.

        Protected entries have a place of their own. No lane that had entries is left without. The places
        of all lanes sum to min(total, all entries). May be called again with another total.
        """
        ...

    def merge(self, view: LayerView, measured: Any, assignment: Tensor, protected: Tensor) -> Rows:
        """The new entries of a layer. Where one old entry alone goes into a new one it is that entry."""
        ...


AnyPolicy = Policy | MergingPolicy
