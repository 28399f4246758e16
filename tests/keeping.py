"""Cache configurations and runs of them on the tiny model, for tests of compression in the engine."""

from __future__ import annotations

from tiny import TINY, Collector, drain, greedy, prompt, tiny_engine

from minikv.cache.policies.registry import POLICY_NAMES
from minikv.config import CacheConfig
from minikv.scheduler.request import Lanes

# sekv needs a tier below; see test_sekv_engine.py.
POLICIES = tuple(name for name in POLICY_NAMES if name not in ("full", "sekv"))
LANES = TINY.num_layers * TINY.num_kv_heads
PAGE = 4
PAGE_BYTES = PAGE * (2 * 16 * 4 + 8)
PROMPTS = [prompt(n, seed=n) for n in (90, 47, 64, 120, 33, 75, 101)]


def keep(policy="snapkv", budget=0.3, **options) -> CacheConfig:
    """A configuration that protects little, so that policies decide."""
    defaults = {"sinks": 2, "recent": 4, "window": 6}
    return CacheConfig(policy=policy, budget=budget, **(defaults | options))


def pages(count: int) -> str:
    """A budget of `count` pages."""
    return f"{count * PAGE_BYTES}B"


def run(engine, ids, cache=None, params=None, **options):
    """Tokens and the finished request of one prompt."""
    (request,) = engine.add(ids, params or greedy(12), cache=cache, **options)
    collector = drain(engine)
    return collector.tokens.get(request), collector.finished[request]


def kept_positions(decoder, ids, cache, **options):
    """Positions of all entries of every lane after one token."""
    engine, lanes = tiny_engine(decoder, **options), Lanes()
    run(engine, ids, cache, greedy(1), lanes=lanes)
    return engine.store.positions(lanes.seq)


def check_ceiling(engine, limit, collector=None):
    """Drain an engine of one sequence whose pages never pass the limit."""
    collector = collector or Collector()
    while engine.has_work:
        collector.take(engine.step())
        assert engine.store.pool.num_pages - engine.store.pool.num_free <= limit
    return collector
