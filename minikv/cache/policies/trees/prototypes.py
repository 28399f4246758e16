"""Merged entries of a layer: what the entries of every chosen node become."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView, Rows
from minikv.cache.policies.trees.keys import rotated, unrotated
from minikv.cache.policies.trees.measure import Damage
from minikv.cache.policies.trees.slots import LEVELS, NODES, SLOT, start_of

if TYPE_CHECKING:
    from minikv.models.rope import Rope


def places_of(node: Tensor, protected: Tensor, valid: Tensor) -> Tensor:
    """Places in the new lanes: [kv_heads, n] int64, -1 for what is dropped.

    node: [kv_heads, whole slots] int64, the number among its slot's nodes that an entry goes into, -1
    for none. protected, valid: [kv_heads, n] bool.
    """
    place = torch.arange(valid.shape[1])
    node = torch.where(node[:, : len(place)] < 0, -1, node[:, : len(place)] + place // SLOT * NODES)
    # A number of its own for every new entry, which ascends with the first entry of a node.
    own = torch.where(protected & valid, place, -1)
    label = torch.where(valid, torch.where(own >= 0, -2 - own, node), -1)
    stays = label != -1
    # The label before an entry, of those that stay: a new label begins a new place.
    last = torch.where(stays, place, -1).cummax(dim=1).values
    before = torch.cat((torch.full_like(last[:, :1], -1), last[:, :-1]), dim=1)
    fresh = stays & ((before < 0) | (label.gather(1, before.clamp(min=0)) != label))
    return torch.where(stays, fresh.long().cumsum(dim=1) - 1, -1)


def identity(valid: Tensor) -> Tensor:
    """Every entry stays: places [kv_heads, n]."""
    return torch.where(valid, valid.long().cumsum(dim=1) - 1, -1)


def merged(view: LayerView, assignment: Tensor, damage: Damage, protected: Tensor, rope: Rope) -> Rows:
    """The new entries of a layer, whose places are those of `places_of`."""
    kv_heads, longest, width = view.keys.shape
    most = int(assignment.max()) + 1
    stays = assignment >= 0
    lane = torch.arange(kv_heads)[:, None].expand_as(assignment)[stays]
    to = lane * most + assignment[stays]
    size = kv_heads * most

    def added(rows: Tensor) -> Tensor:
        return torch.zeros(size, *rows.shape[1:], dtype=rows.dtype).index_add_(0, to, rows)

    counts = view.counts[stays]
    entries = added(torch.ones_like(counts))
    total = added(counts).clamp(min=1)
    positions = (added(counts * view.positions[stays]).double() / total).round().long()
    plain = unrotated(rope, view.keys[stays][None], view.positions[stays][None], view.num_tokens)[0]
    keys = added(counts[:, None] * plain) / total[:, None]
    keys = rotated(rope, keys[None], positions[None], view.num_tokens)[0]
    weight = damage.value_weights[:, :longest][stays]
    values = added((weight / added(weight).clamp(min=1e-30)[to])[:, None] * view.values[stays])
    # Where one entry alone goes into a new one it is that entry, to the bit.
    alone = torch.full((size,), -1).scatter_(0, to, stays.flatten().nonzero()[:, 0])
    single = entries == 1
    source = alone[single]
    keys[single] = view.keys.reshape(-1, width)[source]
    values[single] = view.values.reshape(-1, width)[source]
    masses = _masses(assignment, size, most, damage.log_mass)
    masses[single] = view.log_mass.flatten()[source]
    positions[entries == 0] = -1
    fixed = torch.zeros(size, dtype=torch.bool)
    fixed[to] = protected[stays]
    shape = (kv_heads, most)
    return Rows(
        keys.view(*shape, width),
        values.view(*shape, width),
        masses.view(shape),
        positions.view(shape),
        added(counts).view(shape),
        fixed.view(shape),
    )


def _masses(assignment: Tensor, size: int, most: int, log_mass: Tensor) -> Tensor:
    """Log mass of each new entry: that of the least node which holds all its entries."""
    longest = assignment.shape[1]
    stays = assignment >= 0
    lane, place = stays.nonzero().unbind(1)
    to = lane * most + assignment[stays]
    first = torch.full((size,), longest).scatter_reduce_(0, to, place, "amin")
    last = torch.full((size,), -1).scatter_reduce_(0, to, place, "amax")
    apart = first ^ last
    out = torch.zeros(size)
    head = torch.arange(size) // most
    for level in range(1, LEVELS + 1):
        here = (last > first) & (apart >= (1 << (level - 1))) & (apart < (1 << level))
        inside = start_of(level) + (first[here] % SLOT >> level)
        out[here] = log_mass[head[here], first[here] // SLOT, inside]
    return out
