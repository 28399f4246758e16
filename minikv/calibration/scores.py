"""What attention says of heads and layers: pure functions of one layer's queries, keys and values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView

_TINY = 1e-12


def attention_rows(view: LayerView, keep: Tensor | None = None) -> Tensor:
    """Attention weights of every recorded query: [k, W, n] float32, rows as `view.query_heads`.

    Each query sees the entries up to its own position and, of these, only those in `keep`
    [kv_heads, n] bool if that is given. The weights of a query sum to 1.
    """
    assert view.queries is not None and view.query_heads is not None and view.query_positions is not None
    lanes = view.query_heads // view.group
    logits = view.queries @ view.keys[lanes].transpose(1, 2) / math.sqrt(view.queries.shape[-1])
    held = view.valid if keep is None else view.valid & keep
    seen = held[lanes][:, None] & (view.positions[lanes][:, None] <= view.query_positions[:, None])
    logits = logits + view.log_mass[lanes][:, None]
    return logits.masked_fill(~seen, -torch.inf).softmax(dim=-1)


def retrieval_scores(weights: Tensor, positions: Tensor, span: tuple[int, int]) -> Tensor:
    """How much of its attention each head gives to the answer's span, above an even spread: [heads].

    weights: [heads, rows, n] over entries at positions 0..n-1; positions: [rows], of the rows that
    predict the answer's tokens. For each row, with m the attention on the span and u = span length /
    entries seen, what a head that attends to everything alike gives it: (m - u) / (1 - u). The mean
    over rows, so that neither a long span nor a long answer counts more. 1: nothing but the span; 0: as
    if it were not there.
    """
    start, stop = span
    mass = weights[:, :, start:stop].sum(dim=-1)
    even = (stop - start) / (positions + 1).float()
    return ((mass - even) / (1 - even)).mean(dim=-1)


def copy_scores(weights: Tensor, ids: Tensor, span: tuple[int, int], answer: Tensor) -> Tensor:
    """Share of the answer's tokens at whose prediction a head attends most to that very token in the span:
    [heads]. This is how retrieval heads were first told (arXiv 2404.15574), here for comparison.

    weights: [heads, rows, n]; ids: [n], tokens of the entries; answer: [rows], tokens predicted.
    """
    top = weights.argmax(dim=-1)
    start, stop = span
    return ((top >= start) & (top < stop) & (ids[top] == answer)).float().mean(dim=-1)


def eviction_error(view: LayerView, keep: Tensor) -> float:
    """|compressed - full| / |full| of a layer's attention output after its output projection, mean over
    the recorded queries, which must be of all query heads. keep: [kv_heads, n] bool."""
    assert view.query_heads is not None
    values = view.values[view.query_heads // view.group]
    full, compressed = (
        ((attention_rows(view, kept) @ values).transpose(0, 1).flatten(1) @ view.output_weight.T)
        for kept in (None, keep)
    )
    error = (compressed - full).norm(dim=1) / full.norm(dim=1).clamp(min=_TINY)
    return float(error.mean())


def without_negatives(scores: Tensor) -> Tensor:
    """The same order from 0 up. Cutting negative scores off would make ties of a layer's weak heads."""
    return scores - scores.min().clamp(max=0)


def stability(trials: Tensor, top: int, resamples: int, seed: int) -> Tensor:
    """How surely a head is among its layer's best: the share of bootstrap resamples of the trials in which
    it is. [layers, heads].

    trials: [trials, layers, heads], a score each. Of equal scores the lower head counts as better.
    """
    count, layers, heads = trials.shape
    generator = torch.Generator().manual_seed(seed)
    hits = torch.zeros(layers, heads)
    for _ in range(resamples):
        drawn = torch.randint(count, (count,), generator=generator)
        means = trials[drawn].mean(dim=0)
        hits.scatter_add_(1, best_heads(means, top), torch.ones(layers, min(top, heads)))
    return hits / resamples


def best_heads(scores: Tensor, top: int) -> Tensor:
    """The `top` heads of each layer of scores [layers, heads], best first, of equal ones the lower:
    [layers, top]."""
    return scores.argsort(dim=1, descending=True, stable=True)[:, :top]


def overlap(retrieval: Tensor, copy: Tensor, top: int) -> int:
    """How many heads are among the `top` of their layer by both scores [layers, heads]. A head that never
    copies is no copy head, though its layer may have none better."""
    both = torch.zeros_like(retrieval, dtype=torch.int64)
    for scores in (retrieval, copy):
        both.scatter_add_(1, best_heads(scores, top), torch.ones_like(both))
    return int(((both == 2) & (copy > 0)).sum())
