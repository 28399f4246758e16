"""Entries outside the pool, bit for bit as it stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Stored(NamedTuple):
    """Rows of the pool, n of them.

    keys, values: [n, head_dim] in the KV dtype, keys rotated to their positions. key_scales,
    value_scales: [n] float32 if that is int8, or else None. log_mass: [n] float32. positions: [n] int32.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    log_mass: Tensor
    positions: Tensor

    def at(self, index: Tensor) -> Stored:
        """The rows at `index` [m] int64 or [n] bool."""
        return Stored(*(None if tensor is None else tensor[index] for tensor in self))  # type: ignore[arg-type]

    def and_then(self, other: Stored) -> Stored:
        """These rows and those of `other`."""
        return Stored.joined([self, other])

    @classmethod
    def joined(cls, parts: Sequence[Stored]) -> Stored:
        """The rows of all parts, one after the other; there is at least one."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*parts, strict=True)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Places:
    """Where entries of one or more lanes of a layer are in a pool, lane after lane.

    slots: [n] int64, pool rows. counts, lengths: as in `Entries`.
    """

    slots: Tensor
    counts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class Entries:
    """Entries of one or more lanes of a layer, lane after lane, ascending by position in each.

    rows: of all lanes, n in all. counts: [n] int32, tokens that each entry stands for. lengths: [lanes]
    int64, entries of each lane; their sum is n.
    """

    rows: Stored
    counts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    def before(self, position: int) -> Entries:
        """Those of tokens before `position`."""
        kept = self.rows.positions < position
        lane = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)[kept]
        return Entries(self.rows.at(kept), self.counts[kept], lane.bincount(minlength=len(self.lengths)))

    def lane(self, index: int) -> Entries:
        """One lane alone."""
        end = int(self.lengths[: index + 1].sum())
        places = torch.arange(end - int(self.lengths[index]), end)
        return Entries(self.rows.at(places), self.counts[places], self.lengths[index : index + 1])
