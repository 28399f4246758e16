"""What is kept of a sequence, by whose choice, and when the choice falls due.

Everything here follows from token counts and lane lengths alone, never from batch mates, so a request
is compressed at the same tokens whatever it runs beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minikv.cache.ceiling import Ceiling
from minikv.cache.compress import evidence_for
from minikv.cache.lanes import LaneStore
from minikv.cache.policies.base import AnyPolicy, Evidence
from minikv.cache.policies.profile import HeadProfile
from minikv.cache.policies.registry import ZOOMING_NAMES, make_policy
from minikv.cache.protect import Ranges
from minikv.cache.spans.router import Router
from minikv.cache.spans.share import area_of, lanes_part
from minikv.config import CacheConfig, EngineConfig
from minikv.errors import ConfigError

_MOST_KEPT = 64
_SEALED = 64  # tokens after which what has left the window is cut into spans
_ROUTED = 32  # rows of a prompt that choose together which spans are zoomed in

FindProfile = Callable[[CacheConfig], HeadProfile | None]
"""The calibration profile that a cache configuration names or implies."""

FindRouter = Callable[[CacheConfig], Router | None]
"""The router that it names or implies."""


class Retention:
    """A cache configuration with its policy, for sequences of one store; by default all is kept.

    A prompt in exact mode grows freely and is compressed at its end. A streaming prompt is compressed
    whenever it has grown `stride` entries per lane above the budget, a decoding sequence `slack` entries.
    Under a budget in bytes both must fit the ceiling as well, and a compression leaves room for them.

    What a policy that `zooms` merges is kept below the pool; its lanes get `lanes_part` of the budget, and
    what is zoomed in the rest. `routed` rows of a prompt, and single rows of a reply, choose together.

    evidence: what is to be recorded.
    """

    def __init__(
        self,
        cache: CacheConfig | None = None,
        policy: AnyPolicy | None = None,
        store: LaneStore | None = None,
        prefill_chunk: int = 0,
    ):
        cache = cache or CacheConfig()
        assert (policy is None) == (cache.policy == "full")
        self.cache = cache
        self.policy = policy
        self.evidence = Evidence() if policy is None else evidence_for(policy, cache)
        self.streaming = cache.prefill == "streaming"
        self.ceiling: Ceiling | None = None
        self._store: LaneStore | None = None
        self.slack = cache.decode_slack
        self.stride = self.chunk = prefill_chunk
        self.routed = min(_ROUTED, prefill_chunk)
        self.zooms: bool = getattr(policy, "zooms", False)
        if policy is None:
            return
        assert store is not None, "only what keeps everything can do without"
        if self.zooms and self.slack is None:
            self.slack = _SEALED
        self._store = store
        self.num_lanes = store.num_lanes
        self.page_size = store.pool.page_size
        if cache.limit is not None and cache.limit.kind == "bytes":
            self.ceiling = Ceiling.of(cache.limit, store)
            part = self.ceiling.part(self._part(0))
            self.slack = part.slack(cache.decode_slack)
            self.stride = min(prefill_chunk, max(self.slack, part.per_lane // 4))

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever dropped."""
        return self.policy is None

    @property
    def demotes(self) -> bool:
        """Whether what is dropped is kept below the pool, for the next turn to choose from."""
        return self.cache.evicted == "demote"

    def keeps_below(self, conversing: bool) -> bool:
        """Whether entries are kept below the pool before a compression, in a conversation or not."""
        return self.zooms or (self.demotes and conversing)

    def rows_allowed(
        self, wanted: int, lengths: np.ndarray, num_computed: int, num_prompt: int, since: int
    ) -> int:
        """How many of `wanted` rows may be computed before the next compression; 0: it is due first.

        lengths: entries of each lane. since: tokens computed since the last compression.
        """
        if self.keeps_all:
            return wanted
        left = num_prompt - num_computed
        allowed = min(wanted, left) if left > 0 else wanted
        if left > 0 and not self.streaming:
            return allowed
        num_tokens = max(num_computed, num_prompt)
        part = self._part(num_tokens) if self.has_spans(num_computed, lengths) else 1.0
        if self.ceiling is not None:
            return self.ceiling.part(part).rows_that_fit(lengths, allowed)
        growth = self.stride if left > 0 else self.slack
        if growth is None:
            return allowed
        total = int(part * self._entries(num_tokens))
        spare = (total - int(lengths.sum())) // self.num_lanes + growth
        # Pinned entries may fill more than the budget; that must not mean compressing at every token.
        return min(allowed, max(0, spare, growth - since))

    def has_spans(self, num_computed: int, lengths: np.ndarray) -> bool:
        """Whether lanes of these lengths have spans that may be zoomed in."""
        return self.zooms and int(lengths.sum()) < num_computed * self.num_lanes

    def zoomed(self, num_tokens: int) -> tuple[int, int]:
        """Pages and rows per lane for what is zoomed in, of a sequence of so many tokens."""
        assert self.cache.limit is not None and self._store is not None
        return area_of(self.cache.limit, self._part(num_tokens), self._store, num_tokens)

    def room(self, num_computed: int, num_prompt: int) -> int:
        """Entries per lane that a compression is to leave free; only a ceiling needs any."""
        if self.ceiling is None:
            return 0
        assert self.slack is not None
        return self.stride if num_computed < num_prompt else self.slack

    def most_pages(self, num_prompt: int, pinned: Ranges) -> int | None:
        """Pages that a prompt of `num_prompt` tokens never passes while it streams; None without a bound.
        pinned: its ranges besides those of the configuration."""
        if not self.streaming or self.keeps_all:
            return None
        return self._pages_beside(self.stride, num_prompt, pinned)

    def pages_kept(self, num_tokens: int, pinned: Ranges) -> int:
        """Pages that lanes never pass once a prompt of `num_tokens` tokens is compressed; pinned: its ranges
        besides those of the configuration."""
        return self._pages_beside(0, num_tokens, pinned)

    def _pages_beside(self, stride: int, num_tokens: int, pinned: Ranges) -> int:
        """Pages for what stays of so many tokens, with `stride` entries more in each lane."""
        if self.ceiling is not None:
            return self.ceiling.max_pages
        whole = max(
            min(num_tokens, self.cache.too_short), _num_pinned((*self.cache.pinned, *pinned), num_tokens)
        )
        kept = max(self._entries(num_tokens), whole * self.num_lanes)
        # Lanes end within a page, and so do areas.
        ends = self.page_size * (2 if self.zooms else 1)
        return -(-(kept + (stride + ends) * self.num_lanes) // self.page_size)

    def _part(self, num_tokens: int) -> float:
        """Of the budget, that the lanes get where there are spans."""
        assert self.cache.limit is not None and self._store is not None
        return lanes_part(self.policy, self.cache.limit, self._store, num_tokens)

    def _entries(self, num_tokens: int) -> int:
        limit = self.cache.limit
        assert limit is not None
        return limit.entries(num_tokens, self.num_lanes)


def _num_pinned(ranges: Ranges, num_tokens: int) -> int:
    """Tokens of the first `num_tokens` in any of the ranges, which may overlap."""
    count = reached = 0
    for start, end in sorted(ranges):
        start, end = max(start, reached), min(end, num_tokens)
        count += max(0, end - start)
        reached = max(reached, end)
    return count


class Retentions:
    """Makes the retention of a cache configuration, and keeps those made."""

    def __init__(
        self,
        store: LaneStore,
        config: EngineConfig,
        model: Any,
        find_profile: FindProfile | None,
        find_router: FindRouter | None = None,
    ):
        self._store = store
        self._config = config
        self._model = model
        self._find_profile = find_profile
        self._find_router = find_router
        self._made: dict[tuple[CacheConfig, type], Retention] = {}

    def get(self, cache: CacheConfig) -> Retention:
        """Raises ConfigError if entries cannot be stored as asked, or the budget cannot hold."""
        # A budget of 1.0, the whole context, equals one of 1, a single entry per lane.
        key = (cache, type(cache.budget))
        if key not in self._made:
            self._check_storage(cache)
            if len(self._made) >= _MOST_KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(cache)
        return self._made[key]

    def _make(self, cache: CacheConfig) -> Retention:
        policy = None
        if cache.policy != "full":
            shape = self._model.config
            policy = make_policy(
                cache.policy,
                window=cache.window,
                num_layers=shape.num_layers,
                num_query_heads=shape.num_query_heads,
                num_kv_heads=shape.num_kv_heads,
                profile=None if self._find_profile is None else self._find_profile(cache),
                rope=self._model.rope,
                router=None if self._find_router is None else self._find_router(cache),
            )
        return Retention(cache, policy, self._store, self._config.prefill_chunk)

    def _check_storage(self, cache: CacheConfig) -> None:
        zooms = cache.policy in ZOOMING_NAMES
        if (zooms or cache.evicted == "demote") and not self._config.tiers.below:
            what = f"policy {cache.policy}" if zooms else 'evicted="demote"'
            raise ConfigError(
                f'{what} needs a tier below the pool: give kv_warm a size such as "1GiB" or '
                "kv_cold a file and a size."
            )
        pool = self._store.pool
        stored = str(pool.dtype).removeprefix("torch.")
        for name, given, own, default in (
            ("kv_dtype", cache.kv_dtype, stored, "auto"),
            ("page_size", cache.page_size, pool.page_size, None),
        ):
            if given not in (own, default):
                raise ConfigError(f"{name} {given} is not what this model was loaded with, which is {own}.")
