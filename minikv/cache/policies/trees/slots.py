"""Slots: runs of `SLOT` neighbouring entries of a lane, each with a balanced binary tree over them.

Level 0 of a tree are its entries, level `LEVELS` is the slot. What belongs to nodes has them in the last
dimension, `NODES` in all, level by level from the entries; node i of a level covers the entries from
i << level to (i + 1) << level.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 6
SLOT = 1 << LEVELS
NODES = 2 * SLOT - 1


def start_of(level: int) -> int:
    """Where a level begins among the nodes."""
    return NODES + 1 - (2 * SLOT >> level)


def level_slice(level: int) -> slice:
    """Where a level is among the nodes."""
    return slice(start_of(level), start_of(level + 1))


def in_slots(rows: Tensor) -> Tensor:
    """Rows [.., n] as [.., slots, SLOT], 0 in places past the end."""
    return F.pad(rows, (0, -rows.shape[-1] % SLOT)).unflatten(-1, (-1, SLOT))


def pairs(level: Tensor) -> tuple[Tensor, Tensor]:
    """The left and the right children of every node of the next level."""
    return level[..., 0::2], level[..., 1::2]


def tree_sums(leaves: Tensor) -> Tensor:
    """Sums over the entries of every node: [.., SLOT] to [.., NODES]."""
    return torch.cat((leaves, inner_sums(leaves)), dim=-1)


def inner_sums(leaves: Tensor) -> Tensor:
    """Sums over the entries of every inner node: [.., SLOT] to [.., SLOT - 1]."""
    half = SLOT // 2
    sums = torch.empty(*leaves.shape[:-1], SLOT - 1)
    lowest = torch.add(*pairs(leaves), out=sums[..., :half])
    # A product with zeros and ones is faster than sums level by level.
    torch.matmul(lowest, _ABOVE_PAIRS, out=sums[..., half:])
    return sums


def _holders() -> Tensor:
    """[SLOT, NODES] float32: 1 where the node of the column holds the row's entry."""
    level = torch.cat([torch.full((SLOT >> level,), level) for level in range(LEVELS + 1)])
    first = torch.cat([torch.arange(SLOT >> level) << level for level in range(LEVELS + 1)])
    return ((torch.arange(SLOT)[:, None] >> level) == (first >> level)).float()


# Which inner nodes hold an entry [SLOT, SLOT - 1], a pair of neighbours [SLOT / 2, SLOT / 2 - 1], or both of
# two such pairs [SLOT * SLOT / 4, SLOT - 1].
TREE = _holders()[:, SLOT:].contiguous()
_ABOVE_PAIRS = TREE[::2, SLOT // 2 :].contiguous()
PAIRS = (TREE[::2, None] * TREE[::2]).flatten(0, 1)


def whole(free: Tensor, protected: Tensor) -> Tensor:
    """Which nodes may become one entry: [.., NODES] bool, from [.., SLOT] bool.

    A node may not when a protected entry stands between two of its free ones: the prototype would
    lie on both sides of it. One without a free entry may not either.
    """
    place = torch.arange(SLOT)
    first, last = torch.where(free, place, SLOT), torch.where(free, place, -1)
    before = F.pad(protected.long().cumsum(dim=-1), (1, 0))
    levels = [free]
    for _ in range(LEVELS):
        first, last = torch.minimum(*pairs(first)), torch.maximum(*pairs(last))
        between = before.gather(-1, last.clamp(min=0)) - before.gather(-1, first)
        levels.append((last >= first) & (between == 0))
    return torch.cat(levels, dim=-1)
