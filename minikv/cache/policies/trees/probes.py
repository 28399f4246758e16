"""The rows that damage is measured on: observed queries, queries to come, and where they look next."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView
from minikv.cache.references import UNSEEN, Seen, reference_queries
from minikv.kernels.slots import Looked, LookInput

_LEAST = 1e-12
_USUAL = 4.0


@dataclass(frozen=True)
class Rows:
    """Observed rows of one layer: `own` of queries, then those that look ahead of the first of these.

    attention: [kv_heads, group, q, n] float32, mass counted, 0 where nothing is seen; to protected entries it
    may be 0 as well. seen: of what is not protected, if a refit is to come.
    outputs: [kv_heads, group, q, head_dim], what is put out where a row looks.
    weights: [q] float32, of a row's squared error.
    queries: [kv_heads, group * c, head_dim], scaled; normalisers: [kv_heads, group * c, 1]: of what own rows
    are made of, which `together` knows.
    """

    own: int
    attention: Tensor
    outputs: Tensor
    weights: Tensor
    queries: Tensor
    normalisers: Tensor
    kinds: tuple[int, ...]
    seen: Seen | None = None

    @property
    def pools(self) -> tuple[int, ...]:
        """How many of a head's queries each own row is made of."""
        rows = self.own // len(self.kinds)
        return tuple(count // rows for count in self.kinds for _ in range(rows))

    def together(self, squares: Tensor) -> Tensor:
        """Roots of mean squares: of queries [kv_heads, group, c, ..], for own rows [kv_heads, group, own,
        ..]."""
        rows = self.own // len(self.kinds)
        parts = (part.unflatten(2, (rows, -1)) for part in squares.split(self.kinds, dim=2))
        return torch.cat([part.mean(dim=3) for part in parts], dim=2).sqrt_()


def observe(
    view: LayerView, protected: Tensor, rows: int, shifts: int, shift_weight: float, future_weight: float
) -> Rows:
    """Attention of the window's queries, and of those to come if they are given and weigh anything;
    neighbours are taken together to `rows` of each kind.

    Copying takes the tokens after the one that is attended to: a further row for each of the window's
    looks 1 .. `shifts` entries further right, as much at each, with a weight of `shift_weight`. Nothing
    is copied from after protected entries, of which sinks draw attention whatever they are; and only what
    the window asks for more than queries do that come in general points to something to copy.
    """
    queries, positions, weights, kinds = _queries(view, rows, future_weight)
    queries = queries / math.sqrt(queries.shape[3])
    wanted = view.valid & ~protected if view.refit else None
    given = _look_input(view, queries, positions, kinds, rows, wanted)
    looked = _look(given, kinds) if view.slots is None else view.slots.look(given)
    attention, outputs = looked.attention, looked.outputs
    weights = weights / _scale(view, outputs, weights)
    ahead = _ahead(_asked_for(attention, rows).masked_fill_(protected[:, None, None], 0.0), shifts)
    return Rows(
        len(weights),
        torch.cat((attention, ahead), dim=2),
        torch.cat((outputs, outputs[:, :, :rows]), dim=2),
        torch.cat((weights, shift_weight * weights[:rows])),
        queries.flatten(1, 2),
        looked.normalisers.flatten(1, 2),
        kinds,
        _seen(view, wanted, looked, kinds),
    )


def _look_input(
    view: LayerView,
    queries: Tensor,
    positions: Tensor,
    kinds: tuple[int, ...],
    rows: int,
    wanted: Tensor | None,
) -> LookInput:
    """Of queries [kv_heads, group, c, head_dim] at positions [c], so many of each kind, and wanted entries
    [kv_heads, n]."""
    # Queries to come see everything, and those of the window all but the last entries.
    late = (view.positions > positions.min()).any(dim=0).nonzero()
    return LookInput(
        view.keys,
        view.values,
        view.log_mass.masked_fill(~view.valid, -torch.inf),
        view.positions,
        wanted,
        queries,
        positions,
        kinds[0],
        int(late[0]) if len(late) else view.keys.shape[1],
        tuple(count // rows for count in kinds for _ in range(rows)),
    )


def _look(given: LookInput, kinds: tuple[int, ...]) -> Looked:
    """What `SlotKernels.look` gives, one lane at a time, in the same memory, which is faster than all at
    once."""
    kv_heads, group, count, width = given.queries.shape
    length, rows, late = given.keys.shape[1], len(given.pools), given.late
    attention, mean = torch.empty(2, kv_heads, group, rows, length).unbind()
    normalisers = torch.empty(kv_heads, group, count, 1)
    biased = given.bias.ne(0).any(dim=1).tolist()
    hidden = given.positions[:, None, late:] > given.at[: given.hiding, None]
    chance = torch.empty(group, count, length)
    sums = means = None
    if given.wanted is not None:
        sums, means = torch.empty(kv_heads, group, count), torch.empty(kv_heads, group, count, width)
    for lane in range(kv_heads):
        torch.mm(given.queries[lane].flatten(0, 1), given.keys[lane].t(), out=chance.flatten(0, 1))
        if biased[lane]:
            chance += given.bias[lane]
        chance[:, : given.hiding, late:].masked_fill_(hidden[lane], -torch.inf)
        normalisers[lane] = _softmax_(chance)
        _pool(chance, kinds, mean[lane])
        if given.wanted is not None and sums is not None and means is not None:
            chance.index_fill_(2, (~given.wanted[lane]).nonzero()[:, 0], 0.0)
            torch.sum(chance, dim=2, out=sums[lane])
            torch.mm(chance.flatten(0, 1), given.values[lane], out=means[lane].flatten(0, 1))
        _pool(chance.square_(), kinds, attention[lane])
    outputs = (mean.flatten(1, 2) @ given.values).view(kv_heads, group, -1, width)
    return Looked(attention.sqrt_(), outputs, normalisers, sums, means)


def _seen(view: LayerView, wanted: Tensor | None, looked: Looked, kinds: tuple[int, ...]) -> Seen | None:
    """What was summed over the wanted entries, lane by lane; None if nothing was, or if a refit takes other
    queries than these."""
    references = reference_queries(view) if wanted is not None else None
    sums, means, normalisers = looked.sums, looked.means, looked.normalisers[..., 0]
    if wanted is None or references is None or sums is None or means is None:
        return None
    if len(references.at) != view.group * normalisers.shape[2]:
        return None

    def by_lane(each: Tensor) -> Tensor:
        return torch.cat([part.flatten(1, 2) for part in each.split(kinds, dim=2)], dim=1)

    nothing = sums < torch.finfo(sums.dtype).tiny
    log_sums = (normalisers + sums.log()).masked_fill_(nothing, UNSEEN)
    means = (means / sums[..., None]).masked_fill_(nothing[..., None], 0.0)
    return Seen(references.queries, references.at, wanted, by_lane(means), by_lane(log_sums))


def _softmax_(logits: Tensor) -> Tensor:
    """Turn logits [group, c, n] into attention; returns their log sums [group, c, 1]."""
    top = logits.amax(dim=2, keepdim=True)
    torch.softmax(logits, dim=2, out=logits)
    normalisers = top - logits.amax(dim=2, keepdim=True).log_()
    blind = top == -torch.inf
    if blind.any():  # A row that sees nothing has no attention, not NaN.
        logits.masked_fill_(blind, 0.0)
        normalisers.masked_fill_(blind, torch.inf)
    return normalisers


def _pool(each: Tensor, kinds: tuple[int, ...], out: Tensor) -> None:
    """Means [group, q, n] over neighbours [group, c, n], as many rows of every kind."""
    rows = out.shape[1] // len(kinds)
    for part, pooled in zip(each.split(kinds, dim=1), out.split(rows, dim=1), strict=True):
        torch.mean(part.unflatten(1, (rows, -1)), dim=2, out=pooled)


def _queries(
    view: LayerView, rows: int, future_weight: float
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Queries [kv_heads, group, c, head_dim], their positions [c], weights of rows, which sum to 1, and how
    many of the queries are of each kind."""
    assert view.queries is not None and view.query_positions is not None
    take = _spread(view.queries.shape[1], rows)
    queries, positions = view.queries[:, take], view.query_positions[take]
    weights, kinds = torch.full((rows,), 1 / rows), (len(take),)
    if view.future_queries is not None and future_weight:
        take = _spread(view.future_queries.shape[1], rows)
        queries = torch.cat((queries, view.future_queries[:, take]), dim=1)
        positions = torch.cat((positions, torch.full((len(take),), view.num_tokens)))
        weights = torch.cat((weights * (1 - future_weight), weights * future_weight))
        kinds = (*kinds, len(take))
    kv_heads = view.keys.shape[0]
    assert len(queries) == kv_heads * view.group, "trees look at every query head"
    return queries.reshape(kv_heads, view.group, *queries.shape[1:]), positions, weights, kinds


def _spread(count: int, rows: int) -> Tensor:
    """`count` queries, some of them twice where that is no multiple of `rows`: int64."""
    whole = -(-count // rows) * rows
    return torch.arange(whole) * count // whole


def _scale(view: LayerView, outputs: Tensor, weights: Tensor) -> Tensor:
    """What squared errors are relative to: the residual stream that they go into, else the layer's mean
    output, of heads that know nothing of each other."""
    if view.residual_norms is not None:
        return view.residual_norms.square().mean().clamp(min=_LEAST)
    assert view.output_gram is not None
    outputs = outputs.flatten(0, 1)
    return (((outputs @ view.output_gram) * outputs).sum(dim=(0, 2)) @ weights).clamp(min=_LEAST)


def _asked_for(attention: Tensor, rows: int) -> Tensor:
    """Squared attention of the first `rows`, the window's, above `_USUAL` times the mean of the others', the
    queries to come, if there are any."""
    square = attention[:, :, :rows].square()
    if attention.shape[2] == rows:
        return square
    usual = attention[:, :, rows:].square().mean(dim=2, keepdim=True)
    return square.sub_(usual, alpha=_USUAL).clamp_(min=0)


def _ahead(square: Tensor, shifts: int) -> Tensor:
    """What the `shifts` entries before each get, as a root of the sum of squares."""
    out = torch.zeros_like(square)
    for by in range(1, shifts + 1):
        out[..., by:] += square[..., :-by]
    return out.sqrt_()
