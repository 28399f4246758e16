"""Frozen configuration. Unknown names are refused by the dataclasses themselves; `auto` values
are resolved into a new object, never written back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minikv.cache.budget import Budget, parse_budget, plain_budget
from minikv.errors import ConfigError, shown
from minikv.sizes import format_size, parse_size

__all__ = [
    "KV_DTYPES",
    "ROUTERS",
    "WITHOUT_POLICY",
    "CacheConfig",
    "EngineConfig",
    "TierConfig",
    "check_ranges",
    "format_size",
    "parse_size",
]

WITHOUT_POLICY = {"budget": None, "decode_slack": None, "prefill": "exact", "evicted": "drop"}
ROUTERS = ("shipped", "none")
"""Of policy sekv, in the place of a path: the router in this package, which has to be there, and none."""

_LEAST_BELOW = 1000  # bytes; a smaller tier lacks its unit
_SHORT = 64  # tokens of a prompt that a large window does not keep whole any more

KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")


def _positive(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{option} must be a whole number of at least 1, not {shown(value)}.")


def _not_negative(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{option} must be a whole number of at least 0, not {shown(value)}.")


def _one_of(option: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{option} must be {' or '.join(choices)}, not {shown(value)}.")


@dataclass(frozen=True)
class CacheConfig:
    """How KV entries are stored, and which of them stay.

    kv_dtype: `auto`, `float32`, `float16`, `bfloat16`, or `int8` with a scale per entry. `auto` is
    float16 with the compiled kernels and float32 with the others.
    page_size: entries per page; None lets the backend choose.
    policy: what chooses the entries that stay: `full` keeps all; `window`, `snapkv`, `adakv`, `expected`
        and `compresskv` work to a budget; `adakv:SCORING` puts adakv's allocation on another scoring;
        `gracekv` merges entries instead of dropping them; `sekv` merges what lies between surprising tokens
        and brings it back, from the tiers below the pool, where the queries ask for it.
    budget: what a sequence may keep, protected entries included. A float in (0, 1], or text such as
        `"1/8"`, is a fraction of its tokens, an int of at least 1 entries per lane on average, a size such
        as `"64MiB"` a hard ceiling on the bytes of its pages. None only with policy `full`.
    sinks, recent: first and last entries of every lane that always stay; a budget too small for them
        gives up recent ones first.
    window: last content tokens of a prompt whose queries policies read.
    evicted: `drop` forgets what does not stay; `demote` keeps the entries as they were in the tiers below the
        pool, and at the next turn of a conversation the policy chooses again among all of them; a request
        that has no next turn just drops them. Needs prefill `exact`.
    prefill: `exact` holds the full prompt until its end and compresses once; `streaming` compresses
        while it goes, so that a prompt needs no more memory than budget and chunk, at some loss.
    decode_slack: entries per lane above the budget at which a decoding sequence is compressed again;
        None: never, except under a budget in bytes.
    pinned: token ranges [start, end) that always stay.
    profile: path of a calibration profile for `compresskv` or of a router for `sekv`; None takes the one that
        is shipped for the model, if there is one. `sekv` does without for "none".
    refit: correct masses and values of what a compression leaves, so that lanes answer as before;
        None: if the policy does so by itself.
    """

    kv_dtype: str = "auto"
    page_size: int | None = None
    policy: str = "full"
    budget: float | int | str | None = None
    sinks: int = 4
    recent: int = 16
    window: int = 16
    evicted: str = "drop"
    prefill: str = "exact"
    decode_slack: int | None = None
    pinned: tuple[tuple[int, int], ...] = ()
    profile: str | None = None
    refit: bool | None = None

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {shown(self.kv_dtype)}.")
        if self.page_size is not None:
            _positive("page_size", self.page_size)
        for name in ("sinks", "recent"):
            _not_negative(name, getattr(self, name))
        _positive("window", self.window)
        if self.decode_slack is not None:
            _positive("decode_slack", self.decode_slack)
        _one_of("evicted", self.evicted, ("drop", "demote"))
        _one_of("prefill", self.prefill, ("exact", "streaming"))
        if self.evicted == "demote" and self.prefill == "streaming":
            raise ConfigError(
                "evicted demote puts back everything before a question is read, which prefill streaming is "
                "there to avoid; use prefill exact, or evicted drop."
            )
        if self.refit is not None and not isinstance(self.refit, bool):
            raise ConfigError(f"refit must be true, false or none, not {shown(self.refit)}.")
        object.__setattr__(self, "pinned", check_ranges("pinned", self.pinned))
        self._check_policy()

    def _check_policy(self) -> None:
        if self.policy == "full":
            for name, off in WITHOUT_POLICY.items():
                if getattr(self, name) != off:
                    raise ConfigError(
                        f"{name} {shown(getattr(self, name))} needs a policy that compresses, such as "
                        "snapkv; policy full keeps everything."
                    )
            if self.refit:
                raise ConfigError("refit corrects what a policy leaves; policy full leaves everything.")
        else:
            # Only here: policies load torch, which a plain configuration must not.
            from minikv.cache.policies.registry import check_policy_name

            check_policy_name(self.policy)
            if self.budget is None:
                raise ConfigError(
                    f"policy {self.policy} needs a budget: a fraction such as 0.1, entries per lane such as "
                    '256, or a size such as "64MiB".'
                )
            object.__setattr__(self, "budget", plain_budget(self.budget))
            parse_budget(self.budget)
        if self.policy == "sekv" and self.evicted == "demote":
            raise ConfigError(
                "policy sekv keeps everything below the pool anyway and brings back what is asked for; "
                'leave evicted at "drop".'
            )
        if self.policy == "sekv" and self.refit:
            raise ConfigError(
                "refit corrects entries that stand for others; those of policy sekv stand for themselves, "
                "and the rest is brought back as it was."
            )
        if self.profile is None:
            return
        if not isinstance(self.profile, str):
            raise ConfigError(f"profile must be a path, not {shown(self.profile)}.")
        if "compresskv" not in self.policy and self.policy != "sekv":
            raise ConfigError(f"profile is read by compresskv and sekv only, not by policy {self.policy}.")

    @property
    def profile_path(self) -> str | None:
        """The profile, if it is a file."""
        return None if self.policy == "sekv" and self.profile in ROUTERS else self.profile

    @property
    def too_short(self) -> int:
        """Tokens of which nothing is dropped, unless the budget is in bytes: there is nothing to judge by."""
        return min(self.sinks + self.window, _SHORT)

    @property
    def limit(self) -> Budget | None:
        """The budget in its parsed form; None with policy `full`."""
        return None if self.budget is None else parse_budget(self.budget)


def check_ranges(option: str, value: Any) -> tuple[tuple[int, int], ...]:
    """Token ranges as a tuple of pairs; ConfigError unless all are whole numbers with 0 <= start < end."""
    fault = ConfigError(f"{option} must be a list of token ranges (start, end), not {shown(value)}.")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise fault
    ranges = []
    for pair in value:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise fault
        start, end = pair
        if type(start) is not int or type(end) is not int or not 0 <= start < end:
            raise fault
        ranges.append((start, end))
    return tuple(ranges)


@dataclass(frozen=True)
class TierConfig:
    """Hard ceilings in bytes per tier: a number or a size such as `"64MiB"`.

    hot: the page pool; None for what `max_seqs` full contexts need, at most half the free memory.
    warm: spans in host memory; None for none.
    cold: spans in a file, as `"PATH:SIZE"`; None for none. The file is made if need be, and belongs to one
        process at a time.
    error: relative error that keys and values of demoted entries may have (Frobenius norm of a lane's rows in
        a span); 0 for exact rows. Prefixes and sequences that leave the pool whole are always exact.
    async_copies: on a CUDA device, copy between the pool and the warm tier beside the computation, by way of
        pinned memory that counts as part of `warm`. Changes nothing that is computed.
    prefixes: keep what prompts begin with in the tiers below, so that other prompts which begin with the same
        tokens do not compute it again, in this run or with a cold file in a later one.
    """

    hot: int | str | None = None
    warm: int | str | None = None
    cold: str | None = None
    error: float = 0.0
    prefixes: bool = True
    async_copies: bool = True

    def __post_init__(self) -> None:
        if self.hot is not None:
            parse_size(self.hot, "kv_hot")
        if self.warm is not None:
            _check_room(parse_size(self.warm, "kv_warm"), "kv_warm", self.warm)
        if self.cold is not None:
            _check_room(_path_and_size(self.cold)[1], "the size in kv_cold", self.cold)
        if isinstance(self.error, bool) or not isinstance(self.error, int | float) or not 0 <= self.error < 1:
            raise ConfigError(f"kv_error must be a number from 0 to below 1, not {shown(self.error)}.")
        if not isinstance(self.prefixes, bool):
            raise ConfigError(f"prefixes must be true or false, not {shown(self.prefixes)}.")
        if not isinstance(self.async_copies, bool):
            raise ConfigError(f"async_copies must be true or false, not {shown(self.async_copies)}.")

    @property
    def below(self) -> bool:
        """Whether there is a tier below the page pool."""
        return self.warm is not None or self.cold is not None

    @property
    def hot_bytes(self) -> int | None:
        """The ceiling in bytes, None when it is to be chosen at load."""
        return None if self.hot is None else parse_size(self.hot, "kv_hot")

    @property
    def warm_bytes(self) -> int | None:
        """The ceiling of the warm tier in bytes, None without one."""
        return None if self.warm is None else parse_size(self.warm, "kv_warm")

    @property
    def cold_file(self) -> tuple[str, int] | None:
        """Path and ceiling in bytes of the cold tier, None without one."""
        return None if self.cold is None else _path_and_size(self.cold)


def _check_room(size: int, option: str, value: Any) -> None:
    if size < _LEAST_BELOW:
        raise ConfigError(f'{option} must be at least 1 kB, not {shown(value)}; give a unit, such as "1GiB".')


def _path_and_size(value: Any) -> tuple[str, int]:
    path, colon, size = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not path or not colon or "\0" in path:
        raise ConfigError(f'kv_cold must look like "PATH:SIZE", such as "kv.cold:2GiB", not {shown(value)}.')
    return path, parse_size(size, "the size in kv_cold")


@dataclass(frozen=True)
class EngineConfig:
    """Scheduling limits.

    max_seqs: sequences that hold KV at once (running ones and idle chat sessions).
    max_batch_tokens: rows one step may compute, prefill and decode together; None is 512, or more
        if `prefill_chunk` or `max_seqs` is more.
    prefill_chunk: most prompt tokens of one sequence in one step.
    max_context: tokens of one sequence whose keys and values may be held (one more can be sampled
        after them); None is the model's own limit.
    debug_checks: run the cache's integrity check after every step (slow; used by the tests).
    """

    max_seqs: int = 16
    max_batch_tokens: int | None = None
    prefill_chunk: int = 512
    max_context: int | None = None
    debug_checks: bool = False
    cache: CacheConfig = field(default_factory=CacheConfig)
    tiers: TierConfig = field(default_factory=TierConfig)

    def __post_init__(self) -> None:
        for name in ("max_seqs", "prefill_chunk"):
            _positive(name, getattr(self, name))
        for name in ("max_context", "max_batch_tokens"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("max_seqs", "prefill_chunk"):
            if self.batch_tokens < getattr(self, name):
                raise ConfigError(
                    f"max_batch_tokens ({self.max_batch_tokens}) must be at least {name} "
                    f"({getattr(self, name)}), which one step must be able to hold."
                )

    @property
    def batch_tokens(self) -> int:
        """`max_batch_tokens` with None resolved."""
        return self.max_batch_tokens or max(512, self.max_seqs, self.prefill_chunk)
