"""Rows spread evenly over all that passes by, in bounded memory and without knowing the end."""

from __future__ import annotations

import copy

import torch
from torch import Tensor


class Spread:
    """Keeps rows whose positions are multiples of a stride, a power of two that is doubled whenever more
    than twice `count` of them have come. So what is kept follows from the positions alone, and not from
    the chunks in which they come.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._stride = 1
        self._positions = torch.empty(0, dtype=torch.int64)
        self._rows: Tensor | None = None

    def announce(self, positions: Tensor) -> Tensor:
        """That rows at positions [n], ascending, come next; which of them are to be added: [n] bool."""
        while self._held(self._positions) + self._held(positions) > 2 * self.count:
            self._stride *= 2
        return positions % self._stride == 0

    def add(self, positions: Tensor, rows: Tensor) -> None:
        """Take rows [layers, heads, n, width] at positions [n] that `announce` asked for."""
        stays = self._positions % self._stride == 0
        self._positions = torch.cat((self._positions[stays], positions))
        self._rows = rows if self._rows is None else torch.cat((self._rows[:, :, stays], rows), dim=2)

    def forget(self, position: int) -> None:
        """Drop rows from `position` on."""
        if self._rows is not None:
            stays = self._positions < position
            self._positions, self._rows = self._positions[stays], self._rows[:, :, stays]

    @property
    def stride(self) -> int:
        """The stride that counts for rows to come."""
        return self._stride

    def state(self) -> dict[str, Tensor]:
        """Positions [n] and, once there are any, rows [layers, heads, n, width]."""
        return {"positions": self._positions} | ({} if self._rows is None else {"rows": self._rows})

    def resume(self, stride: int, positions: Tensor, rows: Tensor | None) -> None:
        """Take over `stride` and what `state` gave. ValueError where one does not fit the others."""
        count = 0 if rows is None else rows.shape[2]
        ascending = bool((positions[1:] > positions[:-1]).all())
        if stride < 1 or stride & (stride - 1) or len(positions) != count or not ascending:
            raise ValueError("rows do not make up the spread")
        self._stride, self._positions, self._rows = stride, positions, rows

    def copy(self) -> Spread:
        """An independent copy."""
        return copy.copy(self)  # the tensors are replaced, never written to

    def result(self) -> Tensor | None:
        """At most `count` rows [layers, heads, F, width], ascending; None before the first."""
        # The stride is that of rows announced, which may not have come yet.
        held = (self._positions % self._stride == 0).nonzero().squeeze(1)
        if self._rows is None or not len(held):
            return None
        return self._rows[:, :, held[evenly(len(held), self.count)]]

    def _held(self, positions: Tensor) -> int:
        return int((positions % self._stride == 0).sum())


def evenly(length: int, count: int) -> Tensor:
    """Places [min(count, length)] int64 of `length`, evenly spaced; all, if there are no more."""
    if length <= count:
        return torch.arange(length)
    return (2 * torch.arange(count) + 1) * length // (2 * count)
