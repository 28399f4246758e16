"""Copies of a context that are compressed, and begin further turns.

source --copy--> compress ----> answer, answer, ...                                       (drop)
source --copy--> demote, compress --> answer --> put back, feed, demote, compress --> answer (demote)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minikv.cache.evidence import Recorder
from minikv.cache.policies.base import AnyPolicy
from minikv.cache.tiers.below import Below
from minikv.config import CacheConfig
from minikv.evals.frame import Ids
from minikv.evals.plan import Budget
from minikv.evals.scored_once import PolicyOnce, score_once

if TYPE_CHECKING:
    from minikv.probe import Probe

# The context, the context with a question, and copies that are compressed and answer together.
SEQUENCES = 12
_LOGIT_BYTES = 128 << 20  # of the answers that are computed in one pass
_MOST_ANSWER = 256  # tokens of questions and answers that a copy has to have room for


@dataclass(frozen=True)
class Variant:
    """A policy of either kind under a budget."""

    name: str
    budget: Budget
    policy: AnyPolicy
    cache: CacheConfig

    @property
    def demotes(self) -> bool:
        """Whether each further question is to choose among all entries."""
        return self.cache.evicted == "demote"

    @property
    def keeps_below(self) -> bool:
        """Whether all of a copy is kept below the pool as well."""
        return self.demotes or getattr(self.policy, "zooms", False)


@dataclass(frozen=True)
class Held:
    """Bytes of the pages that a copy holds while it answers, those of the full cache, and the seconds that
    getting there took."""

    kv_bytes: int
    full_bytes: int
    seconds: float


@dataclass(eq=False)
class Copy:
    """A compressed copy of a context, and what its last compression left.

    unchanged: nothing was taken from it, nor will be. below, recorder: of one that demotes, all that was
    computed, and what was recorded so far.
    """

    variant: Variant
    seq: int
    held: Held
    unchanged: bool
    recorder: Recorder
    below: Below | None = None


class Copies:
    """Makes copies with the sequences, pages and tiers of a probe."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def groups(
        self, source: int, recorder: Recorder, variants: Sequence[Variant], rows: int, copies: int
    ) -> Iterator[list[Copy]]:
        """Compressed copies of a sequence, in groups that can answer `rows` tokens in one pass; they are
        closed after their turn. copies: sequences that each takes with what is copied from it."""
        most = min((SEQUENCES - 2) // copies, _LOGIT_BYTES // (4 * rows * self._probe.config.vocab_size))
        policies = {variant.name: score_once(variant.policy) for variant in variants}
        group: list[Copy] = []
        try:
            for variant in variants:
                full = len(group) >= max(1, most)
                if full or (group and not self._room_for(source, group, copies, variant)):
                    yield group
                    self._close(group)
                group.append(self._compressed(source, recorder, variant, policies[variant.name]))
            if group:
                yield group
        finally:
            self._close(group)

    @contextmanager
    def forked(self, group: Sequence[Copy]) -> Iterator[list[Copy]]:
        """Copies of copies, for one dialogue. They share what is below, so one dialogue has to end before
        the next begins: what it has demoted is then forgotten."""
        forks: list[Copy] = []
        try:
            for copy in group:
                forks.append(replace(copy, seq=self._probe.fork(copy.seq)))
            yield forks
        finally:
            for copy, fork in zip(group, forks, strict=False):
                self._probe.close(fork.seq)
                if copy.below is not None:
                    copy.below.cut(self._probe.num_tokens(copy.seq), held=True)

    def begin(self, copy: Copy, question: Ids, suffix: Ids) -> None:
        """Begin a further turn of a copy that demotes as the engine does: with everything put back, compute
        what is asked and what ends it, and choose anew by the queries of the question."""
        assert copy.below is not None
        started = time.perf_counter()
        copy.seq = self._probe.put_back(copy.seq, copy.below)
        seconds = time.perf_counter() - started
        start = self._probe.num_tokens(copy.seq)
        copy.recorder = copy.recorder.continued(range(start, start + len(question)), None, rolling=False)
        self._probe.feed(copy.seq, (*question, *suffix), "none", copy.recorder)
        held, _ = self._compress(copy.seq, copy.recorder, copy.variant, copy.variant.policy, copy.below)
        copy.held = replace(held, seconds=held.seconds + seconds)

    # Inside

    def _compressed(self, source: int, recorder: Recorder, variant: Variant, policy: PolicyOnce) -> Copy:
        spared = policy.spared
        below = self._probe.below() if variant.demotes else None
        seq = self._probe.fork(source)
        try:
            held, unchanged = self._compress(seq, recorder, variant, policy, below)
        except BaseException:
            self._probe.close(seq)
            if below is not None:
                below.forget()
            raise
        # A copy for which nothing was scored has to be charged what its scores would have taken.
        held = replace(held, seconds=held.seconds + policy.spared - spared)
        # A later turn of one that demotes may be over a budget that holds all of this one.
        return Copy(variant, seq, held, unchanged and below is None, recorder, below)

    def _compress(
        self,
        seq: int,
        recorder: Recorder,
        variant: Variant,
        policy: AnyPolicy | PolicyOnce,
        below: Below | None,
    ) -> tuple[Held, bool]:
        """What is then held, and whether that is everything."""
        seconds = 0.0
        if below is not None:
            started = time.perf_counter()
            self._probe.demote(seq, below)
            seconds = time.perf_counter() - started
        report = self._probe.compress(seq, policy, variant.cache, recorder.result())
        before, after = report.bytes
        return Held(after, before, report.seconds + seconds), report.entries[0] == report.entries[1]

    def _room_for(self, source: int, group: list[Copy], copies: int, variant: Variant) -> bool:
        """Whether another full copy fits beside a group and all that is yet to come of it."""
        store = self._probe.store
        held = sum(store.pages_of(copy.seq) for copy in group)
        answers = (len(group) + 1) * store.pages_for(_MOST_ANSWER)
        if variant.keeps_below:
            below = (store.pages_of(source) + answers) * store.pool.page_bytes
            if self._probe.room_below < below:
                return False
        return store.pool.num_free >= store.pages_of(source) + (copies - 1) * held + answers

    def _close(self, group: list[Copy]) -> None:
        while group:
            copy = group.pop()
            self._probe.close(copy.seq)
            if copy.below is not None:
                copy.below.forget()
