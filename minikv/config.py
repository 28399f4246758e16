"""Frozen configuration. Unknown names are refused by the dataclasses themselves; `auto` values
are resolved into a new object, never written back."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from minikv.errors import ConfigError, shown

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")


def parse_size(value: str | int, option: str = "size") -> int:
    """Bytes of `"64MiB"`, `"64MB"`, `"1.5G"` or a plain number; powers of 1024 for i-units and
    bare letters, of 1000 for `kB`, `MB`, `GB`, `TB`."""
    if isinstance(value, bool) or (isinstance(value, int) and value <= 0):
        raise ConfigError(f"{option} must be a positive number of bytes, not {shown(value)}.")
    if isinstance(value, int) and value < 2**62:
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if not match:
        raise ConfigError(f'{option} must look like "64MiB", "2GB" or a number of bytes, not {shown(value)}.')
    number, letter, binary, b = match.groups()
    base = 1000 if letter and b and not binary else 1024
    size = float(number) * base ** _POWER[letter.lower()]
    if not 1 <= size < 2**62:
        raise ConfigError(f"{option} must be at least one byte and less than 4 EiB, not {shown(value)}.")
    return int(size)


def format_size(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _positive(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{option} must be a whole number of at least 1, not {shown(value)}.")


@dataclass(frozen=True)
class CacheConfig:
    """How KV entries are stored.

    kv_dtype: `auto`, `float32`, `float16`, `bfloat16`, or `int8` with a scale per entry. `auto` is
    float16 with the compiled kernels and float32 with the others.
    page_size: entries per page; None lets the backend choose.
    """

    kv_dtype: str = "auto"
    page_size: int | None = None

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {shown(self.kv_dtype)}.")
        if self.page_size is not None:
            _positive("page_size", self.page_size)


@dataclass(frozen=True)
class TierConfig:
    """Hard ceilings in bytes per tier. `hot` is the page pool: a number, a size such as
    `"64MiB"`, or None for what `max_seqs` full contexts need, at most half the free memory."""

    hot: int | str | None = None

    def __post_init__(self) -> None:
        if self.hot is not None:
            parse_size(self.hot, "kv_hot")

    @property
    def hot_bytes(self) -> int | None:
        """The ceiling in bytes, None when it is to be chosen at load."""
        return None if self.hot is None else parse_size(self.hot, "kv_hot")


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
