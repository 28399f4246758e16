"""From scheduled rows to the batch object that models and kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from minikv.cache.lanes import LaneStore
from minikv.kernels.batch import Batch
from minikv.scheduler.scheduler import Scheduled


@dataclass(frozen=True)
class Rows:
    """The rows of one sequence in a batch; their places in its lanes are reserved.

    first: logical position of the first of `ids`.
    rope_length: least sequence length that dynamic RoPE takes for them. It scales with the length that
        a token was first computed for; recomputing after a preemption must give the same rotation.
    logits: rows whose logits are wanted. capture: those whose queries are, [R] int64 among these rows.
    """

    seq: int
    ids: Sequence[int]
    first: int
    rope_length: int = 0
    logits: Literal["none", "last", "all"] = "last"
    capture: Tensor | None = None


def build_batch(store: LaneStore, plan: list[Scheduled]) -> Batch:
    """The batch of a step. Logits are wanted of rows that are the last of their tokens."""
    parts = []
    for item in plan:
        request, start = item.request, item.request.num_computed
        assert request.seq is not None
        parts.append(
            Rows(
                request.seq,
                request.tokens[start : start + item.count],
                start,
                request.num_prompt,
                "last" if item.count == request.num_remaining else "none",
                item.capture,
            )
        )
    return batch_of(store, parts)


def batch_of(store: LaneStore, parts: Sequence[Rows]) -> Batch:
    """Flat ids and positions, row ranges, and the tables of all lanes at once."""
    seqs = np.array([part.seq for part in parts])
    row_starts = [0, *accumulate(len(part.ids) for part in parts)]
    lengths = store.lengths[seqs]
    ids: list[int] = []
    positions: list[int] = []
    rope_lengths: list[int] = []
    longest = 0
    for index, part in enumerate(parts):
        count = len(part.ids)
        ids += part.ids
        positions += range(part.first, part.first + count)
        rope_lengths += [max(p + 1, part.rope_length) for p in range(part.first, part.first + count)]
        longest = max(longest, int(lengths[index].max()) + count)
    pages = store.pages[seqs, :, :, : -(-longest // store.pool.page_size)]
    if any(store.areas[part.seq] is not None for part in parts):
        pages, lengths = _with_areas(store, parts, pages, lengths)
    has_mass = [bool(store.has_mass[part.seq]) or _masks(store, part.seq) for part in parts]
    return Batch(
        pool=store.pool,
        token_ids=_tensor(ids),
        positions=_tensor(positions),
        rope_lengths=_tensor(rope_lengths),
        row_starts=row_starts,
        logit_rows=_logit_rows(parts, row_starts),
        lane_pages=torch.from_numpy(pages),
        past_lengths=_tensor(lengths),
        has_mass=has_mass,
        mass_ends=_mass_ends(store, parts, lengths) if any(has_mass) else None,
        capture_rows=_capture_rows(parts, row_starts),
    )


def _with_areas(
    store: LaneStore, parts: Sequence[Rows], pages: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lane tables in which each area comes before the lane that it belongs to, as far as it is in use, and
    the lengths of both together."""
    areas = [store.areas[part.seq] for part in parts]
    widths = [_width(store, part.seq) for part in parts]
    joined = np.zeros((*pages.shape[:3], pages.shape[3] + max(widths)), dtype=pages.dtype)
    lengths = lengths.copy()
    for index, (area, width) in enumerate(zip(areas, widths, strict=True)):
        joined[index, :, :, width : width + pages.shape[3]] = pages[index]
        if area is not None:
            joined[index, :, :, :width] = area.pages[:, :, :width]
            lengths[index] += width * store.pool.page_size
    return joined, lengths


def _width(store: LaneStore, seq: int) -> int:
    """Pages of a sequence's area that are in use, in each lane; of a shared one those with tokens that the
    lanes do not hold."""
    area = store.areas[seq]
    if area is None or not area.shared:
        return 0 if area is None else area.per_lane
    return store.num_aside(seq) // store.pool.page_size


def _masks(store: LaneStore, seq: int) -> bool:
    """Whether a sequence has an area with rows in use that are not to be seen. In a shared one they fill
    whole pages, and all are seen."""
    area = store.areas[seq]
    return area is not None and not area.shared


def _mass_ends(store: LaneStore, parts: Sequence[Rows], lengths: np.ndarray) -> Tensor:
    """As `Batch.mass_ends`. Where there is an area, masses come and go while the batch is computed, and any
    entry before the new ones may get one."""
    ends = [
        lengths[index] if _masks(store, part.seq) else store.mass_ends[part.seq]
        for index, part in enumerate(parts)
    ]
    return _tensor(np.stack(ends))


def _logit_rows(parts: Sequence[Rows], row_starts: list[int]) -> Tensor:
    rows: list[int] = []
    for part, start, end in zip(parts, row_starts, row_starts[1:], strict=False):
        if part.logits != "none":
            rows += range(start if part.logits == "all" else end - 1, end)
    return _tensor(rows)


def _capture_rows(parts: Sequence[Rows], row_starts: list[int]) -> Tensor | None:
    """Rows to capture, those of one sequence together, in the order of the sequences."""
    rows = [
        part.capture + start
        for part, start in zip(parts, row_starts, strict=False)
        if part.capture is not None
    ]
    return torch.cat(rows) if rows else None


def _tensor(values: list[int] | np.ndarray) -> Tensor:
    # By way of numpy: torch.tensor takes ten times as long for a list of a few numbers.
    return torch.from_numpy(np.array(values, dtype=np.int64))
