"""From scheduled rows to the batch object that models and kernels read."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from minikv.cache.lanes import LaneStore
from minikv.kernels.batch import Batch
from minikv.scheduler.scheduler import Scheduled


def build_batch(store: LaneStore, plan: list[Scheduled]) -> Batch:
    """Flat ids and positions, row ranges, lane tables, and the write slots of all layers at once."""
    requests = [item.request for item in plan]
    counts = [item.count for item in plan]
    seqs = np.array([request.seq for request in requests])
    row_starts = [0, *accumulate(counts)]
    lengths = store.lengths[seqs]
    if row_starts[-1] == len(plan):
        slots = store.decode_slots(seqs)
        longest = int(lengths.max()) + 1
    else:
        parts = [store.next_slots(int(seq), count) for seq, count in zip(seqs, counts, strict=True)]
        slots = np.concatenate(parts, axis=-1)
        longest = int((lengths.reshape(len(plan), -1).max(axis=1) + counts).max())
    first = np.array([request.num_computed for request in requests])
    rows = np.arange(row_starts[-1])
    positions = rows + np.repeat(first - row_starts[:-1], counts)
    # Dynamic RoPE scales with the length a token was first computed for; recomputing after a
    # preemption must give the same rotation.
    prompts = np.repeat([request.num_prompt for request in requests], counts)
    ids: list[int] = []
    for request, count in zip(requests, counts, strict=True):
        ids += request.tokens[request.num_computed : request.num_computed + count]
    finished = [
        end - 1
        for request, count, end in zip(requests, counts, row_starts[1:], strict=True)
        if count == request.num_remaining
    ]
    return Batch(
        pool=store.pool,
        token_ids=torch.tensor(ids),
        positions=_tensor(positions),
        rope_lengths=_tensor(np.maximum(positions + 1, prompts)),
        row_starts=row_starts,
        logit_rows=torch.tensor(finished, dtype=torch.int64),
        slots=_tensor(slots),
        lane_pages=torch.from_numpy(store.pages[seqs, :, :, : -(-longest // store.pool.page_size)]),
        past_lengths=_tensor(lengths),
        has_mass=store.has_mass[seqs].tolist(),
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
