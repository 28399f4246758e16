"""What `bench_policies.py` asks of either library, and minikv's answer to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from common import Clocks, timed
from minikv import CacheConfig
from minikv.cache.evidence import Recorder
from minikv.cache.policies.base import Evidence
from minikv.cache.policies.registry import make_policy
from minikv.probe import Probe

# The context that is kept, and the copy that is compressed.
_SEQUENCES = 2


class Setting(NamedTuple):
    """method: a policy of minikv. budget: the share of the context's entries that stays."""

    method: str
    budget: float


@dataclass(frozen=True)
class Answer:
    """logits: [n, vocab] float32. kv_bytes: held right after the compression. spent: what that took."""

    logits: Tensor
    kv_bytes: int
    spent: Clocks


class Side(Protocol):
    """One library with the model in float32."""

    name: str

    def read(self, context: Sequence[int], settings: Sequence[Setting]) -> None:
        """Compute a context in full, so that it can be compressed in each of the ways."""
        ...

    def answer(self, setting: Setting | None, ids: Sequence[int]) -> Answer:
        """Go on from the context compressed one way (None: not at all); the logits after each of `ids`."""
        ...


class Minikv:
    """See `Side`."""

    name = "minikv"

    def __init__(self, model: str, threads: int, window: int, longest: int) -> None:
        self.probe = Probe.load(
            model,
            weights="f32",
            kv_dtype="float32",
            threads=threads,
            max_context=longest,
            max_seqs=_SEQUENCES,
        )
        self._window = window
        self._seq: int | None = None
        self._recorder: Recorder | None = None

    @torch.inference_mode()
    def read(self, context: Sequence[int], settings: Sequence[Setting]) -> None:
        """See `Side`."""
        if self._seq is not None:
            self.probe.close(self._seq)
        self._seq = self.probe.open()
        evidence = Evidence(window=self._window, query_statistics=True)
        self._recorder = self.probe.record(evidence, range(len(context)))
        self.probe.feed(self._seq, context, "none", self._recorder)

    @torch.inference_mode()
    def answer(self, setting: Setting | None, ids: Sequence[int]) -> Answer:
        """See `Side`."""
        assert self._seq is not None and self._recorder is not None
        copy = self.probe.fork(self._seq)
        spent = Clocks(0.0, 0.0)
        if setting is not None:
            cache = CacheConfig(policy=setting.method, budget=setting.budget, window=self._window)
            policy = self._policy(setting.method)
            recorded = self._recorder.result()
            spent, _ = timed(lambda: self.probe.compress(copy, policy, cache, recorded))
        held = self.probe.store.bytes_of(copy)
        logits = self.probe.feed(copy, ids, "all")
        self.probe.close(copy)
        assert logits is not None
        return Answer(logits, held, spent)

    def _policy(self, name: str):
        shape = self.probe.config
        return make_policy(
            name,
            window=self._window,
            num_layers=shape.num_layers,
            num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            rope=self.probe.model.rope,
        )
