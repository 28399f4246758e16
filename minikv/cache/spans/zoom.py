"""Spans that are zoomed in while a sequence runs: rows from below the pool, put into its area.

    Below.rows --copies--> rows of the area, whose summary is then masked      (zoomed in)
    rows of the area --masked--> free for others; the summary counts again     (zoomed out)

In each layer the queries of the very step choose (`choose`), for each KV head. A query then sees a span
either as its summary or as its rows, never both: the other has the log mass -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.area import Area
from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import MUTED, Zooming, bound_scores, choose, masses
from minikv.errors import ConfigError

if TYPE_CHECKING:
    from minikv.cache.tiers.below import Below
    from minikv.kernels.batch import Batch


def check_device(pool: PagePool, policy: str) -> None:
    """ConfigError unless what a policy keeps in a pool can be zoomed in there."""
    if pool.device.type != "cpu":
        raise ConfigError(
            f"policy {policy} runs on the CPU alone; load the model with device cpu, or take another policy."
        )


@dataclass
class Counters:
    """What moved: rows and bytes put into areas, and steps in which any did, counted by layer."""

    rows: int = 0
    bytes: int = 0
    changes: int = 0


class Zoom:
    """The spans of one sequence, as its lanes are now; to be made again when they are rewritten.

    The tensors are [layers, kv_heads, spans]: start and size (tokens; 0 where a place holds no span), place
    (of the summary in its lane), mass (its log mass as attention sees it), weight (that of its tokens, by
    which it is routed), zoomed, worth. owner: [layers, kv_heads, rows], the span that a row of the area is
    of, -1 for none.
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
        self._pool, self._below, self._zooming, self._router = pool, below, zooming, router
        self._counters = counters
        counts = torch.from_numpy(store.counts(seq).numpy())
        slots, _ = store.slots(seq)
        positions = store.positions(seq).long()
        start = _starts(positions, counts)
        able = _zoomable(start, counts, int(store.num_tokens[seq]), below.whole)
        most = max(1, int(able.sum(dim=-1).max()))
        order = able.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
        self.size = (counts * able).gather(-1, order)
        self.place = order.masked_fill(self.size == 0, 0)
        self.start = start.gather(-1, order)
        self.slot = slots.gather(-1, order)
        self.mass = pool.log_mass.view(-1)[self.slot].masked_fill(self.size == 0, -torch.inf)
        self.weight = self.size.float().log()
        self._bounds = bool((self.mass[self.size > 0] <= MUTED).all())
        self.zoomed = torch.zeros_like(able[..., :most])
        self.worth = torch.full(self.size.shape, torch.nan)
        pages = torch.from_numpy(area.pages).long()
        self.rows = (pages[..., None] * pool.page_size + torch.arange(pool.page_size)).flatten(2)
        self.owner = torch.full(self.rows.shape, -1)
        self._most = min(zooming.rows, self.rows.shape[-1])
        area.state, area.undo = self, self._undo

    @property
    def any(self) -> bool:
        """Whether there is a span to zoom in."""
        return bool((self.size > 0).any()) and self._most > 0

    def route(self, batch: Batch, sequence: int, layer: int, q: Tensor) -> None:
        """Zoom in and out for the queries q [rows, query_heads, head_dim] of a sequence of the batch."""
        if self._below.lost:
            return
        found = self._measure(batch, sequence, layer, q)
        decay, before = self._zooming.decay, self.worth[layer]
        worth = torch.where(before.isnan(), found, decay * before + (1 - decay) * found)
        self.worth[layer] = worth
        size, zoomed, most = self.size[layer], self.zoomed[layer], self._most
        new = most if self._zooming.new_rows is None else self._zooming.new_rows
        chosen = choose(worth, size, zoomed, most, new, self._zooming.hold, self._zooming.least)
        chosen &= size > 0
        fresh = chosen & ~zoomed
        if bool(fresh.any()):
            self._change(layer, fresh, zoomed & ~chosen)

    def _measure(self, batch: Batch, sequence: int, layer: int, q: Tensor) -> Tensor:
        """Attention mass [kv_heads, spans] of each, in the attention that the queries would give now."""
        rows = len(q)
        pages, seen, scores = self._seen(batch, sequence, layer, q)
        size, heads = self.rows.shape[-1], len(pages)
        if self._bounds:
            router = self._router
            asking = q if router is None else router.queries(layer, q)
            estimate = bound_scores(_by_head(asking, heads), *self._ends(layer))
            if router is not None:
                group = q.shape[1] // heads
                offsets = router.offsets(layer, self.weight[layer], group)
                estimate = estimate + offsets.repeat_interleave(rows, dim=1)
            estimate = estimate.masked_fill(self.size[layer][:, None] == 0, -torch.inf)
            # Zoomed in or not, by the same measure: what a bound says is no mass that rows could be held to.
            lanes = seen[..., size:].logsumexp(dim=-1)
            return masses(estimate, torch.logaddexp(estimate.logsumexp(dim=-1), lanes))
        total = seen.logsumexp(dim=-1)
        place = (self.place[layer] + size)[:, None].expand(-1, scores.shape[1], -1)
        found = masses(scores.gather(2, place) + self.weight[layer][:, None], total)
        # Of rows that are there the mass is known.
        real = masses(seen[..., :size], total)
        inside = torch.zeros(heads, found.shape[1] + 1)
        inside.scatter_add_(1, self.owner[layer] + 1, real)
        return torch.where(self.zoomed[layer], inside[:, 1:], found)

    def _ends(self, layer: int) -> tuple[Tensor, Tensor]:
        """Bounds [kv_heads, spans, head_dim] of the keys of a layer's spans."""
        high, low = self._pool.read_rows(self.slot[layer])
        return high.float(), low.float()

    def _seen(self, batch: Batch, sequence: int, layer: int, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pages [kv_heads, n], and scores [kv_heads, queries, entries] with their log masses and without, of
        area and lane together; -inf past a lane's end."""
        pool, width = self._pool, q.shape[-1]
        lengths = batch.past_lengths[sequence, layer] + len(q)
        used = -(-int(lengths.max()) // pool.page_size)
        pages = batch.lane_pages[sequence, layer, :, :used].long()
        keys = pool.keys[pages].float()
        keys = keys if pool.keys_transposed else keys.transpose(2, 3)
        scores = _by_head(q, len(pages)).unsqueeze(1) @ keys / math.sqrt(width)
        if pool.key_scales is not None:
            scores = scores * pool.key_scales[pages].unsqueeze(2)
        scores = scores.transpose(1, 2).flatten(2)
        beyond = torch.arange(scores.shape[-1]) >= lengths[:, None]
        mass = pool.log_mass[pages].flatten(1).masked_fill(beyond, -torch.inf)
        return pages, scores + mass[:, None], scores

    def _change(self, layer: int, fresh: Tensor, leaving: Tensor) -> None:
        pool = self._pool
        size, owner = self.size[layer], self.owner[layer]
        # The rows of spans that come, head after head and span after span.
        head, span = fresh.nonzero().unbind(1)
        lengths = size[head, span]
        heads = head.repeat_interleave(lengths)
        spans = span.repeat_interleave(lengths)
        first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        tokens = self.start[layer][heads, spans] + torch.arange(len(heads)) - first
        found = self._below.rows(layer, heads, tokens)
        if found is None:
            self._undo()
            return
        masses = pool.log_mass.view(-1)
        gone = (owner >= 0) & leaving.gather(1, owner.clamp(min=0))
        masses[self.rows[layer][gone]] = -torch.inf
        owner[gone] = -1
        masses[self.slot[layer][leaving]] = self.mass[layer][leaving]
        free = owner < 0
        wanted = torch.zeros(len(owner), dtype=torch.int64).index_add_(0, head, lengths)
        taken = free & (free.cumsum(1) <= wanted[:, None])
        owner[taken] = spans
        pool.put(self.rows[layer][taken], found)
        masses[self.slot[layer][fresh]] = -torch.inf
        self.zoomed[layer] = (self.zoomed[layer] & ~leaving) | fresh
        counters = self._counters
        counters.rows += len(heads)
        counters.bytes += len(heads) * pool.page_bytes // pool.page_size
        counters.changes += 1

    def _undo(self) -> None:
        """Zoom everything out."""
        masses = self._pool.log_mass.view(-1)
        masses[self.rows.flatten()] = -torch.inf
        masses[self.slot[self.zoomed]] = self.mass[self.zoomed]
        self.owner.fill_(-1)
        self.zoomed.fill_(False)
        self.worth.fill_(torch.nan)

    def check(self) -> None:
        """Fail unless each span is seen once, by its summary or by all its rows."""
        masses = self._pool.log_mass.view(-1)
        inside = torch.zeros(*self.size.shape[:2], self.size.shape[2] + 1, dtype=torch.int64)
        inside.scatter_add_(2, self.owner + 1, torch.ones_like(self.owner))
        assert torch.equal(inside[..., 1:], self.size * self.zoomed), "a span is not zoomed in whole"
        used = masses[self.rows].isfinite()
        assert torch.equal(used, self.owner >= 0), "a row is seen that is of no span, or the other way round"
        wanted = self.mass.masked_fill(self.zoomed, -torch.inf)[self.size > 0]
        assert torch.equal(masses[self.slot[self.size > 0]], wanted), "a summary has a wrong mass"
        assert int((self.owner >= 0).sum(dim=-1).max()) <= self._most, "more rows are zoomed in than may be"


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
    if not routed:
        return

    def route(layer: int, q: Tensor) -> None:
        for index, zoom in routed:
            rows = slice(batch.row_starts[index], batch.row_starts[index + 1])
            zoom.route(batch, index, layer, q[rows])

    batch.route = route
