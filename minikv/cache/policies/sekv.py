"""SeKV: surprising tokens stay, the text between them becomes spans (arXiv 2606.31145)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.policies.allocation import fill
from minikv.cache.policies.base import Evidence, LayerView, Rows
from minikv.cache.spans.codes import (
    Basis,
    basis_of,
    cell_of,
    cells_of,
    centres,
    digits_of,
    pack,
    rounded,
    unpack,
)
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import MUTED, Zooming
from minikv.cache.spans.segments import Cutting, segments

if TYPE_CHECKING:
    from collections.abc import Iterator

_WINDOW = 64  # last queries that say what directions of keys matter


@dataclass(frozen=True)
class Lanes:
    """How the lanes of a layer stand: all [kv_heads, n].

    surprisal: float32, NaN where not known. valid, protected, sealed: bool. counts: int64, tokens of each.
    """

    surprisal: Tensor
    valid: Tensor
    protected: Tensor
    sealed: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Measured:
    """What `assign` and `merge` need of a layer. basis: what the codes of its spans mean; cells: codes that
    an entry holds."""

    lanes: Lanes
    basis: Basis
    cells: int


class SeKV:
    """Keeps the entries of surprising tokens and makes one entry of each span between them.

    What a span stands for is kept below the pool, and rows of it are put back for queries that want them,
    which is not done here (`cache.spans`): with `zooms`, the framework gives this policy up to `resident` of
    the budget and leaves the rest for rows that are put back. The entry of a span holds codes of its tokens'
    keys (`cache.spans.codes`), which tell which queries want them; attention does not see it. Its position is
    that of its token n // 2, so that an entry of n tokens says by itself which they are.

    All lanes are cut alike. What was cut once stays so; under a budget that does not grow, segments that are
    neighbours are joined, and no other borders appear. The basis of the codes is that of the first cut.

    zooming: how rows are chosen, but for how many there are; router: corrects estimates of attention, None to
    take them as they are.
    longest: sealed text is cut coarser when new text would have to be cut into longer spans than this.

    Costs one pass over keys, and two eigenvalue problems of head_dim numbers for each lane once.
    """

    name = "sekv"
    zooms = True
    resident = 0.6

    def __init__(
        self,
        cutting: Cutting | None = None,
        *,
        zooming: Zooming | None = None,
        router: Router | None = None,
        longest: int = 64,
    ) -> None:
        self.evidence = Evidence(surprisal=True, window=_WINDOW)
        self.cutting = cutting or Cutting()
        self.zooming = zooming or Zooming(0)
        self.router = router
        self.longest = longest

    @torch.inference_mode()
    def measure(self, view: LayerView, protected: Tensor) -> Measured:
        """Surprisal of each entry, which entries were cut before, and the basis if there is none yet."""
        assert view.surprisal is not None
        known = torch.full((view.num_tokens,), torch.nan)
        count = min(len(view.surprisal), view.num_tokens)
        known[:count] = view.surprisal[:count]
        last = view.positions.masked_fill(view.counts <= 1, -1).amax(dim=1, keepdim=True)
        sealed = view.valid & (view.positions <= last)
        surprisal = known[view.positions.clamp(min=0)].masked_fill(view.counts > 1, torch.nan)
        lanes = Lanes(surprisal, view.valid, protected & view.valid, sealed, view.counts)
        return Measured(lanes, view.basis or _basis(view, protected), cells_of(view.kv_dtype))

    @torch.inference_mode()
    def assign(self, measured: list[Measured], total: int) -> list[Tensor]:
        """Per layer [kv_heads, n] int64 places. The lanes get equal shares of `total`."""
        layers = [layer.lanes for layer in measured]
        lengths = torch.stack([layer.valid.sum(dim=1) for layer in layers])
        floors = torch.stack([layer.protected.sum(dim=1) for layer in layers])
        floors = torch.minimum(floors.clamp(min=1), lengths)
        wanted = fill(torch.ones(lengths.shape), floors, lengths, total)
        # All layers and heads are cut alike as a rule, and then once; else one lane after the other would
        # cost as much.
        first = layers[0]
        alike = all(_equal(layer, first) for layer in layers)
        if not alike:
            pairs = zip(layers, wanted, strict=True)
            return [self._places(layer, of_layer, measured[0].cells) for layer, of_layer in pairs]
        numbers, which = wanted.unique(return_inverse=True)
        one = Lanes(**{name: t[:1].expand(len(numbers), -1) for name, t in vars(first).items()})
        return list(self._places(one, numbers, measured[0].cells)[which])

    def _places(self, lanes: Lanes, wanted: Tensor, cells: int) -> Tensor:
        """Places [kv_heads, n] of lanes that are to have `wanted` [kv_heads] segments, with codes for `cells`
        tokens in each."""
        kept = lanes.protected | lanes.sealed
        left, free = wanted - kept.sum(dim=1), (lanes.valid & ~kept).sum(dim=1)
        tight = (left * self.longest < free)[:, None]
        kept = torch.where(tight, lanes.protected, kept)
        return segments(lanes.surprisal, lanes.valid & ~kept, kept, wanted, self.cutting, cells)

    @torch.inference_mode()
    def merge(self, view: LayerView, measured: Measured, assignment: Tensor, protected: Tensor) -> Rows:
        """The entries of spans, and entries that are segments of their own."""
        return coded(view, assignment, measured.basis)


def _basis(view: LayerView, protected: Tensor) -> Basis:
    """Of the keys that may go into spans, for the queries that were recorded."""
    assert view.queries is not None
    heads, _, width = view.keys.shape
    single = view.valid & (view.counts == 1)
    some = single & ~protected
    # A lane all of which is protected has no spans; it needs numbers all the same.
    some = torch.where(some.any(dim=1, keepdim=True), some, view.valid)
    return basis_of(view.keys, some, view.queries.reshape(heads, -1, width))


def coded(view: LayerView, assignment: Tensor, basis: Basis) -> Rows:
    """The new entries of a layer, where those that stand for several tokens hold codes of their keys and have
    no weight in attention. assignment: [kv_heads, n] int64 places, -1 for none."""
    kv_heads, _, width = view.keys.shape
    most = int(assignment.max()) + 1
    place = torch.where(assignment >= 0, assignment, most)

    def numbers(rows: Tensor, how: str, start: int) -> Tensor:
        into = torch.full((kv_heads, most + 1), start)
        return into.scatter_reduce_(1, place, rows, how)[:, :most]

    total = numbers(view.counts, "sum", 0)
    entries = numbers(torch.ones_like(view.counts), "sum", 0)
    start = numbers(first_token(view.positions, view.counts), "amin", view.num_tokens)
    source = numbers(torch.arange(place.shape[1]).expand_as(place), "amin", place.shape[1])
    source = source.clamp(max=place.shape[1] - 1)
    same = source[..., None].expand(-1, -1, width)
    alone = entries == 1
    packed = _packed(view, place, basis, start, total)
    keys = torch.where(alone[..., None], view.keys.gather(1, same), packed[..., :width])
    values = torch.where(alone[..., None], view.values.gather(1, same), packed[..., width:])
    masses = torch.where(alone, view.log_mass.gather(1, source), MUTED).masked_fill(total == 0, 0.0)
    positions = torch.where(alone, view.positions.gather(1, source), start + total // 2)
    return Rows(keys, values, masses, positions.masked_fill(total == 0, -1), total, total > 0)


def _packed(view: LayerView, place: Tensor, basis: Basis, start: Tensor, total: Tensor) -> Tensor:
    """Codes of what goes into each new entry, as the numbers of an entry: [kv_heads, most, 2 * head_dim]."""
    heads, most = total.shape
    digits, cells = digits_of(view.kv_dtype), cells_of(view.kv_dtype)
    sums = torch.zeros(heads * most * cells, basis.decoder.shape[1])
    tokens = torch.zeros(len(sums))
    for lane, entry, token, levels in _levels(view, place < most, basis, digits):
        to = place[lane, entry]
        cell = cell_of(token - start[lane, to], total[lane, to], cells).clamp(max=cells - 1)
        at = (lane * most + to) * cells + cell
        sums.index_add_(0, at, levels)
        tokens.index_add_(0, at, torch.ones(len(at)))
    mean = sums / tokens.clamp(min=1)[:, None]
    return pack(rounded(mean).view(heads, most, cells, -1), digits)


def _levels(
    view: LayerView, wanted: Tensor, basis: Basis, digits: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Lane, entry, token and components of single tokens, and then of those that spans stand for."""
    single = wanted & (view.counts == 1)
    lane, entry = single.nonzero().unbind(1)
    yield lane, entry, view.positions[lane, entry], basis.levels(view.keys)[lane, entry]
    lane, entry = (wanted & (view.counts > 1)).nonzero().unbind(1)
    if not len(lane):
        return
    codes = unpack(torch.cat((view.keys[lane, entry], view.values[lane, entry]), dim=-1), digits)
    counts = view.counts[lane, entry]
    span = torch.arange(len(lane)).repeat_interleave(counts)
    within = torch.arange(len(span)) - (counts.cumsum(0) - counts)[span]
    cell = cell_of(within, counts[span], codes.shape[1])
    first = first_token(view.positions, view.counts)[lane, entry]
    yield lane[span], entry[span], first[span] + within, centres(codes[span, cell])


def first_token(positions: Tensor, counts: Tensor) -> Tensor:
    """The first token of the span that an entry at its middle stands for."""
    return positions - counts // 2


def _equal(one: Lanes, other: Lanes) -> bool:
    """Whether all lanes of a layer are like the first of another."""
    return all(
        a.shape == b.shape and bool(torch.equal(a.nan_to_num(-1.0), b[:1].expand_as(a).nan_to_num(-1.0)))
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )
