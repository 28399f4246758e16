"""The batch object: everything one forward pass needs, so that no module keeps state of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minikv.cache.pool import PagePool
    from minikv.cache.spans.zoom import Routing
    from minikv.cache.stage import Stage


@dataclass
class Batch:
    """One forward pass over T rows of S sequences, rows of one sequence adjacent.

    token_ids, positions: [T] int64; a position is logical and independent of the physical slot.
    rope_lengths: [T] int64, the sequence length each row's rotary frequencies are computed for.
    row_starts: S + 1 offsets; sequence s owns rows row_starts[s]:row_starts[s + 1].
    logit_rows: rows whose logits are wanted.
    lane_pages: [S, layers, kv_heads, P] int32, page ids, with those of the new rows; unused places
        hold page 0, always zero.
    past_lengths: [S, layers, kv_heads] int64, entries in each lane before this pass.
    has_mass: whether a sequence holds entries whose log mass is not zero.
    mass_ends: [S, layers, kv_heads] int64, from which entry on none of a lane has a log mass; None if that is
        not known, or where no sequence has any.
    cos, sin: [T, head_dim] float32, filled in by the decoder once per pass; with `angles_by_position`
        they are tables by position instead (compiled kernels only).
    plan: the backend's own preparation, filled in by `AttentionBackend.plan`.
    capture_rows: [R] int64, rows whose queries are wanted, or None.
    captured: [layers, R, query_heads, head_dim] float32, their rotated queries, filled in by the decoder.
    captured_norms: [layers, R] float32, the norms of the residual streams that they were made from, before
        each layer's attention norm.
    route: what sequences zoom in and out in each layer between writing and attending, for the rotated queries
        [T, query_heads, head_dim] float32 of all rows, or None. It changes entries of the pool that lanes
        of the batch hold, and no lane.
    stages: what sequences have below the pool, put into it layer by layer at the same place as `route`.
    likeliest: [len(logit_rows)] int32, the token of the largest logit, -1 where one is not finite; filled
        in by a decoder that finds it on the way.

    Query row t of a sequence sees all entries that its lane held before the pass, and the rows
    0..t of the pass.
    """

    pool: PagePool
    token_ids: Tensor
    positions: Tensor
    rope_lengths: Tensor
    row_starts: list[int]
    logit_rows: Tensor
    lane_pages: Tensor
    past_lengths: Tensor
    has_mass: list[bool]
    cos: Tensor = field(default_factory=lambda: torch.empty(0))
    sin: Tensor = field(default_factory=lambda: torch.empty(0))
    angles_by_position: bool = False
    plan: Any = None
    capture_rows: Tensor | None = None
    captured: Tensor | None = None
    captured_norms: Tensor | None = None
    route: Routing | None = None
    stages: Sequence[Stage] = ()
    likeliest: Tensor | None = None
    mass_ends: Tensor | None = None

    _lanes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def make_room_for_captures(self, num_layers: int, query_heads: int, head_dim: int) -> None:
        """Allocate what a decoder fills in of the rows to capture, if there are any."""
        if self.capture_rows is not None:
            count = len(self.capture_rows)
            self.captured = torch.empty(num_layers, count, query_heads, head_dim)
            self.captured_norms = torch.empty(num_layers, count)

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.row_starts) - 1

    def lanes_of(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Page ids [layers, kv_heads, n] int64 and entries before this pass [layers, kv_heads] int64 of a
        sequence, where the pool is; copied there once."""
        if sequence not in self._lanes:
            past = self.past_lengths[sequence]
            most = int(past.max()) + self.row_starts[sequence + 1] - self.row_starts[sequence]
            pages = self.lane_pages[sequence, ..., : -(-most // self.pool.page_size)].long()
            self._lanes[sequence] = pages.to(self.pool.device), past.to(self.pool.device)
        return self._lanes[sequence]

    @cached_property
    def slots(self) -> Tensor:
        """The pool row that each new key and value is written to: [layers, kv_heads, T] int64."""
        parts = []
        for s, (start, stop) in enumerate(itertools.pairwise(self.row_starts)):
            entry = self.past_lengths[s].unsqueeze(-1) + torch.arange(stop - start)
            page = self.lane_pages[s].gather(-1, entry // self.pool.page_size)
            parts.append(page.long() * self.pool.page_size + entry % self.pool.page_size)
        return torch.cat(parts, dim=-1)

    @cached_property
    def signed_sin(self) -> Tensor:
        """sin with its first half negated: x cos + roll(x, head_dim / 2) signed_sin rotates."""
        half = self.sin.shape[-1] // 2
        return torch.cat((-self.sin[:, :half], self.sin[:, half:]), dim=-1)
