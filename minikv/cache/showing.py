"""Evidence that is recorded once for several readers, and what each of them is shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from minikv.cache.evidence import Recorded
from minikv.cache.policies.base import Evidence
from minikv.cache.spread import evenly

FUTURE = 64
"""Queries to come that a refit is judged by."""


def joined(parts: Sequence[Evidence]) -> Evidence:
    """All that any reader wants, of all heads."""
    return Evidence(
        window=max((part.window for part in parts), default=0),
        query_statistics=any(part.query_statistics for part in parts),
        surprisal=any(part.surprisal for part in parts),
        future=max((part.future for part in parts), default=0),
        residual_norms=any(part.residual_norms for part in parts),
        output_weight=any(part.output_weight for part in parts),
        output_gram=any(part.output_gram for part in parts),
    )


def for_refit(window: int) -> Evidence:
    """What a refit reads: the last `window` queries and queries to come, of all heads."""
    return Evidence(window=window, future=FUTURE)


def shown_to(recorded: Recorded, evidence: Evidence) -> Recorded:
    """What a reader would have recorded itself: its own window and heads, and nothing that it has not
    asked for."""
    shown = replace(
        recorded,
        mean=recorded.mean if evidence.query_statistics else None,
        covariance=recorded.covariance if evidence.query_statistics else None,
        surprisal=recorded.surprisal if evidence.surprisal else None,
        residual_norms=recorded.residual_norms if evidence.residual_norms else None,
        future=_future(recorded, evidence.future),
    )
    queries, heads, positions = recorded.queries, recorded.query_heads, recorded.query_positions
    if queries is None or heads is None or positions is None or not evidence.window:
        return replace(shown, queries=None, query_heads=None, query_positions=None, residual_norms=None)
    last = slice(-evidence.window, None)
    queries, positions = queries[:, :, last], positions[last]
    if evidence.heads is not None:
        wanted = evidence.heads.sort(dim=1).values
        # Recorded heads ascend, and may be some of the model's already.
        place = torch.searchsorted(heads.contiguous(), wanted)
        queries, heads = queries[torch.arange(len(wanted))[:, None], place], wanted
    norms = None if shown.residual_norms is None else shown.residual_norms[:, last]
    return replace(shown, queries=queries, query_heads=heads, query_positions=positions, residual_norms=norms)


def _future(recorded: Recorded, count: int) -> torch.Tensor | None:
    if not count or recorded.future is None:
        return None
    return recorded.future[:, :, evenly(recorded.future.shape[2], count)]
