"""How the KV cache is kept, as options of a command, fields of a batch line and settings of a chat say it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from minikv.cache.budget import read_budget
from minikv.config import WITHOUT_POLICY, CacheConfig

# All of CacheConfig but what the pool fixes for every request.
REQUEST_FIELDS = (
    "policy",
    "budget",
    "sinks",
    "recent",
    "window",
    "evicted",
    "prefill",
    "decode_slack",
    "pinned",
    "profile",
    "refit",
)


def cache_config(engine: Mapping[str, Any], compression: Mapping[str, Any]) -> CacheConfig:
    """The configuration that the options of a command stand for. Raises ConfigError."""
    fields = option_fields(compression)
    if "kv_dtype" in engine:
        fields["kv_dtype"] = engine["kv_dtype"]
    return CacheConfig(**fields)


def option_fields(compression: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `CacheConfig` that compression options set. Raises ConfigError."""
    fields = {name.removeprefix("kv_"): value for name, value in compression.items()}
    if "budget" in fields:
        fields["budget"] = read_budget(fields["budget"])
    if "slack" in fields:
        fields["decode_slack"] = fields.pop("slack")
    return fields


def same_value(name: str, one: Any, other: Any) -> bool:
    """Whether two values of a field mean the same: 1.0 is not 1, and and a path has many spellings."""
    if name == "profile" and one is not None and other is not None:
        return os.path.abspath(one) == os.path.abspath(other)
    return one == other and type(one) is type(other)


def _reader(policy: Any) -> str | None:
    """Whose profile a policy reads, if it reads any."""
    return next((name for name in ("compresskv", "sekv") if name in str(policy)), None)


def changed(cache: CacheConfig, fields: Mapping[str, Any]) -> CacheConfig:
    """`cache` with some fields set. A new policy does not inherit what only another one understands.

    Raises ConfigError.
    """
    policy = fields.get("policy", cache.policy)
    dropped: dict[str, Any] = {}
    if policy == "full":
        dropped |= {**WITHOUT_POLICY, "refit": None}
    if policy == "sekv":
        dropped |= {"evicted": "drop", "refit": None}
    if _reader(policy) != _reader(cache.policy):
        dropped |= {"profile": None}
    return dataclasses.replace(cache, **{**dropped, **fields})
