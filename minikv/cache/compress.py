"""The compressor: asks a policy which entries of a sequence stay, and lets the store drop the others.

What it sees to itself, for every policy: sinks, recent entries and pinned ranges stay; the budget
counts all entries; a budget that holds everything changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minikv.cache.ceiling import Ceiling
from minikv.cache.evidence import Recorded
from minikv.cache.lanes import LaneStore
from minikv.cache.policies.base import Allocation, LayerView, Policy
from minikv.cache.policies.select import select
from minikv.cache.policies.window import Window
from minikv.config import CacheConfig
from minikv.errors import ConfigError
from minikv.models.config import ModelConfig
from minikv.sizes import format_size

Ranges = Sequence[tuple[int, int]]


class Weights(Protocol):
    """What the compressor needs of a decoder."""

    config: ModelConfig

    def output_weight(self, layer: int) -> Tensor:
        """The output projection of a layer's attention: [hidden, query_heads * head_dim] float32."""
        ...


@dataclass(frozen=True)
class Report:
    """What a compression did: (before, after) entries over all lanes, and bytes of pages; seconds taken."""

    entries: tuple[int, int]
    bytes: tuple[int, int]
    seconds: float


class Compressor:
    """Compresses sequences of one store. Layers are read, scored and moved one at a time."""

    def __init__(self, store: LaneStore, model: Weights):
        self.store = store
        self.model = model

    def compress(
        self,
        seq: int,
        policy: Policy,
        cache: CacheConfig,
        num_tokens: int,
        recorded: Recorded,
        pinned: Ranges = (),
        room: int = 0,
        of_tokens: int | None = None,
    ) -> Report:
        """`choose`, and drop the rest; pages no longer needed are free when this returns."""
        started = time.perf_counter()
        entries, held = int(self.store.lengths[seq].sum()), self.store.bytes_of(seq)
        keep = self.choose(seq, policy, cache, num_tokens, recorded, pinned, room, of_tokens)
        kept = int(keep.sum())
        if kept < entries:
            self.store.rewrite(seq, keep)
        seconds = time.perf_counter() - started
        return Report((entries, kept), (held, self.store.bytes_of(seq)), seconds)

    @torch.inference_mode()
    def choose(
        self,
        seq: int,
        policy: Policy,
        cache: CacheConfig,
        num_tokens: int,
        recorded: Recorded,
        pinned: Ranges = (),
        room: int = 0,
        of_tokens: int | None = None,
    ) -> Tensor:
        """Which entries stay: [layers, kv_heads, n] bool, over the entries as `LaneStore.slots` lists them.

        num_tokens: logical length of the sequence.
        pinned: token ranges that stay, besides those of `cache`.
        room: entries per lane that are to fit beside those kept; for a budget in bytes only.
        of_tokens: the length that a fractional budget is a fraction of; None: `num_tokens`.

        A policy whose evidence was not recorded gives way to the window policy. Raises ConfigError when
        pinned tokens alone pass a budget in bytes.
        """
        lengths = torch.from_numpy(self.store.lengths[seq]).long()
        valid = torch.arange(int(lengths.max())) < lengths[..., None]
        limit = cache.limit
        if limit is None:
            return valid
        ceiling = None
        if limit.kind == "bytes":
            ceiling = Ceiling.of(limit, self.store)
            fits = ceiling.pages(lengths.numpy(), room) <= ceiling.max_pages
            total = ceiling.max_pages * ceiling.page_size - self.store.num_lanes * room
            capacity = ceiling.per_lane - room
        else:
            total = limit.entries(of_tokens or num_tokens, self.store.num_lanes)
            fits = total >= int(lengths.sum()) or num_tokens <= cache.too_short
            capacity = total // self.store.num_lanes
        if fits:
            return valid
        positions = self.store.positions(seq)
        protected = _protected(positions, lengths, cache, (*cache.pinned, *pinned), capacity)
        floors = protected.sum(dim=-1)
        if not recorded.serves(policy.evidence):
            policy = Window()
        if ceiling is not None and ceiling.pages(floors.numpy(), room) > ceiling.max_pages:
            raise ConfigError(_pinned_too_much(int(floors.max()), ceiling))
        scores = self._scores(seq, policy, num_tokens, recorded, protected, valid)
        question = Allocation(scores, lengths, floors, max(total, int(floors.sum())))
        if ceiling is None:
            return select(scores, policy.allocate(question))
        return select(scores, _allocate_pages(policy, question, ceiling, room))

    def view(
        self, seq: int, layer: int, num_tokens: int, recorded: Recorded, output: bool = True
    ) -> LayerView:
        """One layer of a sequence as policies see it; without `output` its output_weight is empty."""
        store, pool = self.store, self.store.pool
        lengths = torch.from_numpy(store.lengths[seq, layer]).long()
        heads, longest = len(lengths), int(lengths.max())
        pages = torch.from_numpy(store.pages[seq, layer, :, : -(-longest // pool.page_size)]).long()
        keys, values = pool.read_pages(pages.reshape(-1))
        valid = torch.arange(longest) < lengths[:, None]
        positions = pool.positions[pages].view(heads, -1)[:, :longest].long()
        queries, query_heads = recorded.queries, recorded.query_heads
        return LayerView(
            layer=layer,
            keys=keys.view(heads, -1, pool.head_dim)[:, :longest].float(),
            values=values.view(heads, -1, pool.head_dim)[:, :longest].float(),
            log_mass=pool.log_mass[pages].view(heads, -1)[:, :longest],
            positions=positions.masked_fill(~valid, -1),
            valid=valid,
            num_tokens=num_tokens,
            group=self.model.config.group_size,
            output_weight=self.model.output_weight(layer) if output else torch.empty(0, 0),
            queries=None if queries is None else queries[layer],
            query_heads=None if query_heads is None else query_heads[layer],
            query_positions=recorded.query_positions,
            statistics=recorded.statistics(layer),
            surprisal=recorded.surprisal,
        )

    def _scores(
        self, seq: int, policy: Policy, num_tokens: int, recorded: Recorded, protected: Tensor, valid: Tensor
    ) -> list[Tensor]:
        """Per layer [kv_heads, n] float32, +inf for protected entries and -inf past a lane's end."""
        scores = []
        for layer, (inside, held) in enumerate(zip(valid, protected, strict=True)):
            longest = int(inside.sum(dim=-1).max())
            view = self.view(
                seq, layer, num_tokens, recorded, getattr(policy.evidence, "output_weight", True)
            )
            given = policy.score(view).float()
            given = given.masked_fill(held[:, :longest], torch.inf)
            scores.append(given.masked_fill(~inside[:, :longest], -torch.inf))
        return scores


def _protected(
    positions: Tensor, lengths: Tensor, cache: CacheConfig, pinned: Ranges, capacity: int
) -> Tensor:
    """Entries that stay whatever their scores: [layers, kv_heads, n] bool, at most `capacity` per lane
    beside pinned ones; recent entries give way before sinks."""
    valid = positions >= 0
    place = torch.arange(positions.shape[-1])
    held = torch.zeros_like(valid)
    for start, end in pinned:
        held |= (positions >= start) & (positions < end)
    sinks, recent = cache.sinks, cache.recent
    while True:
        ends = (place < sinks) | (place >= lengths[..., None] - recent)
        mask = (held | ends) & valid
        excess = int(mask.sum(dim=-1).max()) - capacity
        if excess <= 0 or not (recent or sinks):
            return mask
        if recent:
            recent = max(0, recent - excess)
        else:
            sinks = max(0, sinks - excess)


def _allocate_pages(policy: Policy, question: Allocation, ceiling: Ceiling, room: int) -> Tensor:
    """Counts [layers, kv_heads] of a policy whose lanes, with `room` entries more in each, fit the ceiling.

    Lanes end within a page, so the entries that fit depend on how they are divided: the total is
    lowered until the pages suffice, and then every lane takes what its pages hold.
    """
    least = int(question.protected.sum())
    lengths = question.lengths.numpy()
    total = question.total
    while True:
        counts = policy.allocate(Allocation(question.scores, question.lengths, question.protected, total))
        excess = ceiling.pages(counts.numpy(), room) - ceiling.max_pages
        if excess <= 0:
            return torch.from_numpy(ceiling.filled(counts.numpy(), lengths, room))
        assert total > least, "the protected entries were found to fit"
        total = max(least, total - excess * ceiling.page_size)


def _pinned_too_much(count: int, ceiling: Ceiling) -> str:
    least = -(-(count + 1) // ceiling.page_size) * ceiling.num_lanes * ceiling.page_bytes
    return (
        f"The {count} tokens that are pinned do not fit a budget of "
        f"{format_size(ceiling.max_pages * ceiling.page_bytes)}; it must be at least {format_size(least)}."
    )
