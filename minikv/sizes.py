"""Sizes in bytes: from what a user writes, and to what a user reads."""

from __future__ import annotations

import re

from minikv.errors import ConfigError, shown

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


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
