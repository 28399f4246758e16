"""From a computed batch to the recorders of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minikv.cache.surprisal import LogitsOf, estimated_surprisal
from minikv.kernels.batch import Batch
from minikv.scheduler.scheduler import Scheduled


def record_queries(plan: Sequence[Scheduled], batch: Batch) -> None:
    """Hand out the captured queries, which lie in the order of the plan."""
    if batch.capture_rows is None:
        return
    assert batch.captured is not None and batch.captured_norms is not None, (
        "the decoder captures what it is asked for"
    )
    start = 0
    for item in plan:
        if item.capture is None or item.recorder is None:
            continue
        end = start + len(item.capture)
        rows = batch.capture_rows[start:end]
        positions, queries = batch.positions[rows], batch.captured[:, start:end]
        norms = batch.captured_norms[:, start:end]
        item.recorder.add(positions, queries, batch.rope_lengths[rows], norms)
        if item.request.tape is not None:
            item.request.tape.add(positions, queries, norms)
        start = end


def record_surprisal(plan: Sequence[Scheduled], batch: Batch, logits_of: LogitsOf, vocab_size: int) -> None:
    """Hand out -log p of the prompt tokens that follow the rows; see `estimated_surprisal`."""
    for item, first_row in zip(plan, batch.row_starts, strict=False):
        request = item.request
        after = request.num_computed + 1
        # What a model said in an earlier turn had not been recorded then.
        end = request.course.turn_at(request.num_computed).num_prompt
        following = request.tokens[after : min(after + item.count, end)]
        if item.recorder is None or not item.recorder.wants_surprisal or not following:
            continue
        rows = torch.arange(first_row, first_row + len(following))
        values = estimated_surprisal(logits_of, vocab_size, rows, request.tokens, after)
        item.recorder.add_surprisal(after, values)
        if request.tape is not None:
            request.tape.add_surprisal(after, values)
