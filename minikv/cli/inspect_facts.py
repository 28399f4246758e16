"""What `minikv inspect` knows of a compressed cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minikv.cache.picture import resolution
from minikv.config import CacheConfig

if TYPE_CHECKING:
    from minikv import LLM
    from minikv.scheduler.request import Lanes


@dataclass(frozen=True)
class Held:
    """The lanes of one prompt.

    positions, counts: [layers, kv_heads, n], of each entry, positions -1 past a lane's end.
    bytes: [layers, kv_heads] int64, of each lane's pages.
    """

    llm: LLM
    num_tokens: int
    positions: Tensor
    counts: Tensor
    bytes: Tensor

    @classmethod
    def of(cls, llm: LLM, lanes: Lanes) -> Held:
        """What lanes that are not in use hold now."""
        store, seq = llm.engine.store, lanes.seq
        assert seq is not None, "the request that filled the lanes has not failed"
        pages = torch.from_numpy(store.num_pages[seq]).long()
        return cls(
            llm,
            len(lanes.token_ids),
            store.positions(seq),
            store.counts(seq),
            pages * store.pool.page_bytes,
        )

    @property
    def cache(self) -> CacheConfig:
        """Under which policy and budget."""
        return self.llm.engine.config.cache

    @property
    def entries(self) -> Tensor:
        """Entries of each lane: [layers, kv_heads] int64."""
        return (self.positions >= 0).sum(dim=-1)

    @property
    def tokens(self) -> Tensor:
        """Tokens that the entries of each lane stand for: [layers, kv_heads] int64."""
        return self.counts.masked_fill(self.positions < 0, 0).sum(dim=-1)

    @property
    def budget_shares(self) -> Tensor | None:
        """What each lane takes of the budget: [layers, kv_heads], None without a budget."""
        limit = self.cache.limit
        if limit is None:
            return None
        if limit.kind == "bytes":
            return self.bytes.double() / limit.amount
        return self.entries.double() / limit.entries(self.num_tokens, self.entries.numel())

    def resolution(self, layers: range) -> Tensor:
        """Tokens per entry at each token: [layers, kv_heads, tokens]."""
        chosen = slice(layers.start, layers.stop)
        return resolution(self.positions[chosen], self.counts[chosen], self.num_tokens)

    def to_dict(self, layers: range) -> dict[str, Any]:
        """All of it, of some layers, as docs/cli.md documents it."""
        held, cache = int(self.bytes.sum()), self.cache
        return {
            "model": self.llm.name,
            "tokens": self.num_tokens,
            "policy": cache.policy,
            "budget": cache.budget,
            "prefill": cache.prefill,
            "kv_dtype": self.llm.kv_dtype,
            "entries": int(self.entries.sum()),
            "bytes": held,
            "full_bytes": self.llm.full_kv_bytes(self.num_tokens),
            "layers": [self._layer(index) for index in layers],
        }

    def _layer(self, index: int) -> dict[str, Any]:
        heads = [self._lane(index, head) for head in range(self.positions.shape[1])]
        names = ("entries", "prototypes", "tokens", "bytes")
        shares = self.budget_shares
        return {
            "layer": index,
            **{name: sum(head[name] for head in heads) for name in names},
            "budget_share": None if shares is None else float(shares[index].sum()),
            "heads": heads,
        }

    def _lane(self, layer: int, head: int) -> dict[str, Any]:
        entries, shares = int(self.entries[layer, head]), self.budget_shares
        counts = self.counts[layer, head, :entries].tolist()
        return {
            "head": head,
            "entries": entries,
            "prototypes": sum(count > 1 for count in counts),
            "tokens": sum(counts),
            "bytes": int(self.bytes[layer, head]),
            "budget_share": None if shares is None else float(shares[layer, head]),
            "positions": self.positions[layer, head, :entries].tolist(),
            "counts": counts,
        }
