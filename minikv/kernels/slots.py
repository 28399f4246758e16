"""Sums over the nodes of slots, which a policy that makes trees can have computed by compiled kernels."""

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
    roots: [kv_heads, group, head_dim, head_dim].
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


class SlotKernels(Protocol):
    """One way to compute what `policies.trees.measure` needs of all slots of a layer."""

    def sums_of_slots(self, given: SlotInput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Squared errors without each node [kv_heads, slots, nodes]; weights of values [kv_heads, slots, 64];
        products of errors with prototypes and their squares, over own rows and over all: [kv_heads, 2,
        slots, inner nodes] each."""
        ...

    def alone(self) -> SlotKernels:
        """The same by the calling thread, beside others that do so."""
        ...
