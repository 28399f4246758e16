"""Engines over small tiers, and what must be left of them, for tests of what is demoted whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from keeping import LANES, keep, pages
from tiny import Collector, hot_bytes

from minikv.config import TierConfig
from minikv.sampling import SamplingParams

CACHES = {
    "full": None,
    "window": keep("window", 20),
    "snapkv": keep("snapkv", 16),
    "adakv": keep("adakv", 0.4),
    "expected": keep("expected", 0.3),
    "compresskv": keep("compresskv", 16),
    "gracekv": keep("gracekv", 0.3, refit=False),
    "gracekv-refit": keep("gracekv", 0.3, refit=True),
    "gracekv-slack": keep("gracekv", 0.4, decode_slack=3),
    "streaming": keep("expected", 14, prefill="streaming"),
    "slack": keep("adakv", 0.4, decode_slack=3),
    "bytes": keep("snapkv", pages(6 * LANES), prefill="streaming"),
    "bytes-exact": keep("snapkv", pages(6 * LANES)),
}
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
caches = pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)


def every_cache(name: str, values: list):
    """Every cache with the first of some values, and three that have little in common with all of them."""
    some = ("full", "slack", "gracekv-slack")
    return pytest.mark.parametrize(
        ("cache", name),
        [
            pytest.param(cache, value, id=f"{cached}-{value}")
            for cached, cache in CACHES.items()
            for value in (values if cached in some else values[:1])
        ],
    )


ROOMY = hot_bytes(4000)


def make_tiers(folder: Path, kind: str, hot: int = ROOMY) -> TierConfig:
    """Tiers by name; a span of a sequence here takes up to 32 KiB."""
    cold = f"{folder / 'kv.cold'}"
    options = {
        "warm": {"warm": "8MiB"},
        "cold": {"cold": f"{cold}:8MiB"},
        "both": {"warm": "64KiB", "cold": f"{cold}:8MiB"},
        "few": {"warm": "40KiB", "cold": f"{cold}:60KiB"},
        "none": {"warm": 1000},
    }
    return TierConfig(hot=hot, **options[kind])


def rows_computed(engine):
    """A list that gets the number of rows of each step from here on."""
    counts, plan = [], engine.scheduler.plan

    def counting():
        planned = plan()
        counts.append(sum(item.count for item in planned))
        return planned

    engine.scheduler.plan = counting
    return counts


def nothing_left(engine, lanes=()):
    """Whether every page is free and every span forgotten, once conversations are released."""
    for each in lanes:
        engine.release(each)
    engine.store.check()
    assert engine.store.pool.bytes_in_use == 0
    assert no_span(engine)
    engine.close()
    return True


def no_span(engine):
    """Whether nothing is below the pool; a file keeps the room of what was dropped for a while."""
    tiers = engine.storage.tiers
    tiers.check()
    report = tiers.report()
    assert report["warm_bytes"] == 0 and report.get("cold_spans", 0) == 0
    assert not engine.storage._own and not engine.scheduler.swap.demoted
    return True


def preempted_often(engine, ids, cache, params, every=2):
    """Tokens of a request that is preempted after each `every` steps, ten times, and rows computed. If it has
    to begin again each time, it may need more steps than that to get anywhere."""
    (request,) = engine.add(ids, params, cache=cache)
    rows, collector = rows_computed(engine), Collector()
    while engine.has_work:
        for _ in range(every):
            collector.take(engine.step())
        if engine.scheduler.running and engine.scheduler.num_preemptions < 10:
            engine.scheduler._preempt(engine.scheduler.running[0], {})
    return collector.tokens[request], sum(rows)
