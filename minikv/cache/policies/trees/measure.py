"""The damage of every node of a layer, and the best mass of its prototype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView
from minikv.cache.policies.trees.gains import Leaves, forms_of, over_rows
from minikv.cache.policies.trees.keys import rotated, table, unrotated
from minikv.cache.policies.trees.probes import Rows
from minikv.cache.policies.trees.slots import SLOT, TREE, in_slots, inner_sums, tree_sums, whole
from minikv.kernels.slots import SlotInput

if TYPE_CHECKING:
    from minikv.models.rope import Rope

_BLOCK = 150  # slots of query heads
_LEAST = 1e-30
_MOST_LOGIT = 40.0
_PLAIN = 0.1
_LOWEST, _HIGHEST = 1e-4, 20.0


@dataclass(frozen=True)
class Damage:
    """Of the nodes of one layer, n = NODES.

    drop: squared relative error without a node, 0 where it holds nothing. keep: with one entry in
    its place, inf where that may not be. log_mass: of that entry. [kv_heads, slots, n] float32 each.
    value_weights: [kv_heads, slots * SLOT] float32, the weights of values in their means.
    """

    drop: Tensor
    keep: Tensor
    log_mass: Tensor
    value_weights: Tensor


def damage_of(view: LayerView, rows: Rows, protected: Tensor, rope: Rope, roots: Tensor) -> Damage:
    """protected: [kv_heads, n] bool, entries that belong to no node; roots as of `projection_roots`."""
    roots = roots.unflatten(0, (-1, view.group))
    free = view.valid & ~protected
    if view.slots is None:
        drop, weights, products, squares = _sums(view, rows, free, rope, roots)
    else:
        drop, weights, products, squares = view.slots.sums_of_slots(_input(view, rows, free, rope, roots))
    free = in_slots(free)
    log_mass = in_slots(view.log_mass)
    masses = inner_sums(log_mass.exp() * free).clamp(min=_LEAST)
    # The best mass over the rows that have queries, within bounds around the mass there is.
    along, across = products[:, 0], squares[:, 0]
    best = torch.where(across > _LEAST, along / across.clamp(min=_LEAST), masses)
    mass = torch.minimum(torch.maximum(best, _LOWEST * masses), _HIGHEST * masses)
    kept = drop[..., SLOT:] - 2 * mass * products[:, 1] + mass.square() * squares[:, 1]
    keep = torch.cat((torch.zeros_like(log_mass), kept.clamp_(min=0)), dim=2)
    numbers = tree_sums(free.float())
    # Never quite 0, so that a place that holds something can be told from one that does not.
    drop.clamp_(min=_LEAST).masked_fill_(numbers == 0, 0.0)
    # An entry that a node holds alone stays as it is.
    keep.masked_fill_(numbers == 1, 0.0)
    keep.masked_fill_(~whole(free, in_slots(protected & view.valid)), torch.inf)
    return Damage(drop, keep, torch.cat((log_mass, mass.log()), dim=2), weights.flatten(1))


def _input(view: LayerView, rows: Rows, free: Tensor, rope: Rope, roots: Tensor) -> SlotInput:
    """What compiled kernels take in the place of `_sums`."""
    cos, sin = table(rope, view.num_tokens)
    return SlotInput(
        view.keys,
        view.values,
        view.counts.float() * free,
        view.log_mass,
        view.positions,
        cos,
        sin,
        rope.attention_factor,
        rows.attention,
        rows.outputs,
        rows.weights,
        rows.queries,
        rows.normalisers,
        rows.pools,
        roots,
    )


def _sums(
    view: LayerView, rows: Rows, free: Tensor, rope: Rope, roots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `SlotKernels.sums_of_slots` gives."""
    length = view.keys.shape[1]
    step = SLOT * _step(-(-length // SLOT), len(roots) * view.group)
    parts = (slice(start, min(start + step, length)) for start in range(0, length, step))
    # Some slots at a time, so that what is made in between stays in the processor's cache.
    blocks = [
        _sums_of_slots(_part(view, part), _rows_part(rows, part), free[:, part], rope, roots)
        for part in parts
    ]
    drop, weights, products, squares = (torch.cat(each, dim=-2) for each in zip(*blocks, strict=True))
    return drop, weights, products, squares


def _step(slots: int, heads: int) -> int:
    """How many slots to take at a time, so that blocks are about as large as each other."""
    blocks = max(1, round(slots * heads / _BLOCK))
    return -(-slots // blocks)


def _part(view: LayerView, part: slice) -> LayerView:
    """Some entries of a view."""
    names = ("keys", "values", "log_mass", "counts", "positions", "valid")
    return replace(view, **{name: getattr(view, name)[:, part] for name in names})


def _rows_part(rows: Rows, part: slice) -> Rows:
    return replace(rows, attention=rows.attention[..., part])


def _sums_of_slots(
    view: LayerView, rows: Rows, free: Tensor, rope: Rope, roots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of some slots: squared errors without each node [kv_heads, slots, NODES]; weights of values [kv_heads,
    slots, SLOT]; and what errors with a prototype are made of, its product with what it stands for, and
    its square, over own rows and over all: [kv_heads, 2, slots, SLOT - 1] each."""
    free = in_slots(free)
    attention = in_slots(rows.attention).mul_(free[:, None, None])
    counts = in_slots(view.counts.float()) * free
    weights = _value_weights(attention, counts, rows.weights)
    values = _rows_in_slots(view.values) * free[..., None]
    forms = forms_of(Leaves(values, attention, weights), rows.outputs, roots, rows.weights)
    chance = _chances(view, rows, attention, counts, rope)
    inverse = 1 / inner_sums(weights).clamp(min=_PLAIN)
    product, square = forms.prototypes(inverse[:, None, None])
    product.mul_(chance)
    square.mul_(chance.square_())
    own = torch.arange(len(rows.weights)) < rows.own
    both = torch.stack((rows.weights * own, rows.weights))
    return forms.drop, weights, over_rows(product, both), over_rows(square, both)


def _rows_in_slots(rows: Tensor) -> Tensor:
    """[kv_heads, n, head_dim] to [kv_heads, slots, SLOT, head_dim]."""
    missing = -rows.shape[1] % SLOT
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)).unflatten(1, (-1, SLOT))


def _value_weights(attention: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Attention to each entry in units of its slot's mean for a token, and a share of that mean for every
    token: [kv_heads, slots, SLOT]."""
    seen = over_rows(attention, rows)
    mean = seen.sum(dim=2, keepdim=True) / counts.sum(dim=2, keepdim=True).clamp(min=1)
    return seen / mean.clamp(min=_LEAST) + _PLAIN * counts


def _chances(view: LayerView, rows: Rows, attention: Tensor, counts: Tensor, rope: Rope) -> Tensor:
    """Attention that one token of each inner node's prototype gets: [kv_heads, group, q, slots, SLOT - 1].

    From the queries where a row has any; rows that look ahead take the mean logit of the node's entries.
    """
    kv_heads, group, _, slots, _ = attention.shape
    inverse = 1 / inner_sums(counts).clamp(min=1)
    keys = _mean_keys(view, counts, inverse, rope)
    # The squares of chances are asked for. A mean key may be nearer to a query than all that it is made of.
    squares = ((2 * rows.queries) @ keys.transpose(1, 2)).sub_(2 * rows.normalisers)
    squares = squares.clamp_(max=_MOST_LOGIT).exp_()
    chance = rows.together(squares.view(kv_heads, group, -1, slots, SLOT - 1))
    ahead = attention[:, :, rows.own :].clamp(min=_LEAST).log_().sub_(in_slots(view.log_mass)[:, None, None])
    ahead = inner_sums(ahead.mul_(counts[:, None, None])) * inverse[:, None, None]
    return torch.cat((chance, ahead.exp_()), dim=2)


def _mean_keys(view: LayerView, counts: Tensor, inverse: Tensor, rope: Rope) -> Tensor:
    """Keys of the prototypes of all inner nodes: [kv_heads, slots * (SLOT - 1), head_dim]."""
    plain = _rows_in_slots(unrotated(rope, view.keys, view.positions, view.num_tokens))
    shares = (TREE.t() * counts[:, :, None]).mul_(inverse[..., None])
    means = shares @ plain
    positions = inner_sums(counts * in_slots(view.positions.float()))
    positions = (positions * inverse).round_().long()
    return rotated(rope, means.flatten(1, 2), positions.flatten(1), view.num_tokens)
