"""What a layer's nodes do to its output: the damage of leaving each out, and of making it one entry.

The error that a node v with the prototype (k~, v~, mass m) brings into the output o of a query is, with
p the query's attention and up to a normaliser that all nodes share,

    e(v) = m z (v~ - o) - c(v),      c(v) = sum over v's entries of p_t (v_t - o)

where z = exp(q k~ / sqrt(d)) over the query's normaliser. Its square, seen through the output projection,
is a parabola in m, so the best mass has a closed form. Vectors come in as inner products only, of the
entries of a slot with each other, and no vector is ever made for a node. What no prototype takes part in
is summed over rows and heads first, which leaves one number for a pair of entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache.policies.trees.slots import PAIRS, SLOT, TREE, inner_sums

_LEAST = 1e-30


@dataclass(frozen=True)
class Leaves:
    """Entries of a layer in slots, 0 where a place is empty.

    values: [kv_heads, slots, SLOT, head_dim]; attention: [kv_heads, group, q, slots, SLOT]; value_weights:
    [kv_heads, slots, SLOT].
    """

    values: Tensor
    attention: Tensor
    value_weights: Tensor


@dataclass(frozen=True)
class Forms:
    """What errors are made of.

    drop: [kv_heads, slots, NODES], sum of squared errors without a node. Of inner nodes, [kv_heads, group, q,
    slots, SLOT - 1] each, with w = sum of value weights times values, not yet divided by the sum of weights:
    mass: P = sum of p; excess: P |o|^2 - (sum p v) o; value_out: w o; value_mass: w (sum p v).
    value_square: [kv_heads, group, 1, slots, SLOT - 1], |w|^2. out_square: [kv_heads, group, q, 1, 1], |o|^2.
    """

    drop: Tensor
    mass: Tensor
    excess: Tensor
    value_out: Tensor
    value_mass: Tensor
    value_square: Tensor
    out_square: Tensor

    def prototypes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """a c and |a|^2 with a = v~ - o, of inner nodes: [kv_heads, group, q, slots, n] each. weight:
        [kv_heads, 1, 1, slots, n], one over the sum of value weights."""
        product = (self.mass * self.value_out).sub_(self.value_mass)
        product = torch.addcmul(self.excess, product, weight, value=-1)
        square = torch.addcmul(self.out_square, self.value_out, weight, value=-2)
        return product, square.addcmul_(self.value_square, weight.square()).clamp_(min=0)


def projection_roots(grams: Tensor) -> Tensor:
    """L with L L^T = W_O^T W_O of every query head [query_heads, head_dim, head_dim], the same shape."""
    gram = grams.double()
    size = gram.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=_LEAST)
    gram += (1e-6 * size)[:, None, None] * torch.eye(gram.shape[1], dtype=gram.dtype)
    return torch.linalg.cholesky(gram).float()


def forms_of(leaves: Leaves, outputs: Tensor, roots: Tensor, rows: Tensor) -> Forms:
    """outputs: [kv_heads, group, q, head_dim], of each row; roots: those of `projection_roots`, [kv_heads,
    group, head_dim, head_dim]; rows: [q], what a row's squared error counts."""
    kv_heads, group, q, slots, _ = leaves.attention.shape
    # Errors are made of differences of values, so the origin is free: near the outputs little cancels.
    origin = outputs.mean(dim=(1, 2))[:, None]
    values = (leaves.values.flatten(1, 2) - origin)[:, None] @ roots
    out = (outputs - origin[:, None]) @ roots
    out_square = out.square().sum(dim=3)[..., None, None]
    along = (out @ values.transpose(2, 3)).view(kv_heads, group, q, slots, SLOT)
    weights = leaves.value_weights[:, None, None]
    sums = torch.empty(3, *along.shape)
    sums[0] = leaves.attention
    torch.mul(along, weights, out=sums[2])
    torch.mul(torch.sub(out_square, along, out=along), sums[0], out=sums[1])
    mass, excess, value_out = inner = inner_sums(sums)
    columns = torch.cat((leaves.attention, weights.expand(-1, group, -1, -1, -1)), dim=2)
    columns = columns.transpose(2, 3).contiguous()
    values = values.view(-1, SLOT, values.shape[3])
    gram = (values @ values.transpose(1, 2)).view(kv_heads, group, slots, SLOT, SLOT)
    drop = _squares(gram, columns[..., :q, :], rows)
    for part, here in ((sums, drop[..., :SLOT]), (inner, drop[..., SLOT:])):
        rest = torch.addcmul(2 * part[1], part[0], out_square, value=-1).mul_(part[0])
        here += over_rows(rest, rows)
    # Sums over the nodes that hold an entry, of its products with their entries.
    across = columns @ inner_sums(gram.mul_(weights.transpose(2, 3))).mul_(TREE)
    value_mass, value_square = across.transpose(2, 3).split((q, 1), dim=2)
    return Forms(drop.clamp_(min=0), mass, excess, value_out, value_mass, value_square, out_square)


def _squares(gram: Tensor, attention: Tensor, rows: Tensor) -> Tensor:
    """|sum p v|^2 of all nodes, summed over rows and the heads of a group: [kv_heads, slots, NODES]; gram:
    [kv_heads, group, slots, SLOT, SLOT] of values, attention: [kv_heads, group, slots, q, SLOT]."""
    pairs = (attention * rows[:, None]).transpose(3, 4) @ attention
    pairs = pairs.mul_(gram).sum(dim=1)
    leaves = pairs.diagonal(dim1=2, dim2=3)
    pairs = pairs[..., 0::2] + pairs[..., 1::2]
    pairs = pairs[..., 0::2, :] + pairs[..., 1::2, :]
    return torch.cat((leaves, pairs.flatten(2) @ PAIRS), dim=2)


def over_rows(errors: Tensor, weights: Tensor) -> Tensor:
    """Sum over rows and the heads of a group: [kv_heads, group, q, slots, n], and weights [q] or [k, q], to
    [kv_heads, slots, n] or [kv_heads, k, slots, n]."""
    group, slots = errors.shape[1], errors.shape[3]
    sums = torch.cat([weights] * group, dim=-1) @ errors.flatten(3).flatten(1, 2)
    return sums.unflatten(-1, (slots, -1))
