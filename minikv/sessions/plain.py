"""Values of a file's JSON that are looked at before they are believed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from minikv.cache.protect import Ranges
from minikv.config import CacheConfig, check_ranges
from minikv.errors import ConfigError
from minikv.sessions.container import Unusable, damaged

LARGEST = 1 << 20  # of any setting: no context is longer, and what is far larger would take for ever


def field_of(body: Any, name: str, kind: type) -> Any:
    """A field of an object, of exactly that type; Unusable where it is none."""
    value = body.get(name) if isinstance(body, Mapping) else None
    if type(value) is not kind:
        raise damaged(f"its {name.replace('_', ' ')} cannot be read")
    return value


def whole(body: Any, name: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    value = field_of(body, name, int)
    if not low <= value <= high:
        raise damaged(f"its {name.replace('_', ' ')} cannot be {value}")
    return value


def pair(body: Any, name: str, high: int) -> tuple[int, int]:
    """Two whole numbers, 0 <= first <= second <= high."""
    value = field_of(body, name, list)
    if len(value) != 2 or any(type(n) is not int for n in value) or not 0 <= value[0] <= value[1] <= high:
        raise damaged(f"its {name.replace('_', ' ')} cannot be read")
    return value[0], value[1]


def plain_cache(cache: CacheConfig) -> dict[str, Any]:
    """A cache configuration as JSON. What the pool fixes for every request is the pool's to say."""
    fields = dataclasses.asdict(cache)
    del fields["kv_dtype"], fields["page_size"]
    if cache.profile_path is not None:
        fields["profile"] = os.path.abspath(cache.profile_path)
    return fields


def cache_of(fields: Mapping[str, Any]) -> CacheConfig:
    """The cache configuration of `plain_cache`; Unusable for one that this version does not know."""
    fault = Unusable("was held with a cache configuration that this minikv does not know")
    try:
        cache = CacheConfig(**fields)
    except (TypeError, ConfigError):
        raise fault from None
    profile = cache.profile_path
    if profile is not None and not os.path.isfile(profile):
        raise Unusable(f"was held with the calibration profile {profile}, which is not there any more")
    numbers = [value for value in fields.values() if type(value) is int]
    if max([*numbers, *(end for _, end in cache.pinned)], default=0) > LARGEST:
        raise fault
    return cache


def ranges_of(body: Any, name: str) -> Ranges:
    """Token ranges [start, end)."""
    try:
        ranges = check_ranges(name, field_of(body, name, list))
    except ConfigError:
        raise damaged(f"its {name} tokens cannot be read") from None
    if any(end > LARGEST for _, end in ranges):
        raise damaged(f"its {name} tokens cannot be read")
    return ranges
