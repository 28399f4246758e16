"""What an evaluation is asked to do. Loads no torch until policies are named."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minikv.cache.budget import read_budget
from minikv.config import CacheConfig
from minikv.errors import ConfigError, shown
from minikv.evals.records import Record

FULL = "full"
TASKS = ("needle", "multi-needle", "kv-lookup", "multi-turn", "quote", "perplexity", "fidelity")
Budget = float | int | str
_MOST_SAMPLES = 10_000
_DEMOTE = "+demote"


@dataclass(frozen=True)
class EvalPlan:
    """The grid of an evaluation.

    tasks, policies, budgets (as in `CacheConfig`), lengths: every combination is measured, and the
    full cache beside. A policy may have `+refit` or `-refit` behind its name, and `+demote`: each further
    question then chooses anew among all entries. samples: contexts per length; their seeds are seed,
    seed + 1, ... agnostic: compress before the question is known. sinks, recent, window, profile: as in
    `CacheConfig`.

    Raises ConfigError for what cannot be measured.
    """

    tasks: tuple[str, ...] = ("needle", "fidelity")
    policies: tuple[str, ...] = ("snapkv", "adakv", "compresskv")
    budgets: tuple[Budget, ...] = (0.5, 0.25, 0.1)
    lengths: tuple[int, ...] = (1024,)
    samples: int = 5
    seed: int = 0
    agnostic: bool = False
    sinks: int = CacheConfig.sinks
    recent: int = CacheConfig.recent
    window: int = CacheConfig.window
    profile: str | None = None

    def __post_init__(self) -> None:
        from minikv.cache.policies.registry import check_policy_name

        # One name for each column, in whatever order its signs were given: records go by it.
        object.__setattr__(self, "policies", tuple(map(_demote_last, self.policies)))
        for name in ("tasks", "policies", "budgets", "lengths"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must name at least one.")
            # By what they look like: 1 entry and 1.0 of everything are equal numbers.
            values = {repr(value): value for value in getattr(self, name)}
            object.__setattr__(self, name, tuple(values.values()))
        for task in self.tasks:
            _check_task(task)
        for policy in self.policies:
            check_policy_name(with_refit(with_demotion(policy)[0])[0])
        for length in self.lengths:
            if length < 1:
                raise ConfigError(f"lengths must be numbers of tokens of at least 1, not {shown(length)}.")
        if not 1 <= self.samples <= _MOST_SAMPLES:
            raise ConfigError(f"samples must be from 1 to {_MOST_SAMPLES}, not {shown(self.samples)}.")
        if self.seed < 0:
            raise ConfigError(f"seed must be a whole number of at least 0, not {shown(self.seed)}.")
        for policy in self.compressing:
            for budget in self.budgets:
                self.cache(policy, budget)

    @property
    def compressing(self) -> tuple[str, ...]:
        """The policies without `full`, which is always measured."""
        return tuple(policy for policy in self.policies if policy != FULL)

    @property
    def demotes(self) -> bool:
        """Whether any policy does."""
        return any(with_demotion(policy)[1] for policy in self.policies)

    @property
    def variants(self) -> list[tuple[str, Budget | None]]:
        """(policy, budget) of every column, the full cache first."""
        return [(FULL, None), *((policy, budget) for policy in self.compressing for budget in self.budgets)]

    @property
    def seeds(self) -> range:
        """Seeds of the samples."""
        return range(self.seed, self.seed + self.samples)

    def cache(self, policy: str, budget: Budget) -> CacheConfig:
        """The configuration of one column. Raises ConfigError for a budget that cannot be used."""
        rest, demotes = with_demotion(policy)
        name, refit = with_refit(rest)
        return CacheConfig(
            policy=name,
            budget=budget,
            sinks=self.sinks,
            recent=self.recent,
            window=self.window,
            profile=self.profile if "compresskv" in name else None,
            refit=refit,
            evicted="demote" if demotes else "drop",
        )

    def chosen(self, records: Iterable[Record]) -> list[Record]:
        """Those records that belong to this grid."""
        variants = {(policy, repr(budget)) for policy, budget in self.variants}
        return [
            record
            for record in records
            if record.task in self.tasks
            and record.length in self.lengths
            and record.seed in self.seeds
            and record.agnostic == self.agnostic
            and (record.policy, repr(record.budget)) in variants
        ]


def with_demotion(policy: str) -> tuple[str, bool]:
    """A column without `+demote`, which may stand before or behind what it says of a refit, and whether
    it was there."""
    parts = re.split(r"(?=[+-])", policy)
    if _DEMOTE not in parts:
        return policy, False
    parts.remove(_DEMOTE)
    return "".join(parts), True


def _demote_last(policy: str) -> str:
    rest, demotes = with_demotion(policy)
    return rest + _DEMOTE if demotes else policy


def with_refit(policy: str) -> tuple[str, bool | None]:
    """A column's policy, and whether what it leaves is refitted; None: if it does so by itself."""
    for ending, refit in (("+refit", True), ("-refit", False)):
        if policy.endswith(ending):
            return policy.removesuffix(ending), refit
    return policy, None


def read_budgets(names: Sequence[str]) -> tuple[Budget, ...]:
    """Budgets typed as text. Raises ConfigError."""
    return tuple(read_budget(name) for name in names)


def _check_task(name: str) -> None:
    if name in TASKS:
        return
    near = difflib.get_close_matches(name.lower(), TASKS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(TASKS)}."
    raise ConfigError(f"There is no task {shown(name)}; {hint}")
