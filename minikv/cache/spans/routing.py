"""Which spans are zoomed in: their attention mass as a query sees it, and a choice under a cap of rows
(arXiv 2606.31145, section 3.3; ranked by mass, not by a gate, and capped for each KV head)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MUTED = -1e30
"""Log mass of an entry that attention does not see, and that queries are routed by alone."""


@dataclass(frozen=True)
class Zooming:
    """How spans are chosen.

    rows: most rows of a KV head that are zoomed in. new_rows: most of them that a step may put there; None
    for as many as there are. hold: factor by which the worth of a zoomed span must be passed. decay: what is
    left of a worth after a step. least: attention mass below which no span is zoomed in.
    """

    rows: int
    new_rows: int | None = None
    hold: float = 1.5
    decay: float = 0.0
    least: float = 1e-4


def bound_scores(queries: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """The greatest scores [..., rows, spans] that keys within bounds can have: queries [..., rows, head_dim],
    high and low [..., spans, head_dim] (Quest, arXiv 2406.10774)."""
    most = queries.clamp(min=0) @ high.transpose(-1, -2) + queries.clamp(max=0) @ low.transpose(-1, -2)
    return most / math.sqrt(queries.shape[-1])


def masses(scores: Tensor, normaliser: Tensor) -> Tensor:
    """Mean attention mass [kv_heads, spans] over query rows, from scores [kv_heads, rows, spans] with their
    log masses and the log-sum-exp [kv_heads, rows] over all that the rows see."""
    return torch.exp(scores - normaliser.unsqueeze(-1)).mean(dim=1)


def choose(
    worth: Tensor, sizes: Tensor, zoomed: Tensor, rows: int, new_rows: int, hold: float, least: float
) -> Tensor:
    """Spans [kv_heads, spans] bool that are to be zoomed in.

    worth: [kv_heads, spans] float32, attention mass of each. sizes: [kv_heads, spans] int64, its rows, 0 for
    what is no span. zoomed: [kv_heads, spans] bool, those that are zoomed in now.
    rows: most rows of a KV head. new_rows: most rows of spans that are not zoomed in yet.
    hold: factor by which a zoomed span is preferred, at least 1. least: mass below which none is zoomed in.

    Spans are taken by falling worth, each that still fits; one that is zoomed in stays until its rows are
    needed for another.
    """
    fresh = (sizes > 0) & ~zoomed & (worth >= least)
    fresh &= _fitting(torch.where(fresh, worth, -torch.inf), sizes * fresh, new_rows)
    able = fresh | (zoomed & (sizes > 0))
    rank = torch.where(zoomed, worth * hold, worth)
    return able & _fitting(torch.where(able, rank, -torch.inf), sizes * able, rows)


def _fitting(rank: Tensor, sizes: Tensor, room: int) -> Tensor:
    """Items [lanes, n] that are taken in falling rank, each that still fits into `room` of its lane."""
    order = rank.argsort(dim=1, descending=True, stable=True)
    ordered = sizes.gather(1, order)
    taken = torch.zeros_like(ordered, dtype=torch.bool)
    while True:
        left = room - (ordered * taken).sum(dim=1, keepdim=True)
        waiting = ~taken & (ordered <= left)
        if not bool(waiting.any()):
            return torch.zeros_like(taken).scatter_(1, order, taken)
        # Up to the first that does not fit, which waits no longer then.
        taken |= waiting & ((ordered * waiting).cumsum(dim=1) <= left)
