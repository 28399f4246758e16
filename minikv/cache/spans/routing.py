"""Which rows are zoomed in: the attention that a query is expected to pay them, and a choice under two caps
(arXiv 2606.31145, section 3.3; ranked by mass, not by a gate, and capped for each KV head).

    worth_of --> worth of tokens --choose--> the best that there is room for
    what is there, and what is better --exchanged--> what enters and what leaves in this very step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MUTED = -1e30
"""Log mass of an entry that attention does not see, and that queries are routed by alone."""


MOVES = 256
"""Rows of a KV head that may take the place of others for one row of queries."""


@dataclass(frozen=True)
class Zooming:
    """How rows are chosen.

    rows: most rows of a KV head that are zoomed in. moves: of these most that take the place of others, for
    each row of queries of a step. hold: factor by which the worth of one that is zoomed in must be passed.
    least: attention mass below which no row is zoomed in.
    """

    rows: int
    moves: int = MOVES
    hold: float = 1.5
    least: float = 1e-5


def worth_of(scores: Tensor, sizes: Tensor, others: Tensor) -> Tensor:
    """Mean attention mass [kv_heads, cells] of one token of each cell, over query rows.

    scores: [kv_heads, rows, cells], of one token. sizes: [kv_heads, cells], tokens of each, 0 where there is
    no cell. others: [kv_heads, rows], the log-sum-exp of everything else that the rows see.
    """
    scores = scores.masked_fill((sizes == 0)[:, None], -torch.inf)
    total = torch.logaddexp((scores + sizes.clamp(min=1).log()[:, None]).logsumexp(dim=-1), others)
    return torch.exp(scores - total.unsqueeze(-1)).mean(dim=1)


def choose(worth: Tensor, sizes: Tensor, zoomed: Tensor, zooming: Zooming) -> Tensor:
    """Cells [kv_heads, cells] bool whose rows are to be zoomed in, by falling worth as long as they fit.

    worth: [kv_heads, cells] float32, attention mass of one token of each. sizes: [kv_heads, cells] int64, its
    rows, 0 for what is no cell. zoomed: [kv_heads, cells] bool, those that are zoomed in now.
    """
    able = (sizes > 0) & (worth >= zooming.least)
    rank = torch.where(zoomed, worth * zooming.hold, worth).masked_fill(~able, -1.0)
    best = rank.topk(min(zooming.rows, rank.shape[1]), dim=1).indices
    fits = sizes.gather(1, best).cumsum(dim=1) <= zooming.rows
    return able & torch.zeros_like(able).scatter_(1, best, fits)


def exchanged(
    chosen: Tensor, zoomed: Tensor, worth: Tensor, sizes: Tensor, free: Tensor, most: int, zooming: Zooming
) -> tuple[Tensor, Tensor]:
    """Cells that are zoomed in and out now, both [kv_heads, cells] bool, of those that are `chosen` and those
    that are `zoomed` in.

    The best enter first, into the rows that are `free` [kv_heads] and at most `most` others, but always one
    cell. As many of those that are not chosen leave as is needed for that, the least worth first: what there
    is room for stays, and costs nothing.
    """
    entering = chosen & ~zoomed
    order = worth.masked_fill(~entering, -1.0).argsort(dim=1, descending=True, stable=True)
    fits = sizes.gather(1, order).cumsum(dim=1) <= free[:, None] + most
    fits[:, :1] = True
    entering &= torch.zeros_like(entering).scatter_(1, order, fits)
    needed = (sizes * entering).sum(dim=1) - free
    idle = zoomed & ~chosen
    rank = torch.where(worth >= zooming.least, worth * zooming.hold, worth).masked_fill(~idle, torch.inf)
    order = rank.argsort(dim=1, stable=True)
    size = sizes.gather(1, order)
    gone = size.cumsum(dim=1) - size < needed[:, None]
    return entering, idle & torch.zeros_like(idle).scatter_(1, order, gone)
