"""Where text is cut into anchors and spans, by surprisal and under a budget (arXiv 2606.31145, section 3.1).

Lanes are rows of [lanes, n] tensors; entries of a lane are in order. A segment is a run of neighbouring
entries: an anchor is a segment of one entry, and everything between anchors is divided into spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = 40  # of a bisection over lengths


@dataclass(frozen=True)
class Cutting:
    """How text is cut.

    alpha: an anchor's surprisal is above mean + alpha standard deviations. share: of a lane's segments that
    may be anchors. least: entries between two anchors; nearer than that the more surprising one is taken.
    """

    alpha: float = 1.0
    share: float = 0.1
    least: int = 4


def anchors(surprisal: Tensor, free: Tensor, cutting: Cutting) -> Tensor:
    """Entries that may become anchors: [lanes, n] bool.

    surprisal: [lanes, n] float32 in nats, NaN where not known. free: [lanes, n] bool, entries that are not
    kept anyway: mean and deviation are taken over these alone, since first tokens are like no others.
    """
    known = free & surprisal.isfinite()
    values = surprisal.double().masked_fill(~known, 0.0)
    count = known.sum(dim=1, keepdim=True).clamp(min=1)
    mean = values.sum(dim=1, keepdim=True) / count
    spread = ((values - mean).square() * known).sum(dim=1, keepdim=True).div(count).sqrt()
    above = known & (values > mean + cutting.alpha * spread)
    reach = cutting.least
    heights = values.masked_fill(~above, -torch.inf).float()
    if reach < 1 or not heights.shape[1]:
        return above
    padded = F.pad(heights, (reach, reach), value=-torch.inf)[:, None]
    before = F.max_pool1d(padded[..., : -reach - 1], reach, stride=1)[:, 0]
    after = F.max_pool1d(padded[..., reach + 1 :], reach, stride=1)[:, 0]
    # Of equal neighbours the first is taken.
    return above & (heights > before) & (heights >= after)


def segments(
    surprisal: Tensor, free: Tensor, kept: Tensor, wanted: Tensor, cutting: Cutting, longest: int
) -> Tensor:
    """The segment that each entry goes into: [lanes, n] int64, ascending from 0 without gaps, -1 for entries
    that go into none.

    free, kept: [lanes, n] bool, entries to be cut into segments, and those that are one of their own; the
    rest is past a lane's end. wanted: [lanes] int64, segments of each lane in all, at least those kept and
    at most its entries; so many there are. longest: entries of a segment, for which anchors give way.
    Segments of free entries hold neighbours alone. Where there are fewer segments than runs of free entries
    between kept ones, the shortest runs go into none.
    """
    left = wanted - kept.sum(dim=1)
    chosen = _strongest(surprisal, free, left, anchors(surprisal, free, cutting), cutting, longest)
    single = kept | chosen
    run, length = _runs(free & ~chosen)
    parts = _divide(length, left - chosen.sum(dim=1))
    within = _within(run, free & ~chosen)
    size, most = length.gather(1, run.clamp(min=0)), parts.gather(1, run.clamp(min=0))
    part = within * most // size.clamp(min=1)
    inside = (run >= 0) & (most > 0)
    begins = inside & ((within == 0) | (part != (within - 1) * most // size.clamp(min=1)))
    number = (single | begins).cumsum(dim=1) - 1
    return number.masked_fill(~(single | inside), -1)


def _strongest(
    surprisal: Tensor, free: Tensor, left: Tensor, possible: Tensor, cutting: Cutting, longest: int
) -> Tensor:
    """As many of the possible anchors, the most surprising first, as leave segments of at most `longest`
    entries for all between them."""
    heights = surprisal.masked_fill(~possible, -torch.inf)
    rank = heights.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    low = torch.zeros_like(left)
    high = torch.minimum(possible.sum(dim=1), (left * cutting.share).long())
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        some = possible & (rank < middle[:, None])
        needed = some.sum(dim=1) + torch.ceil(_runs(free & ~some)[1] / longest).long().sum(dim=1)
        fits = needed <= left
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    return possible & (rank < low[:, None])


def _runs(inside: Tensor) -> tuple[Tensor, Tensor]:
    """Which run of neighbouring entries each is in, [lanes, n] int64, -1 for none; and how long the runs
    are, [lanes, n] int64, 0 where there are no more."""
    begins = inside & ~F.pad(inside, (1, 0))[:, :-1]
    run = (begins.cumsum(dim=1) - 1).masked_fill(~inside, -1)
    length = torch.zeros_like(run).scatter_add_(1, run.clamp(min=0), inside.long())
    return run, length


def _within(run: Tensor, inside: Tensor) -> Tensor:
    """The place of each entry in its run: [lanes, n] int64."""
    place = torch.arange(run.shape[1]).expand(run.shape)
    first = torch.full_like(run, run.shape[1])
    first.scatter_reduce_(1, run.clamp(min=0), torch.where(inside, place, run.shape[1]), "amin")
    return place - first.gather(1, run.clamp(min=0))


def _divide(length: Tensor, total: Tensor) -> Tensor:
    """Parts [lanes, n] int64 that runs of length [lanes, n] are divided into, `total` [lanes] in all or as
    many as there are entries, so that the longest part is as short as can be."""
    exists = length > 0
    total = torch.minimum(total, length.sum(dim=1)).clamp(min=0)
    few = total < exists.sum(dim=1)
    low, high = torch.zeros(len(length), dtype=torch.float64), length.amax(dim=1).double().clamp(min=1.0)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        fits = torch.ceil(length / middle[:, None]).sum(dim=1) <= total
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    parts = torch.minimum(torch.ceil(length / high[:, None]).long(), length)
    # What rounding has left goes to the longest parts, one each.
    spare = total - parts.sum(dim=1)
    while bool((spare > 0).any()):
        longest = (length / parts.clamp(min=1)).masked_fill(parts >= length, 0.0)
        rank = longest.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        parts = parts + ((rank < spare[:, None]) & (parts < length))
        spare = total - parts.sum(dim=1)
    rank = length.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return torch.where(few[:, None], ((rank < total[:, None]) & exists).long(), parts)
