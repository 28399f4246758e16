"""How finely the lanes of a sequence hold its tokens: the numbers behind a picture of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def resolution(positions: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
    """How many tokens the entry stands for that each token is in: [layers, kv_heads, num_tokens] int32, 1
    where the token was kept itself, 0 where it was dropped.

    positions, counts: [layers, kv_heads, n] as `LaneStore` lists them, ascending, positions -1 past a
    lane's end.

    An entry is taken for the run of `counts` tokens around its position, moved behind the run before it and
    cut off where the next entry stands. That is exact for entries made of neighbours. Where tokens inside
    or beside a run were dropped it is an approximation: which of them the entry stands for is not stored.
    """
    starts, ends = _runs(positions, counts, num_tokens)
    sizes = counts.int().masked_fill(positions < 0, 0)
    # Runs are disjoint, so a running sum of what begins less what ends is what each token is in.
    changes = torch.zeros(*positions.shape[:2], num_tokens + 1, dtype=torch.int32)
    changes.scatter_add_(2, starts, sizes).scatter_add_(2, ends, -sizes)
    return changes.cumsum(dim=2, dtype=torch.int32)[..., :-1]


def _runs(positions: Tensor, counts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """First token and the one after the last of every entry; empty past a lane's end."""
    # Entries first: a run depends on the one before it, so lanes are gone through side by side.
    at = positions.permute(2, 0, 1).long().contiguous().numpy()
    inside = at >= 0
    sizes = np.where(inside, counts.permute(2, 0, 1).long().numpy(), 0)
    following = np.full_like(at, num_tokens)
    following[:-1][inside[1:]] = at[1:][inside[1:]]
    # The centre of an even run lies between two tokens; of its two roundings the earlier start is taken,
    # since a run can still be moved to the right by the one before it.
    starts, ends = at - sizes // 2, np.empty_like(at)
    edge = np.zeros(at.shape[1:], dtype=at.dtype)
    for i in range(len(at)):
        starts[i] = np.maximum(starts[i], edge)
        edge = ends[i] = np.minimum(starts[i] + sizes[i], following[i])
    return torch.from_numpy(starts).permute(1, 2, 0), torch.from_numpy(ends).permute(1, 2, 0)


@dataclass(frozen=True)
class Cells:
    """Means over runs of tokens and over heads, each [rows, columns] float32.

    kept, merged: share of the tokens that are held themselves, and in prototypes; the rest is dropped.
    entries: entries per token.
    """

    kept: Tensor
    merged: Tensor
    entries: Tensor

    @property
    def sizes(self) -> Tensor:
        """Tokens per prototype, 1 where there is none."""
        found = self.merged > 0
        return torch.where(found, self.merged / torch.where(found, self.entries - self.kept, 1.0), 1.0)


def cells(held: Tensor, columns: int) -> Cells:
    """`held` [rows, heads, tokens], as `resolution` gives it, over at most `columns` runs of tokens."""
    kept, merged, entries = [], [], []
    for row in held:  # a long context is large in floating point
        kept.append(binned((row == 1).float().mean(dim=0), columns))
        merged.append(binned((row > 1).float().mean(dim=0), columns))
        entries.append(binned(torch.where(row > 0, 1.0 / row.clamp(min=1), 0.0).mean(dim=0), columns))
    return Cells(torch.stack(kept), torch.stack(merged), torch.stack(entries))


def binned(values: Tensor, columns: int) -> Tensor:
    """Means of `values` [..., tokens] over at most `columns` runs of tokens, of nearly equal lengths."""
    tokens = values.shape[-1]
    columns = min(columns, tokens)
    place = torch.arange(tokens) * columns // tokens
    sums = torch.zeros(*values.shape[:-1], columns).index_add_(-1, place, values.float())
    return sums / torch.bincount(place, minlength=columns)
