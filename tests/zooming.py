"""Random lanes with spans to zoom in, for tests of the kernels that choose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool
from minikv.cache.spans.codes import Basis, basis_entries, cells_of, digits_of, pack
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import MUTED, Zooming
from minikv.cache.spans.zoom import Counters, Routing, Zoom
from minikv.cache.tiers.below import Below
from minikv.cache.tiers.storage import Storage
from minikv.cache.tiers.tiers import Tiers
from minikv.cache.tiers.warm import WarmTier
from minikv.config import TierConfig
from minikv.kernels.batch import Batch
from minikv.models.config import RopeConfig
from minikv.models.rope import Rope

PAGE = 32
LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """Of a sequence and what it may zoom in. longest: tokens of a span, at least two."""

    dtype: torch.dtype = torch.float16
    head_dim: int = 64
    group: int = 3
    heads: int = 3
    spans: int = 60
    longest: int = 24
    rows: int = 90
    moves: int = 1000
    router: bool = False
    parts: int = 1


class Sequence:
    """Lanes of their own lengths on shuffled pages; each layer's spans are of the same tokens, and what the
    lanes hold between is random."""

    def __init__(self, shape: Shape, seed: int, pool: PagePool | None = None) -> None:
        self.shape = shape
        self._random = torch.Generator().manual_seed(seed)
        self.sizes = torch.randint(2, shape.longest + 1, (shape.spans,), generator=self._random)
        gaps = torch.randint(0, 3, (shape.spans,), generator=self._random) + 1
        self.starts = (self.sizes + gaps).cumsum(0) - self.sizes
        self.num_tokens = int(self.starts[-1] + self.sizes[-1]) + 5
        self.per_lane = -(-(shape.rows + basis_entries(shape.head_dim)) // PAGE)
        self.pool = pool or pool_for(shape, 1)
        self.below = self._demoted()
        self.pages: list[list[Tensor]] = []
        self.lengths = torch.zeros(LAYERS, shape.heads, dtype=torch.int64)
        self.slot = torch.zeros(LAYERS, shape.heads, shape.spans, dtype=torch.int64)
        for layer in range(LAYERS):
            self.pages.append([self._lane(layer, head) for head in range(shape.heads)])
        self.zoom = self._zoom()

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._random)

    def _demoted(self) -> Below:
        """Exact rows of all tokens, in a warm tier."""
        shape, count = self.shape, self.num_tokens
        storage = Storage(Tiers(WarmTier(1 << 30)), TierConfig(warm="1GiB"), bytes(32), rope_of(shape))
        below = Below(storage)
        pool = PagePool(-(-count // PAGE) * LAYERS * shape.heads, PAGE, shape.head_dim, shape.dtype)
        store = LaneStore(pool, 1, LAYERS, shape.heads, count)
        seq = store.open()
        for start, end in zip(*self._cuts(), strict=True):
            assert store.reserve(seq, end - start)
            slots = torch.from_numpy(store.next_slots(seq, end - start))
            pool.write_rows(slots, *self._normal(2, *slots.shape, shape.head_dim))
            pool.write_entries(slots, torch.arange(start, end))
            store.append(seq, end - start)
            below.add(store, seq, end)
        assert not below.lost
        below.basis = Basis.stacked([self._basis() for _ in range(LAYERS)])
        return below

    def _cuts(self) -> tuple[list[int], list[int]]:
        edges = [self.num_tokens * part // self.shape.parts for part in range(self.shape.parts + 1)]
        return edges[:-1], edges[1:]

    def _basis(self) -> Basis:
        heads, dim = self.shape.heads, self.shape.head_dim
        decoder = 0.1 * self._normal(heads, dim // 4, dim)
        return Basis(self._normal(heads, dim).half(), decoder.half(), decoder.half())

    def _lane(self, layer: int, head: int) -> Tensor:
        """Pages of a lane, area first: spans with entries of single tokens between, a few of which count for
        more."""
        shape, pool = self.shape, self.pool
        single = torch.randint(0, 2, (shape.spans + 1,), generator=self._random)
        at = torch.arange(shape.spans) + single[:-1].cumsum(0)
        length = int(at[-1]) + 1 + 3 * head
        ids = torch.from_numpy(pool.allocate(self.per_lane + -(-(length + 64) // PAGE)))
        ids = ids[torch.randperm(len(ids), generator=self._random)]
        pool.log_mass[ids[: self.per_lane]] = -torch.inf
        slots = (ids[self.per_lane :, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        pool.write_rows(slots, *self._normal(2, length, shape.head_dim))
        mass = torch.where(torch.rand(length, generator=self._random) < 0.2, 1.5, 0.0)
        mass[at] = MUTED
        pool.write_entries(slots, torch.arange(length), mass)
        codes = torch.randint(0, 16, (shape.spans, cells_of(shape.dtype), shape.head_dim // 4)).float()
        codes.random_(0, 16, generator=self._random)
        pool.write_rows(slots[at], *pack(codes, digits_of(shape.dtype)).chunk(2, dim=-1))
        self.slot[layer, head] = slots[at]
        self.lengths[layer, head] = self.per_lane * PAGE + length
        return ids

    def _zoom(self) -> Zoom:
        shape, pool = self.shape, self.pool
        zoom = Zoom.__new__(Zoom)
        zoom._pool, zoom._counters, zoom._num_tokens = pool, Counters(), self.num_tokens
        zoom.below, zoom.digits, zoom.compiled = self.below, digits_of(shape.dtype), None
        zoom.router = None
        if shape.router:
            heads = shape.heads * shape.group
            scale = 1 + 0.3 * self._normal(LAYERS, heads, shape.head_dim // 4)
            zoom.router = Router(scale, self._normal(LAYERS, heads)).on(pool.device)
        zoom.size = self.sizes.expand(LAYERS, shape.heads, -1).contiguous().to(pool.device)
        zoom.start = self.starts.expand(LAYERS, shape.heads, -1).contiguous().to(pool.device)
        zoom.slot = self.slot.to(pool.device)
        areas = torch.stack([torch.stack([ids[: self.per_lane] for ids in layer]) for layer in self.pages])
        area = (areas[..., None] * PAGE + torch.arange(PAGE)).flatten(2).to(pool.device)
        zoom.beside = area.shape[-1]
        zoom.rows, zoom.meaning = area.tensor_split([-basis_entries(shape.head_dim)], dim=-1)
        assert self.below.basis is not None
        pool.write_rows(zoom.meaning, *self.below.basis.rows().chunk(2, dim=-1))
        zoom.owner = torch.full(zoom.rows.shape, -1, device=pool.device)
        zoom.zooming = Zooming(shape.rows, shape.moves, least=1e-4)
        return zoom

    def queries(self, count: int) -> Tensor:
        """Random queries [count, query_heads, head_dim]."""
        return self._normal(count, self.shape.heads * self.shape.group, self.shape.head_dim)

    def write_new(self, count: int) -> None:
        """Random new rows at the end of every lane."""
        for layer in range(LAYERS):
            for head, ids in enumerate(self.pages[layer]):
                entry = int(self.lengths[layer, head]) + torch.arange(count)
                slots = ids[entry // PAGE] * PAGE + entry % PAGE
                self.pool.write_rows(slots, *self._normal(2, count, self.shape.head_dim))
                self.pool.write_entries(slots, entry)


def rope_of(shape: Shape) -> Rope:
    """The plain rotation."""
    return Rope(RopeConfig(), shape.head_dim)


def pool_for(shape: Shape, sequences: int, device: torch.device | None = None) -> PagePool:
    """A pool laid out for the compiled kernels, or as those of a device are."""
    pages = sequences * LAYERS * shape.heads * (shape.rows // PAGE + shape.spans // 8 + 12)
    place = device or torch.device("cpu")
    return PagePool(pages, PAGE, shape.head_dim, shape.dtype, keys_transposed=device is None, device=place)


def batch_of(sequences: list[Sequence], rows: list[int]) -> Batch:
    """A batch in which sequences of one pool have so many rows each."""
    shape, pool = sequences[0].shape, sequences[0].pool
    starts = [0, *torch.tensor(rows).cumsum(0).tolist()]
    longest = max(len(ids) for one in sequences for layer in one.pages for ids in layer)
    pages = torch.zeros(len(sequences), LAYERS, shape.heads, longest, dtype=torch.int32)
    for place, one in enumerate(sequences):
        for layer in range(LAYERS):
            for head, ids in enumerate(one.pages[layer]):
                pages[place, layer, head, : len(ids)] = ids
    total, past = starts[-1], torch.stack([one.lengths for one in sequences])
    numbers = torch.arange(total)
    batch = Batch(pool, numbers, numbers, numbers + 1, starts, numbers, pages, past, [True] * len(rows))
    batch.route = Routing(batch, [(place, one.zoom) for place, one in enumerate(sequences)])
    return batch


def routed(shape: Shape, device: torch.device, counts: tuple[int, ...] = (1, 1, 5, 1, 2)) -> Tensor:
    """Tokens [layers, kv_heads, num_tokens] bool that plain torch has zoomed in on a device, after steps of
    so many rows each; fails unless the rows of the area are theirs."""
    one = Sequence(shape, 3, pool_for(shape, 1, device))
    for count in counts:
        one.write_new(count)
        batch, q = batch_of([one], [count]), one.queries(count).to(device)
        assert batch.route is not None
        for layer in range(LAYERS):
            batch.route(layer, q)
        one.zoom.check()
    owner = one.zoom.owner.to("cpu")
    for layer in range(LAYERS):
        heads, rows = (owner[layer] >= 0).nonzero().unbind(1)
        wanted = one.below.rows(layer, heads, owner[layer, heads, rows])
        assert wanted is not None
        for a, b in zip(wanted, one.pool.stored(one.zoom.rows.to("cpu")[layer, heads, rows]), strict=True):
            assert (a is None and b is None) or torch.equal(a, b), "a row is not what lies below"
    held = torch.zeros(*owner.shape[:2], one.num_tokens + 1, dtype=torch.bool)
    return held.scatter_(2, owner + 1, True)[..., 1:]
