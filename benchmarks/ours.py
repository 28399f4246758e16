"""minikv as a contestant: the public engine, with its scheduler and sampling, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence

from duel import BATCH


class Minikv:
    """See `duel.Engine`. kv_dtype: as in `CacheConfig`; backend, weights: as in `LLM`."""

    def __init__(
        self,
        model: str,
        threads: int,
        kv_dtype: str = "auto",
        *,
        backend: str = "auto",
        weights: str = "auto",
    ) -> None:
        from minikv import LLM, CacheConfig, SamplingParams

        self.imported_at = time.perf_counter()
        self._llm = LLM(
            model,
            threads=threads,
            max_seqs=BATCH,
            cache=CacheConfig(kv_dtype=kv_dtype),
            backend=backend,
            weights=weights,
        )
        self._engine = self._llm.engine
        self._params = SamplingParams(max_tokens=None, ignore_eos=True)
        self._requests: list[int] = []
        self.vocab_size = self._llm.config.vocab_size

    def open(self, sequences: int, tokens: int) -> None:
        """The pool has room from the start."""

    def fill(self, prompts: Sequence[list[int]]) -> None:
        """See `duel.Engine`."""
        self._requests = [request for ids in prompts for request in self._engine.add(ids, self._params)]
        waiting = set(self._requests)
        while waiting:
            waiting -= self._advance()

    def step(self) -> None:
        """See `duel.Engine`."""
        if len(self._advance()) != len(self._requests):
            raise SystemExit("minikv did not decode every sequence in one step.")

    def clear(self) -> None:
        """See `duel.Engine`."""
        for request in self._requests:
            self._engine.abort(request)
        self._engine.step()
        self._requests = []

    def _advance(self) -> set[int]:
        """One engine step; the requests that got a token."""
        from minikv.scheduler.request import TokenEvent

        events = self._engine.step()
        failed = [e.message for e in events if not isinstance(e, TokenEvent) and e.reason == "error"]
        if failed:
            raise SystemExit(f"minikv could not do its work: {failed[0]}")
        return {event.request_id for event in events if isinstance(event, TokenEvent)}
