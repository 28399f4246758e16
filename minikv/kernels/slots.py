"""What a policy that makes trees can have computed by compiled kernels: what queries see of a layer, and sums
over the nodes of slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class SlotInput:
    """One layer of one sequence, and the rows that damage is measured on; float32 if nothing else is said.

    keys, values: [kv_heads, n, head_dim]. counts: [kv_heads, n], 0 for what belongs to no node.
    log_mass: [kv_heads, n]. positions: [kv_heads, n] int64.
    cos, sin: [positions, head_dim], of every position, with `attention_factor` folded in.
    attention: [kv_heads, group, q, n]. outputs: [kv_heads, group, q, head_dim]. weights: [q].
    queries: [kv_heads, group * c, head_dim], scaled; normalisers: [kv_heads, group * c, 1]; pools: how many
        of a head's c queries each of the first rows, the own, is made of.
    roots: [kv_heads, group, head_dim, head_dim], 0 above the diagonal.
    """

    keys: Tensor
    values: Tensor
    counts: Tensor
    log_mass: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    attention_factor: float
    attention: Tensor
    outputs: Tensor
    weights: Tensor
    queries: Tensor
    normalisers: Tensor
    pools: tuple[int, ...]
    roots: Tensor


@dataclass(frozen=True)
class LookInput:
    """One layer of one sequence, and queries that look at it; float32 if nothing else is said.

    keys, values: [kv_heads, n, head_dim]. bias: [kv_heads, n], log masses, -inf where there is no entry.
    positions: [kv_heads, n] int64. wanted: [kv_heads, n] bool, existing entries that are to be summed over;
        None: no sums are wanted.
    queries: [kv_heads, group, c, head_dim], scaled; at: [c] int64, their positions. The first `hiding` see
        entries up to that, the others all; entries before `late` are seen by all.
    pools: how many neighbouring queries of a head are taken together, for each row.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    positions: Tensor
    wanted: Tensor | None
    queries: Tensor
    at: Tensor
    hiding: int
    late: int
    pools: tuple[int, ...]


@dataclass(frozen=True)
class Looked:
    """What queries see, none of it for a query that sees nothing.

    attention: [kv_heads, group, rows, n], root of the mean square of a row's queries; to entries that are not
        wanted it may be 0. outputs: [kv_heads, group, rows, head_dim], the mean of what they put out.
    normalisers: [kv_heads, group, c, 1] of every query, inf if it sees nothing.
    sums: [kv_heads, group, c], attention to all that is wanted; means: [kv_heads, group, c, head_dim], sum of
        that times values. None if nothing is wanted.
    """

    attention: Tensor
    outputs: Tensor
    normalisers: Tensor
    sums: Tensor | None
    means: Tensor | None


class SlotKernels(Protocol):
    """One way to compute what `policies.trees` needs of a layer."""

    def look(self, given: LookInput) -> Looked:
        """What queries see."""
        ...

    def sums_of_slots(self, given: SlotInput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Squared errors without each node [kv_heads, slots, nodes]; weights of values [kv_heads, slots, 64];
        products of errors with prototypes and their squares, over own rows and over all: [kv_heads, 2,
        slots, inner nodes] each."""
        ...

    def alone(self) -> SlotKernels:
        """The same by the calling thread, beside others that do so."""
        ...
