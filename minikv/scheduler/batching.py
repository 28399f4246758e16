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
    """Flat ids and positions, row ranges, and the tables of all lanes at once."""
    requests = [item.request for item in plan]
    counts = [item.count for item in plan]
    seqs = np.array([request.seq for request in requests])
    row_starts = [0, *accumulate(counts)]
    lengths = store.lengths[seqs]
    positions: list[int] = []
    # Dynamic RoPE scales with the length a token was first computed for; recomputing after a
    # preemption must give the same rotation.
    rope_lengths: list[int] = []
    ids: list[int] = []
    finished: list[int] = []
    longest = 0
    for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
        first = request.num_computed
        ids += request.tokens[first : first + count]
        positions += range(first, first + count)
        rope_lengths += [max(p + 1, request.num_prompt) for p in range(first, first + count)]
        longest = max(longest, int(lengths[index].max()) + count)
        if count == request.num_remaining:
            finished.append(row_starts[index + 1] - 1)
    return Batch(
        pool=store.pool,
        token_ids=_tensor(ids),
        positions=_tensor(positions),
        rope_lengths=_tensor(rope_lengths),
        row_starts=row_starts,
        logit_rows=_tensor(finished),
        lane_pages=torch.from_numpy(store.pages[seqs, :, :, : -(-longest // store.pool.page_size)]),
        past_lengths=_tensor(lengths),
        has_mass=store.has_mass[seqs].tolist(),
    )


def _tensor(values: list[int] | np.ndarray) -> Tensor:
    # By way of numpy: torch.tensor takes ten times as long for a list of a few numbers.
    return torch.from_numpy(np.array(values, dtype=np.int64))
