"""A router's second target: what the model says next. The last tokens of a text are computed twice in torch,
seeing all that came before them and seeing what is zoomed in for them, and the two are compared.

    estimates of all layers --choose, for each row and KV head--> rows that are seen --attention, the layers
    above--> logits --KL divergence--> a loss

Whether a row is seen is no smooth function of its estimate. Forward, it is as in an engine; backward, as if a
row were seen by a sigmoid of how far the log of its estimated mass is above that of the last that fits
(arXiv 1308.3432). So rows that are not seen are learned from as well: as much as attention would change.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import Zooming, choose, worth_of
from minikv.calibration.frozen import Frozen
from minikv.calibration.spans import Lesson

_TEMPERATURE = 0.5  # of the sigmoid, in nats
_LEAST = 1e-30  # estimated mass, below which all are alike


def answers(frozen: Frozen, lesson: Lesson, router: Router | None) -> Tensor:
    """Logits [rows, vocab] of a text's last tokens, which see what a router zooms in for them, or with None
    all that came before."""
    start = lesson.past.keys.shape[2]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, rows = k.shape[1], len(k)
        # [kv_heads, group, rows, head_dim]
        asking = q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        keys = torch.cat((lesson.past.keys[layer], k.transpose(0, 1)), dim=1)
        values = torch.cat((lesson.past.values[layer], v.transpose(0, 1)), dim=1)
        scores = asking @ keys[:, None].transpose(2, 3) / math.sqrt(q.shape[-1])
        later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(F.pad(later, (start, 0)), -torch.inf)
        weights = (scores - scores.detach().amax(dim=-1, keepdim=True)).exp()
        if router is not None:
            weights = weights * _seen(lesson, router, layer, asking.detach(), scores.detach())[:, None]
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return (weights @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)

    return frozen.logits(lesson.past.ids, start, attend)


def divergence(full: Tensor, seen: Tensor) -> Tensor:
    """Mean KL divergence of next-token distributions from those of the full cache, by their logits."""
    true = full.log_softmax(dim=-1)
    return F.kl_div(seen.log_softmax(dim=-1), true, log_target=True, reduction="batchmean")


def _seen(lesson: Lesson, router: Router, layer: int, asking: Tensor, scores: Tensor) -> Tensor:
    """Whether each row sees each token, itself included: [kv_heads, rows, n] of 0 and 1, with a gradient.

    asking: [kv_heads, group, rows, head_dim]; scores: [kv_heads, group, rows, n], true ones.
    """
    past, sizes = lesson.past, lesson.sizes
    heads, _, rows, _ = asking.shape
    scale = router.scale[layer].unflatten(0, (heads, -1))[:, :, None]
    bias = router.bias[layer].unflatten(0, (heads, -1))[:, :, None, None]
    parts = asking @ past.decoder[layer][:, None].transpose(2, 3) * scale
    constant = asking @ past.mean[layer][:, None, :, None] + bias
    estimates = (parts @ lesson.codes[layer][:, None].transpose(2, 3) + constant) / lesson.root
    held = F.pad(past.cell == len(sizes), (0, rows), value=True)
    others = scores[..., held].logsumexp(dim=-1)

    def by_row(x: Tensor) -> Tensor:
        """Each row with the heads of its group: [kv_heads * rows, group, ...]."""
        return x.transpose(1, 2).flatten(0, 1)

    of_rows = sizes.expand(heads * rows, -1)
    worth = worth_of(by_row(estimates), of_rows, by_row(others))
    none = torch.zeros_like(worth, dtype=torch.bool)
    chosen = choose(worth.detach(), of_rows, none, Zooming(lesson.rows, hold=1.0))
    logs = worth.clamp(min=_LEAST).log()
    last = logs.detach().masked_fill(~chosen, torch.inf).amin(dim=-1, keepdim=True)
    soft = ((logs - last) / _TEMPERATURE).sigmoid()
    # Column C is of what needs no zooming, the rows themselves included.
    of_cells = F.pad(chosen + (soft - soft.detach()), (0, 1), value=1.0)
    cell = F.pad(past.cell, (0, rows), value=len(sizes))
    return of_cells[:, cell].unflatten(0, (heads, rows))
