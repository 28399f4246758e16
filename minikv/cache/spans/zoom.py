"""Rows of spans that are zoomed in while a sequence runs: from below the pool, put into its area.

    codes in the lane's entries, queries --worth_of--> worth of single tokens --choose--> which rows
    Below.rows --copies--> rows of the area                    (zoomed in)
    rows of the area --masked--> free for others               (zoomed out)

In each layer the queries of the very step choose, for each KV head. The entry of a span is muted: a query
sees a token that is not zoomed in not at all. What is here in torch is done by compiled kernels where a
backend has them (`minikv.kernels.cpu.zoom`).

All that is chosen by is where the pool is. On a device one copy a layer goes to the host, which tokens enter
which rows, and the host waits for that alone; rows come back by way of `PagePool.put`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minikv.cache.area import Area
from minikv.cache.lanes import LaneStore
from minikv.cache.pool import HOST
from minikv.cache.spans.codes import basis_entries, cells_of, centres, digits_of, first_of, unpack
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import MUTED, Zooming, choose, exchanged, worth_of

if TYPE_CHECKING:
    from minikv.cache.tiers.below import Below
    from minikv.kernels.batch import Batch

MOST_NUMBERS = 1 << 25
"""Of codes and scores that are made at once: those of as many KV heads as that allows, at least one."""

_ALL = slice(None)


@dataclass
class Counters:
    """What moved: rows and bytes put into areas, and steps in which any did, counted by layer."""

    rows: int = 0
    bytes: int = 0
    changes: int = 0


@dataclass(frozen=True)
class Cells:
    """Tokens that share a code, of one layer: [kv_heads, cells] int64. first: the first of them; size: how
    many, 0 where there is no cell."""

    first: Tensor
    size: Tensor

    @classmethod
    def of(cls, start: Tensor, size: Tensor, cells: int) -> Cells:
        """Those of spans [kv_heads, spans] with their first tokens and sizes."""
        size = size[..., None]
        before = first_of(torch.arange(cells + 1, device=size.device), size, cells)
        first = start[..., None] + before[..., :-1]
        return cls(first.flatten(1), (before[..., 1:] - before[..., :-1]).flatten(1))


class Zoom:
    """The spans of one sequence, as its lanes are now; to be made again when they are rewritten.

    The tensors are where the pool is, [layers, kv_heads, spans]: start and size (tokens; 0 where a place
    holds no span) and slot (of the entry with its codes). rows: [layers, kv_heads, rows], slots of the area
    but for the last, `meaning`, which hold what the codes mean; owner: the token that each row is of, -1 for
    none. beside: all rows of the area. digits: codes that a number holds. compiled: what a backend with
    kernels of its own makes of this.
    """

    def __init__(
        self,
        store: LaneStore,
        seq: int,
        area: Area,
        below: Below,
        zooming: Zooming,
        router: Router | None,
        counters: Counters,
    ) -> None:
        pool = store.pool
        self._pool, self._counters = pool, counters
        self.below, self.digits = below, digits_of(pool.dtype)
        self.router = None if router is None else router.on(pool.device)
        self._num_tokens = int(store.num_tokens[seq])
        counts = torch.from_numpy(store.counts(seq).numpy())
        slots, _ = store.slots(seq)
        start = _starts(store.positions(seq).long(), counts)
        able = _zoomable(start, counts, self._num_tokens, below.whole)
        # Entries that another policy has merged are seen, and hold no codes.
        able &= (pool.masses_and_positions(slots)[0] <= MUTED) & (below.basis is not None)
        most = max(1, int(able.sum(dim=-1).max()))
        order = able.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
        self.size, self.start = (
            (tokens * able).gather(-1, order).to(pool.device) for tokens in (counts, start)
        )
        self.slot = slots.gather(-1, order).to(pool.device)
        pages = torch.from_numpy(area.pages).long()
        area_rows = (pages[..., None] * pool.page_size + torch.arange(pool.page_size)).flatten(2)
        self.beside = area_rows.shape[-1]
        area_rows = area_rows.to(pool.device)
        self.rows, self.meaning = area_rows.tensor_split([-basis_entries(pool.head_dim)], dim=-1)
        if below.basis is not None:
            pool.write_rows(self.meaning, *below.basis.rows().chunk(2, dim=-1))
        self.owner = torch.full(self.rows.shape, -1, device=pool.device)
        self.compiled: Any = None
        self.zooming = replace(zooming, rows=min(zooming.rows, self.rows.shape[-1]))
        area.state, area.undo = self, self._undo

    @cached_property
    def any(self) -> bool:
        """Whether there is a span to zoom in."""
        return bool((self.size > 0).any()) and self.zooming.rows > 0

    @cached_property
    def _slots(self) -> Tensor:
        """`rows` on the host."""
        return self.rows.to(HOST)

    def decide(self, batch: Batch, sequence: int, layer: int, q: Tensor) -> Tensor:
        """Zoom out for the queries q [rows, query_heads, head_dim] of a sequence of the batch, and say which
        token is to enter each row: [kv_heads, rows] int64, -1 for none. The host waits for nothing."""
        cells = Cells.of(self.start[layer], self.size[layer], cells_of(self._pool.dtype))
        worth = self._worth(batch, sequence, layer, q, cells.size)
        zoomed = self._held(layer).gather(1, cells.first.clamp(max=self._num_tokens - 1)) & (cells.size > 0)
        chosen = choose(worth, cells.size, zoomed, self.zooming)
        free = self.zooming.rows - (self.owner[layer] >= 0).sum(dim=1)
        most = self.zooming.moves * len(q)
        entering, leaving = exchanged(chosen, zoomed, worth, cells.size, free, most, self.zooming)
        return self._change(layer, self._moving(cells, entering, leaving))

    def enter(self, layer: int, entering: Tensor) -> None:
        """Zoom in what `decide` said, which is on the host by now."""
        heads, rows = (entering >= 0).nonzero().unbind(1)
        if len(heads) and self._bring(layer, heads, rows, entering[heads, rows]):
            self.count(len(heads), 1)

    def _worth(self, batch: Batch, sequence: int, layer: int, q: Tensor, sizes: Tensor) -> Tensor:
        """Of a token of each cell, of which there are `sizes`: see `worth_of`."""
        heads, cells = sizes.shape
        at_once = max(1, MOST_NUMBERS // (cells * (len(q) * q.shape[1] // heads + q.shape[2])))
        worth = []
        for first in range(0, heads, at_once):
            some = slice(first, first + at_once)
            others = self._others(batch, sequence, layer, q, some)
            worth.append(worth_of(self._scores(layer, q, some), sizes[some], others))
        return torch.cat(worth)

    def _scores(self, layer: int, q: Tensor, some: slice = _ALL) -> Tensor:
        """What single tokens of each cell would score by their codes: [kv_heads, queries, cells], of some of
        the KV heads."""
        pool, heads = self._pool, self.slot.shape[1]
        codes = unpack(torch.cat(pool.read_rows(self.slot[layer, some], pool.device), dim=-1), self.digits)
        asking = _by_head(q, heads)[some]
        meaning = torch.cat(pool.read_rows(self.meaning[layer, some], pool.device), dim=-1).float()
        against = asking @ meaning.unflatten(-1, (2, -1)).flatten(1, 2).transpose(1, 2)
        constant, parts = against[..., :1], against[..., 1 : 1 + codes.shape[-1]]
        if self.router is not None:
            scale, bias = self.router.of_rows(layer, heads, len(q))
            parts, constant = parts * scale[some], constant + bias[some]
        return (parts @ centres(codes).flatten(1, 2).transpose(1, 2) + constant) / math.sqrt(q.shape[-1])

    def _others(self, batch: Batch, sequence: int, layer: int, q: Tensor, some: slice = _ALL) -> Tensor:
        """Log-sum-exp [kv_heads, queries] over what the lanes hold beside spans, the new rows included, of
        some of the KV heads."""
        pool, beside = self._pool, self.beside
        tables, past = batch.lanes_of(sequence)
        used = -(-(int(batch.past_lengths[sequence, layer].max()) + len(q)) // pool.page_size)
        pages = tables[layer, some, beside // pool.page_size : used]
        keys = pool.keys[pages].float()
        keys = keys if pool.keys_transposed else keys.transpose(2, 3)
        asking = _by_head(q, self.slot.shape[1])[some]
        scores = asking.unsqueeze(1) @ keys / math.sqrt(q.shape[-1])
        if pool.key_scales is not None:
            scores = scores * pool.key_scales[pages].unsqueeze(2)
        scores = scores.transpose(1, 2).flatten(2)
        entry = torch.arange(scores.shape[-1], device=pool.device)
        beyond = entry >= (past[layer, some] + len(q) - beside)[:, None]
        mass = pool.log_mass[pages].flatten(1).masked_fill(beyond, -torch.inf)
        return (scores + mass[:, None]).logsumexp(dim=-1)

    def _held(self, layer: int) -> Tensor:
        """Tokens [kv_heads, num_tokens] bool that are zoomed in."""
        owner = self.owner[layer]
        held = owner.new_zeros(len(owner), self._num_tokens + 1, dtype=torch.bool)
        return held.scatter_(1, owner + 1, True)[:, 1:]

    def _moving(self, cells: Cells, entering: Tensor, leaving: Tensor) -> Tensor:
        """The tokens of cells that enter or leave: [kv_heads, num_tokens] int64, 1, -1, or 0 for others."""
        which = entering.int() - leaving.int()
        edges = which.new_zeros(len(which), self._num_tokens + 1)
        edges.scatter_add_(1, cells.first, which)
        edges.scatter_add_(1, cells.first + cells.size, -which)
        return edges.cumsum(1)[:, :-1]

    def _change(self, layer: int, moving: Tensor) -> Tensor:
        """Let tokens leave their rows and others take rows that are free, in order, as `_moving` says; see
        `decide` for what it returns."""
        owner, rows, mass = self.owner[layer], self.rows[layer], self._pool.log_mass.view(-1)
        gone = (owner >= 0) & (moving.gather(1, owner.clamp(min=0)) < 0)
        mass[rows] = mass[rows].masked_fill(gone, -torch.inf)
        free = (owner < 0) | gone
        # The free row of some number takes the token of that number.
        number, order = free.cumsum(1), (moving > 0).cumsum(1)
        taken = free & (number <= order[:, -1:])
        tokens = torch.where(taken, torch.searchsorted(order, number), -1)
        self.owner[layer] = torch.where(free, tokens, owner)
        return tokens

    def put(self, layer: int, heads: Tensor, rows: Tensor) -> bool:
        """Get the rows [n] of KV heads [n] for their new owners from below. False, with everything zoomed
        out, if that is not possible any more."""
        return self._bring(layer, heads, rows, self.owner[layer, heads, rows])

    def _bring(self, layer: int, heads: Tensor, rows: Tensor, tokens: Tensor) -> bool:
        """`put`, of rows for tokens [n], all on the host."""
        found = self.below.rows(layer, heads, tokens)
        if found is None:
            self._undo()
            return False
        self._pool.put(self._slots[layer, heads, rows], found)
        # The next layer, or after the last one the next step, will most likely want some as well.
        self.below.ahead((layer + 1) % len(self.rows))
        return True

    def count(self, rows: int, changes: int) -> None:
        """Note what moved."""
        self._counters.rows += rows
        self._counters.bytes += rows * self._pool.page_bytes // self._pool.page_size
        self._counters.changes += changes

    def _undo(self) -> None:
        """Zoom everything out."""
        self._pool.log_mass.view(-1)[self.rows.flatten()] = -torch.inf
        self.owner.fill_(-1)

    def check(self) -> None:
        """Fail unless rows that are seen are those of tokens of spans, each once."""
        masses, tokens = self._pool.masses_and_positions(self.rows)
        owner, size, start = (tensor.to(HOST) for tensor in (self.owner, self.size, self.start))
        used = masses.isfinite()
        assert torch.equal(used, owner >= 0), "a row is seen that is of no token, or the other way round"
        assert int(used.sum(dim=-1).max()) <= self.zooming.rows, "more rows are zoomed in than may be"
        assert torch.equal(tokens[used].long(), owner[used]), "a row is of another token"
        inside = torch.zeros(*owner.shape[:2], self._num_tokens + 1, dtype=torch.int64)
        inside.scatter_add_(2, owner + 1, torch.ones_like(owner))
        assert int(inside[..., 1:].max()) <= 1, "a token is zoomed in twice"
        spans = torch.zeros_like(inside)
        some = size > 0
        layer, head, _ = some.nonzero().unbind(1)
        spans.index_put_((layer, head, start[some]), torch.tensor(1), accumulate=True)
        spans.index_put_((layer, head, (start + size)[some]), torch.tensor(-1), accumulate=True)
        covered = spans.cumsum(dim=-1)[..., :-1] > 0
        assert bool(covered[inside[..., 1:] > 0].all()), "a row is zoomed in that is of no span"


def _starts(positions: Tensor, counts: Tensor) -> Tensor:
    """The first token that each entry stands for, if it stands for neighbours: [layers, kv_heads, n] int64.

    In a lane that stands for every token, entries follow one another, and a token of its own is where it
    says. In others an entry is taken for the run around its position.
    """
    held = positions >= 0
    along = counts.cumsum(dim=-1) - counts
    around = positions - counts // 2
    near = ((along == positions) | (counts > 1)) & ((along - around).abs() <= 1)
    return torch.where((near | ~held).all(dim=-1, keepdim=True), along, around)


def _zoomable(start: Tensor, counts: Tensor, num_tokens: int, whole: Sequence[tuple[int, int]]) -> Tensor:
    """Entries that stand for a run of tokens all of which are below the pool: [layers, kv_heads, n] bool."""
    start = start.masked_fill(counts == 0, num_tokens)
    end = start + counts
    following = torch.cat((start[..., 1:], torch.full_like(start[..., :1], num_tokens)), dim=-1)
    inside = torch.zeros(num_tokens + 1, dtype=torch.int64)
    for first, last in whole:
        inside[first:last] = 1
    before = torch.cat((torch.zeros(1, dtype=torch.int64), inside.cumsum(0)))
    held = before[end.clamp(max=num_tokens)] - before[start.clamp(min=0, max=num_tokens)]
    # An entry that others were left out of ends before the next one begins.
    return (counts > 1) & (end == following) & (held == counts)


def _by_head(q: Tensor, heads: int) -> Tensor:
    """Queries [rows, query_heads, head_dim] as [kv_heads, group * rows, head_dim] float32."""
    folded = q.float().view(len(q), heads, -1, q.shape[-1])
    return folded.permute(1, 2, 0, 3).reshape(heads, -1, q.shape[-1])


@dataclass(frozen=True)
class Zoomed:
    """A sequence of a batch, at place `index`, that may have spans to zoom in."""

    index: int
    seq: int
    below: Below
    zooming: Zooming
    router: Router | None = None


@dataclass
class Routing:
    """What the sequences of a batch zoom in while it is computed. zooms: their places in the batch, and what
    they may zoom in. A backend with kernels of its own reads that; for others this does the work."""

    batch: Batch
    zooms: list[tuple[int, Zoom]]

    def __call__(self, layer: int, q: Tensor) -> None:
        """Zoom in and out for the queries q [T, query_heads, head_dim] of all rows of the batch."""
        starts = self.batch.row_starts
        decided = [
            (zoom, zoom.decide(self.batch, index, layer, q[starts[index] : starts[index + 1]]))
            for index, zoom in self.zooms
            if not zoom.below.lost
        ]
        if not decided:
            return
        # All at once: this is what the host waits for.
        entering = torch.cat([tokens.flatten() for _, tokens in decided]).to(HOST)
        parts = entering.split([tokens.numel() for _, tokens in decided])
        for (zoom, tokens), part in zip(decided, parts, strict=True):
            zoom.enter(layer, part.view(tokens.shape))


def zoom_in(store: LaneStore, batch: Batch, sequences: Sequence[Zoomed], counters: Counters) -> None:
    """Let sequences of a batch zoom in while it is computed, those that have an area and spans for it."""
    routed: list[tuple[int, Zoom]] = []
    for item in sequences:
        area = store.areas[item.seq]
        if area is None or item.below.lost:
            continue
        zoom = area.state or Zoom(store, item.seq, area, item.below, item.zooming, item.router, counters)
        if zoom.any:
            routed.append((item.index, zoom))
    if routed:
        batch.route = Routing(batch, routed)
