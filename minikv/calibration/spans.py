"""What a router is trained on: true attention masses of tokens, and one text's step towards them.

    text --full cache--> queries of its last tokens, keys --cut, coded--> masses of cells (the target),
    codes of their keys (what the router sees) --> a loss for each query head, and the recall of true mass

A query sees the tokens before it alone, and all spans end before the first of them: nothing is learned from
what comes later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.budget import Budget
from minikv.cache.evidence import Recorded
from minikv.cache.policies.base import LayerView
from minikv.cache.policies.sekv import Measured, SeKV, coded, first_token
from minikv.cache.protect import protect
from minikv.cache.spans.codes import cells_of, centres, digits_of, unpack
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import Zooming, choose
from minikv.cache.spans.share import area_of, lanes_part
from minikv.cache.spans.zoom import Cells
from minikv.calibration.measure import Continuation, feed_recorded
from minikv.calibration.scores import attention_rows
from minikv.config import CacheConfig
from minikv.probe import Probe


@dataclass(frozen=True)
class Past:
    """What the last tokens `ids` of a text come after, n tokens.

    keys, values: [layers, kv_heads, n, head_dim]. cell: [n] int64, the cell of each token, C for one that is
    in no span. mean: [layers, kv_heads, head_dim]; decoder: [layers, kv_heads, components, head_dim], what
    codes mean. All but cell float32.
    """

    ids: list[int]
    keys: Tensor
    values: Tensor
    cell: Tensor
    mean: Tensor
    decoder: Tensor


@dataclass(frozen=True)
class Lesson:
    """One text, all layers; C cells of tokens that share a code.

    parts: [layers, query_heads, Q, components], queries against the decoder of codes; constant: [layers,
    query_heads, Q], against the mean key. codes: [layers, kv_heads, C, components], in units of a level;
    sizes: [C] int64, tokens of each. masses: [layers, query_heads, Q, C], true attention; rest: [layers,
    query_heads, Q], the log-sum-exp of what is in no span. rows: that a KV head may zoom in; root: that of
    head_dim. past: what the Q queries come after.
    """

    parts: Tensor
    constant: Tensor
    codes: Tensor
    sizes: Tensor
    masses: Tensor
    rest: Tensor
    rows: int
    root: float
    past: Past


@torch.no_grad()
def make_lesson(probe: Probe, text: Continuation, budget: float) -> Lesson:
    """Of a text, with as many spans and rows as `budget`, a fraction of its tokens, pays for."""
    policy = SeKV()
    length = len(text.prompt)
    seq = probe.open()
    try:
        recorder = probe.record(policy.evidence, range(length))
        probe.feed(seq, text.prompt, "none", recorder)
        said = recorder.result()
        rows = feed_recorded(probe, seq, text.rest)
        limit = Budget("fraction", budget)
        part = lanes_part(policy, limit, probe.store, length)
        wanted = int(part * budget * length)
        measured = [
            _measured(probe, seq, layer, policy, said, length, wanted)
            for layer in range(probe.config.num_layers)
        ]
        places = policy.assign(measured[:1], wanted * len(measured[0].lanes.valid))[0][:1]
        layers = [_layer(probe, seq, of_layer, rows, places) for of_layer in enumerate(measured)]
        zoomed = area_of(limit, part, probe.store, length)[1]
    finally:
        probe.close(seq)
    first, sizes = layers[0].first, layers[0].sizes
    return Lesson(
        **{name: _stacked(layers, name) for name in ("parts", "constant", "codes", "masses", "rest")},
        sizes=sizes,
        rows=max(1, zoomed),
        root=math.sqrt(probe.config.head_dim),
        past=Past(
            ids=text.rest,
            cell=_cell_of_tokens(first, sizes, length),
            **{name: _stacked(layers, name) for name in ("keys", "values", "mean", "decoder")},
        ),
    )


def _stacked(layers: list[_OfLayer], name: str) -> Tensor:
    return torch.stack([getattr(layer, name) for layer in layers])


def _cell_of_tokens(first: Tensor, sizes: Tensor, length: int) -> Tensor:
    """The cell of each token, by first tokens and sizes of cells."""
    cell = torch.full((length,), len(sizes))
    index = torch.arange(len(sizes)).repeat_interleave(sizes)
    within = torch.arange(len(index)) - (sizes.cumsum(0) - sizes)[index]
    cell[first[index] + within] = index
    return cell


@dataclass(frozen=True)
class _OfLayer:
    """A layer's part of a lesson, and the first token of each cell."""

    parts: Tensor
    constant: Tensor
    codes: Tensor
    first: Tensor
    sizes: Tensor
    masses: Tensor
    rest: Tensor
    keys: Tensor
    values: Tensor
    mean: Tensor
    decoder: Tensor


_PER_LANE = ("keys", "values", "log_mass", "counts", "positions", "valid")


def _measured(
    probe: Probe, seq: int, layer: int, policy: SeKV, recorded: Recorded, length: int, wanted: int
) -> Measured:
    """Of the prompt's part of a layer."""
    view = probe.compressor.view(seq, layer, length, recorded, output=False)
    view = replace(view, **{name: getattr(view, name)[:, :length] for name in _PER_LANE})
    heads = len(view.keys)
    cache = CacheConfig(policy="sekv", budget=1.0)
    lengths = torch.full((1, heads), length)
    protected = protect(view.positions[None], lengths, cache, (), wanted // 2)[0]
    return policy.measure(view, protected)


def _layer(
    probe: Probe, seq: int, of_layer: tuple[int, Measured], rows: Recorded, places: Tensor
) -> _OfLayer:
    """places: [1, length], of all its lanes."""
    layer, measured = of_layer
    view = probe.compressor.view(seq, layer, probe.num_tokens(seq), rows, output=False)
    assert view.queries is not None and view.query_positions is not None
    length = places.shape[1]
    extra = torch.arange(view.keys.shape[1] - length) + int(places.max()) + 1
    assignment = torch.cat((places[0], extra)).expand(len(view.keys), -1)
    merged = coded(view, assignment, measured.basis)
    spans = merged.counts[0] > 1
    start = first_token(merged.positions[:1, spans], merged.counts[:1, spans])
    cells = Cells.of(start, merged.counts[:1, spans], cells_of(view.kv_dtype))
    used = cells.size[0] > 0
    numbers = torch.cat((merged.keys[:, spans], merged.values[:, spans]), dim=-1)
    first, size = cells.first[0, used], cells.size[0, used]
    mean, decoder = measured.basis.mean.float(), measured.basis.decoder.float()
    before = F.pad(attention_rows(view).cumsum(dim=-1), (1, 0))
    return _OfLayer(
        parts=view.queries @ decoder.repeat_interleave(view.group, dim=0).transpose(1, 2),
        constant=(view.queries @ mean.repeat_interleave(view.group, dim=0)[..., None])[..., 0],
        codes=centres(unpack(numbers, digits_of(view.kv_dtype))).flatten(1, 2)[:, used],
        first=first,
        sizes=size,
        masses=(before[..., first + size] - before[..., first]).clamp(min=0),
        rest=_rest(view, ~spans[assignment[0]], view.query_positions),
        keys=view.keys[:, :length],
        values=view.values[:, :length],
        mean=mean,
        decoder=decoder,
    )


def _rest(view: LayerView, single: Tensor, at: Tensor) -> Tensor:
    """Log-sum-exp [query_heads, Q] of the scores of single tokens up to each query's own."""
    assert view.queries is not None
    keys = view.keys[:, single].repeat_interleave(view.group, dim=0)
    scores = view.queries @ keys.transpose(1, 2) / math.sqrt(keys.shape[-1])
    return scores.masked_fill(view.positions[0, single] > at[:, None], -torch.inf).logsumexp(dim=-1)


def scores_of(router: Router, lesson: Lesson) -> Tensor:
    """Estimated scores of single tokens of cells [layers, query_heads, Q, C]."""
    group = router.scale.shape[1] // lesson.codes.shape[1]
    codes = lesson.codes.repeat_interleave(group, dim=1)
    scores = (lesson.parts * router.scale[:, :, None]) @ codes.transpose(-1, -2)
    return (scores + (lesson.constant + router.bias[..., None])[..., None]) / lesson.root


def loss_of(router: Router, lesson: Lesson) -> Tensor:
    """Mean KL divergence of the estimated shares of cells and of the rest from the true ones."""
    scores = scores_of(router, lesson) + lesson.sizes.log()
    estimated = torch.cat((scores, lesson.rest[..., None]), dim=-1).log_softmax(dim=-1)
    others = (1 - lesson.masses.sum(dim=-1, keepdim=True)).clamp(min=0)
    true = torch.cat((lesson.masses, others), dim=-1)
    return F.kl_div(estimated, true, reduction="none").sum(dim=-1).mean()


@torch.no_grad()
def recall_of(router: Router, lesson: Lesson) -> float:
    """The share of the spans' true attention mass that lies in the tokens which the router zooms in for each
    query, over all layers and KV heads."""
    scores = scores_of(router, lesson)
    total = torch.logaddexp((scores + lesson.sizes.log()).logsumexp(dim=-1), lesson.rest)
    kv_heads = lesson.codes.shape[1]

    def of_heads(masses: Tensor) -> Tensor:
        """[layers * kv_heads * Q, C]: means over the query heads of a group."""
        return masses.unflatten(1, (kv_heads, -1)).mean(dim=2).flatten(0, 2)

    worth, true = of_heads((scores - total[..., None]).exp()), of_heads(lesson.masses)
    none = torch.zeros_like(worth, dtype=torch.bool)
    chosen = choose(worth, lesson.sizes.expand_as(worth), none, Zooming(lesson.rows, hold=1.0, least=0.0))
    return float((true * chosen).sum() / true.sum())
