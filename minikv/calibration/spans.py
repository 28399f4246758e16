"""What a router is trained on: true attention masses of spans, and one text's step towards them.

    text --full cache--> queries of its last tokens, keys --cut into spans--> masses of spans (the target),
    bounds of their keys (what the router sees) --> a loss for each query head, and the recall of true mass

A query sees the tokens before it alone, and all spans end before the first of them: nothing is learned from
what comes later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.evidence import Recorded
from minikv.cache.policies.sekv import SeKV, bounds_of
from minikv.cache.protect import protect
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import bound_scores, choose
from minikv.calibration.measure import Continuation, feed_recorded
from minikv.calibration.scores import attention_rows
from minikv.config import CacheConfig
from minikv.probe import Probe


@dataclass(frozen=True)
class Lesson:
    """One text, all layers.

    queries: [layers, query_heads, Q, head_dim]; high, low: [layers, kv_heads, S, head_dim], bounds of the
    spans' keys; sizes: [S] int64, their tokens. spans: [layers, query_heads, Q, S], their true attention
    masses; rest: [layers, query_heads, Q], the log-sum-exp of what is not in a span. rows: that a KV head may
    zoom in.
    """

    queries: Tensor
    high: Tensor
    low: Tensor
    sizes: Tensor
    spans: Tensor
    rest: Tensor
    rows: int


@torch.inference_mode()
def make_lesson(probe: Probe, text: Continuation, budget: float) -> Lesson:
    """Of a text, with as many spans as `budget`, a fraction of its tokens, pays for."""
    policy = SeKV(probe.model.rope)
    length, total = len(text.prompt), len(text.prompt) + len(text.rest)
    seq = probe.open()
    try:
        recorder = probe.record(policy.evidence, range(length))
        probe.feed(seq, text.prompt, "none", recorder)
        said = recorder.result()
        rows = feed_recorded(probe, seq, text.rest)
        places = _places(probe, seq, policy, said, length, int(budget * policy.resident * length))
        layers = [_layer(probe, seq, layer, rows, places, total) for layer in range(probe.config.num_layers)]
    finally:
        probe.close(seq)
    queries, high, low, spans, rest = (torch.stack(part) for part in zip(*layers, strict=True))
    sizes = places.bincount()
    return Lesson(queries, high, low, sizes[sizes > 1], spans, rest, max(1, int(budget * length / 2)))


def _places(probe: Probe, seq: int, policy: SeKV, recorded: Recorded, length: int, wanted: int) -> Tensor:
    """The segment that each token of the prompt goes into [length] int64; all heads are cut alike."""
    view = probe.compressor.view(seq, 0, length, recorded, output=False)
    view = type(view)(**{**vars(view), **{name: getattr(view, name)[:1, :length] for name in _PER_LANE}})
    lengths = torch.full((1, 1), length)
    cache = CacheConfig(policy="sekv", budget=1.0)
    protected = protect(view.positions[None], lengths, cache, (), wanted // 2)[0]
    measured = policy.measure(view, protected)
    return policy.assign([measured], wanted)[0][0]


_PER_LANE = ("keys", "values", "log_mass", "counts", "positions", "valid")


def _layer(
    probe: Probe, seq: int, layer: int, rows: Recorded, places: Tensor, total: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, bounds of spans, true masses of spans and the rest, of one layer."""
    view = probe.compressor.view(seq, layer, total, rows, output=False)
    assert view.queries is not None and view.query_positions is not None
    extra = torch.arange(total - len(places)) + int(places.max()) + 1
    assignment = torch.cat((places, extra)).expand(len(view.keys), -1)
    merged = bounds_of(view, assignment)
    weights = attention_rows(view)
    masses = torch.zeros(*weights.shape[:2], int(assignment.max()) + 1)
    masses.scatter_add_(2, assignment[:1, None].expand_as(weights), weights)
    is_span = merged.counts[0] > 1
    return (
        view.queries,
        merged.keys[:, is_span],
        merged.values[:, is_span],
        masses[..., is_span],
        _rest(view.queries, merged.keys, ~is_span, merged.positions[0], view.query_positions, view.group),
    )


def _rest(queries: Tensor, keys: Tensor, single: Tensor, positions: Tensor, at: Tensor, group: int) -> Tensor:
    """Log-sum-exp [query_heads, Q] of the scores of single tokens up to each query's own."""
    keys = keys[:, single].repeat_interleave(group, dim=0)
    scores = queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])
    return scores.masked_fill(positions[single] > at[:, None], -torch.inf).logsumexp(dim=-1)


def scores_of(router: Router, lesson: Lesson) -> Tensor:
    """Estimated scores of spans [layers, query_heads, Q, S], masses included."""
    group = router.scale.shape[1] // lesson.high.shape[1]
    high, low = (part.repeat_interleave(group, dim=1) for part in (lesson.high, lesson.low))
    scores = bound_scores(lesson.queries * router.scale[:, :, None], high, low)
    offsets = router.mass[..., None, None] * lesson.sizes.float().log() + router.bias[..., None, None]
    return scores + offsets


def loss_of(router: Router, lesson: Lesson) -> Tensor:
    """Mean KL divergence of the estimated shares of spans and of the rest from the true ones."""
    estimated = torch.cat((scores_of(router, lesson), lesson.rest[..., None]), dim=-1).log_softmax(dim=-1)
    others = (1 - lesson.spans.sum(dim=-1, keepdim=True)).clamp(min=0)
    true = torch.cat((lesson.spans, others), dim=-1)
    return F.kl_div(estimated, true, reduction="none").sum(dim=-1).mean()


@torch.inference_mode()
def recall_of(router: Router, lesson: Lesson) -> float:
    """The share of the spans' true attention mass that lies in those which the router zooms in for each
    query, over all layers and KV heads."""
    scores = scores_of(router, lesson)
    total = torch.logaddexp(scores.logsumexp(dim=-1), lesson.rest)
    kv_heads = lesson.high.shape[1]

    def of_heads(masses: Tensor) -> Tensor:
        """[layers * kv_heads * Q, S]: means over the query heads of a group."""
        return masses.unflatten(1, (kv_heads, -1)).mean(dim=2).flatten(0, 2)

    worth, true = of_heads((scores - total[..., None]).exp()), of_heads(lesson.spans)
    sizes = lesson.sizes.expand_as(worth)
    none = torch.zeros_like(worth, dtype=torch.bool)
    chosen = choose(worth, sizes, none, lesson.rows, lesson.rows, 1.0, 0.0)
    return float((true * chosen).sum() / true.sum())
