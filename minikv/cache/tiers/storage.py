"""The tiers as an engine uses them: with its way to make spans, and who its spans belong to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch

from minikv.cache.tiers.base import Handle
from minikv.cache.tiers.encode import Encoder
from minikv.cache.tiers.span import Span, fingerprint_of, owner_key
from minikv.cache.tiers.tiers import Tiers
from minikv.config import TierConfig
from minikv.models.config import ModelConfig
from minikv.models.rope import Rope


@dataclass
class PrefixCounters:
    """hits: requests whose prompt's beginning was found. tokens: that they did not compute for it. blocks:
    blocks of tokens that were published, their rows or what was recorded of them."""

    prefix_hits: int = 0
    prefix_tokens: int = 0
    prefix_blocks: int = 0


class Storage:
    """The tiers below one page pool.

    Spans are either of one sequence, kept by `keep` and gone by `forget`, which no later run has any use for;
    or of everybody, written to `tiers` and released there.

    exact: makes spans whose rows are bit for bit those of the pool. sparing: spans within the error that the
    configuration allows. make_way: gives up what an idle sequence has in the tiers; False if none has
    anything. num_swapped, num_restored: sequences that left the pool whole for the tiers, and
    that came back from there.
    """

    def __init__(self, tiers: Tiers, config: TierConfig, fingerprint: bytes, rope: Rope) -> None:
        self.tiers = tiers
        self.exact = Encoder(fingerprint, rope)
        self.sparing = Encoder(fingerprint, rope, config.error)
        self.prefixes = PrefixCounters()
        self.make_way: Callable[[], bool] | None = None
        self._own: set[Handle] = set()
        self._run = os.urandom(16)
        self._keys = 0
        self.num_swapped = self.num_restored = 0

    @classmethod
    def of(
        cls,
        config: TierConfig,
        model: str,
        shape: ModelConfig,
        rope: Rope,
        dtype: torch.dtype,
        taken: int = 0,
    ) -> Storage | None:
        """What a configuration asks for; None if there is to be no tier below. model: what tells it from
        others. taken: as in `Tiers.of`. Raises ConfigError when the cold file cannot be had."""
        tiers = Tiers.of(config, taken=taken)
        if tiers is None:
            return None
        return cls(tiers, config, fingerprint_of(model, dtype, shape.rope), rope)

    def new_key(self) -> bytes:
        """A key for the spans of one sequence, which nothing else goes by."""
        self._keys += 1
        return owner_key("sequence", self._run, str(self._keys))

    def keep(self, span: Span) -> Handle | None:
        """Keep a span of a sequence, for which idle ones make way; None if there is no room."""
        fits = span.nbytes <= self.tiers.limit
        handle = self.tiers.write(span, self.make_way if fits else None)
        if handle is not None:
            self._own.add(handle)
        return handle

    def forget(self, handles: Iterable[Handle]) -> None:
        """Drop spans of a sequence."""
        for handle in handles:
            self._own.discard(handle)
            self.tiers.drop(handle)

    def report(self) -> dict[str, int]:
        """All counters and sizes, by name: what `Tiers.report` says, of prefixes, of whole sequences."""
        sequences = {"sequences_demoted": self.num_swapped, "sequences_restored": self.num_restored}
        return self.tiers.report() | asdict(self.prefixes) | sequences

    def close(self) -> None:
        """Drop what is of sequences, save the rest to cold, and close the tiers."""
        self.forget(list(self._own))
        self.tiers.flush()
        self.tiers.close()
