"""From scheduled rows to the batch object that models and kernels read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minikv.cache.lanes import LaneStore
from minikv.kernels.batch import Batch
from minikv.scheduler.scheduler import Scheduled


def build_batch(store: LaneStore, plan: list[Scheduled]) -> Batch:
    """Flat ids and positions, row ranges, lane tables, and the write slots of all layers at once."""
    seqs = np.array([item.request.seq for item in plan])
    row_starts = np.cumsum([0, *(item.count for item in plan)])
    ids: list[int] = []
    positions, rope_lengths, slots, logit_rows = [], [], [], []
    for item, end in zip(plan, row_starts[1:], strict=True):
        request, start = item.request, item.request.num_computed
        assert request.seq is not None
        ids += request.tokens[start : start + item.count]
        span = np.arange(start, start + item.count)
        positions.append(span)
        # Dynamic RoPE scales with the length a token was first computed for; recomputing after a
        # preemption must give the same rotation.
        rope_lengths.append(np.maximum(span + 1, request.num_prompt))
        slots.append(store.next_slots(request.seq, item.count))
        if item.count == request.num_remaining:
            logit_rows.append(int(end) - 1)
    lengths = store.lengths[seqs]
    in_use = int(max(1, -(-(lengths + np.diff(row_starts)[:, None, None]).max() // store.pool.page_size)))
    return Batch(
        pool=store.pool,
        token_ids=torch.tensor(ids),
        positions=_tensor(np.concatenate(positions)),
        rope_lengths=_tensor(np.concatenate(rope_lengths)),
        row_starts=row_starts.tolist(),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        slots=_tensor(np.concatenate(slots, axis=-1)),
        lane_pages=_tensor(store.pages[seqs, :, :, :in_use]),
        past_lengths=_tensor(lengths),
        has_mass=store.has_mass[seqs].tolist(),
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
