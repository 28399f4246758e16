"""Conversations that demote what their policy drops, turn by turn."""

from __future__ import annotations

from keeping import POLICIES, keep
from tiny import Collector, drain, greedy, prompt

from minikv.config import TierConfig
from minikv.scheduler.request import Lanes

WARM = TierConfig(warm="64MiB")
KINDS = [name for name in POLICIES if "compresskv" not in name]


def demoting(policy="snapkv", budget=14, **options):
    return keep(policy, budget, evicted="demote", **options)


class Talk:
    """A conversation on an engine, turn by turn."""

    def __init__(self, engine, cache):
        self.engine, self.cache = engine, cache
        self.lanes, self.history = Lanes(), []

    def ask(self, seed, size=23, answer=7, steps=None, cache=None):
        """Say `size` new tokens; with `steps`, preempt after so many."""
        self.history += prompt(size, seed=seed)
        (request,) = self.engine.add(
            self.history, greedy(answer), lanes=self.lanes, cache=cache or self.cache
        )
        collector = Collector()
        if steps is not None:
            for _ in range(steps):
                collector.take(self.engine.step())
            if self.engine.scheduler.running:
                self.engine.scheduler._preempt(self.engine.scheduler.running[0], {})
        drain(self.engine, collector)
        said = collector.tokens[request]
        self.history += said
        return said, collector.finished[request].request

    def disturb(self, how):
        """Take the conversation's lanes away if they are idle (`reclaim`), or forget half of what was said
        (`again`)."""
        if how == "reclaim" and self.lanes in self.engine.scheduler.idle:
            self.engine.scheduler._reclaim(self.lanes)
        if how == "again":
            self.history = self.history[: len(self.history) // 2]
