"""What the observation window attends to, and its smoothing over neighbours."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.policies.base import LayerView


def window_mass(view: LayerView) -> Tensor:
    """Mean attention of the window's queries to each entry: [k, n] float32, rows as `view.query_heads`.

    The softmax runs over all entries that a query sees (window columns in the normaliser, masses
    counted, nothing after the query's position). 0 past a lane's end, and where nothing is seen.
    """
    assert view.queries is not None and view.query_heads is not None and view.query_positions is not None
    lanes = view.query_heads // view.group
    heads, rows, width = view.queries.shape
    if heads == view.group * view.keys.shape[0]:  # every head: grouped by lane, no key is copied
        grouped = view.queries.reshape(view.keys.shape[0], view.group * rows, width)
        logits = (grouped @ view.keys.transpose(1, 2)).view(heads, rows, -1)
    else:
        logits = view.queries @ view.keys[lanes].transpose(1, 2)
    positions = view.positions[lanes][:, None]
    seen = (positions <= view.query_positions[:, None]) & view.valid[lanes][:, None]
    logits.div_(math.sqrt(width)).add_(view.log_mass[lanes][:, None])
    # Not -inf: a row that sees nothing must come out as zeros, not as NaN.
    logits.masked_fill_(~seen, torch.finfo(logits.dtype).min)
    return logits.softmax(dim=-1).masked_fill_(~seen, 0.0).mean(dim=1)


def smooth(mass: Tensor, view: LayerView, kernel: int) -> Tensor:
    """Mean of each entry and its neighbours, `kernel` (odd) in all: [k, n], rows as `view.query_heads`.

    Only entries before the window are smoothed, among themselves: the window's attention to itself
    must not spill over. At the edges the mean is over the neighbours that exist.
    """
    assert kernel % 2 == 1 and view.query_heads is not None and view.query_positions is not None
    lanes = view.query_heads // view.group
    inside = ((view.positions < view.query_positions[0]) & view.valid)[lanes]
    sums = F.avg_pool1d(mass.masked_fill(~inside, 0.0)[:, None], kernel, 1, kernel // 2)[:, 0]
    counts = F.avg_pool1d(inside.float()[:, None], kernel, 1, kernel // 2)[:, 0]
    return torch.where(inside, sums / counts, mass)
