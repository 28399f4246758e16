"""Which lanes of a batch are given to FlashInfer, and as which requests; numbers on the host alone.

A lane is a request with one KV head, whose query heads are those of its group. FlashInfer knows no log
masses: it gets a lane from the first page on after which there are none, whole if there are none at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np

from minikv.kernels.batch import Batch
from minikv.kernels.triton import shapes

TAIL = 1024
"""Entries without masses, new ones included, that every lane of a sequence has at its end for these to be
worth a kernel of their own; otherwise Triton takes the lanes whole."""

MOST_SHAPES = 4
"""Sets of lengths, among the layers of a step, that are planned for. Lanes that were cut to another length in
every layer would need a plan for each, which takes longer than it saves."""


@dataclass(frozen=True)
class Requests:
    """Lanes of one layer, or of several with the same lengths, as R requests: sequence by sequence, each
    with its KV heads in order."""

    pages: np.ndarray  # [R] int64, how many are read of each, one at least
    last: np.ndarray  # [R] int64, entries on the last of them
    places: np.ndarray  # [pages.sum()] int64, where their ids are in the tables [S, kv_heads, P] of a layer

    @property
    def indptr(self) -> np.ndarray:
        """[R + 1] int32, where the pages of each begin."""
        return offsets(self.pages)


@dataclass
class Share:
    """Sequences whose rows FlashInfer attends alike. The arrays have one number for each of n."""

    sequences: np.ndarray
    starts: np.ndarray  # the first row of each
    counts: np.ndarray  # and how many it has
    joined: bool  # whether Triton reads the beginnings of the lanes, so that there are two results to merge
    split: bool  # whether lanes may be split among programs
    kv_heads: int
    requests: list[Requests] = field(default_factory=list)
    by_layer: list[int] = field(default_factory=list)  # which of these each layer has
    unseeing: np.ndarray | None = (
        None  # [layers, rows] bool, rows that see no entry of theirs, if there are any
    )

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one new row."""
        return bool((self.counts == 1).all())

    @property
    def indptr(self) -> np.ndarray:
        """[R + 1] int32, where the rows of each request begin."""
        return offsets(np.repeat(self.counts, self.kv_heads))

    @property
    def rows(self) -> np.ndarray:
        """[n] int64, where the rows of the requests are in a batch's queries [T * kv_heads, group, D]."""
        starts = np.repeat(self.starts, self.kv_heads)
        counts = np.repeat(self.counts, self.kv_heads)
        heads = np.tile(np.arange(self.kv_heads), len(self.sequences))
        return (np.repeat(starts, counts) + ordinals(counts)) * self.kv_heads + np.repeat(heads, counts)


@dataclass(frozen=True)
class Division:
    """What runs where: whole sequences on Triton, sequences of whose lanes Triton reads the first `limits`
    [S, layers, kv_heads] entries, and the shares of FlashInfer."""

    triton: np.ndarray
    begun: np.ndarray
    limits: np.ndarray
    shares: list[Share]


def offsets(counts: np.ndarray) -> np.ndarray:
    """[n + 1] int32, the sums of the counts before each."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def ordinals(counts: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def divide(batch: Batch) -> Division:
    """Divide a batch's sequences between FlashInfer and Triton."""
    page_size, counts = batch.pool.page_size, np.diff(batch.row_starts)
    past = batch.past_lengths.numpy()
    first = -(-_mass_ends(batch, past) // page_size) * page_size
    whole = ~first.any(axis=(1, 2))
    length = past + counts[:, None, None] - first
    begun = ~whole & (length.min(axis=(1, 2)) >= TAIL)
    shares = []
    kinds = (counts == 1, (counts > 1) & (counts <= shapes.FEW_ROWS), counts > shapes.FEW_ROWS)
    for (index, kind), joined in product(enumerate(kinds), (False, True)):
        chosen = np.flatnonzero(kind & (begun if joined else whole))
        chosen = chosen[_shaped(first[chosen], length[chosen])]
        if len(chosen):
            shares.append(_share(batch, chosen, first, length, joined, split=index < 2))
    taken = np.concatenate([np.empty(0, dtype=int), *(share.sequences for share in shares)])
    triton = np.setdiff1d(np.arange(batch.num_sequences), taken)
    return Division(triton, np.intersect1d(taken, np.flatnonzero(begun)), first, shares)


def _mass_ends(batch: Batch, past: np.ndarray) -> np.ndarray:
    """From which entry on none of a lane has a log mass [S, layers, kv_heads]."""
    ends = past if batch.mass_ends is None else batch.mass_ends.numpy()
    return ends * np.array(batch.has_mass, dtype=np.int64)[:, None, None]


def _shaped(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Which sequences can be planned for together, [n] bool: all, or else those whose layers are alike."""
    lanes = np.concatenate((first, length), axis=2)
    alike = (lanes == lanes[:, :1]).all(axis=(1, 2))
    shapes_of_layers = np.unique(lanes.transpose(1, 0, 2).reshape(lanes.shape[1], -1), axis=0)
    return np.ones_like(alike) if len(shapes_of_layers) <= MOST_SHAPES else alike


def _share(
    batch: Batch, chosen: np.ndarray, first: np.ndarray, length: np.ndarray, joined: bool, split: bool
) -> Share:
    starts, kv_heads = np.array(batch.row_starts), first.shape[2]
    counts = np.diff(starts)[chosen]
    share = Share(chosen, starts[chosen], counts, joined, split, kv_heads)
    first, length = (
        numbers[chosen].transpose(1, 0, 2).reshape(first.shape[1], -1) for numbers in (first, length)
    )
    known: dict[bytes, int] = {}
    for layer in range(len(first)):
        key = first[layer].tobytes() + length[layer].tobytes()
        if key not in known:
            known[key] = len(share.requests)
            share.requests.append(_requests(batch, chosen, first[layer], length[layer]))
        share.by_layer.append(known[key])
    if joined:
        share.unseeing = _unseeing(length, np.repeat(counts, kv_heads))
    return share


def _requests(batch: Batch, chosen: np.ndarray, first: np.ndarray, length: np.ndarray) -> Requests:
    page_size, kv_heads, width = batch.pool.page_size, *batch.lane_pages.shape[2:]
    pages = -(-length // page_size)
    lanes = (chosen[:, None] * kv_heads + np.arange(kv_heads)).reshape(-1)
    begin = lanes * width + first // page_size
    return Requests(pages, length - (pages - 1) * page_size, np.repeat(begin, pages) + ordinals(pages))


def _unseeing(length: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    """Rows before the first page that their request reads: masses may end on the first new row's page."""
    before = np.repeat(counts - length, counts, axis=1) > ordinals(counts)
    return before if before.any() else None
