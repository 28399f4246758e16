"""Budgets: how many entries or bytes of KV cache a sequence may keep."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from minikv.errors import ConfigError, shown
from minikv.sizes import parse_size

_FORMS = 'a fraction such as 0.1 or "1/8", entries per lane such as 256, or a size such as "64MiB"'
_PART = re.compile(r"(\d{1,9})/([1-9]\d{0,8})")
_PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """What a sequence may keep.

    kind: `fraction` of its tokens, `entries` per lane on average, or `bytes` of pages: a ceiling.
    """

    kind: Literal["fraction", "entries", "bytes"]
    amount: float

    def entries(self, num_tokens: int, num_lanes: int) -> int:
        """Entries that all lanes of a sequence of `num_tokens` tokens keep together, at least one each.
        Not for a budget in bytes, which counts pages."""
        assert self.kind != "bytes"
        per_lane = self.amount * num_tokens if self.kind == "fraction" else self.amount
        return max(num_lanes, round(per_lane * num_lanes))

    def pages(self, page_bytes: int) -> int:
        """Whole pages that a budget in bytes pays for."""
        assert self.kind == "bytes"
        return int(self.amount) // page_bytes


def parse_budget(value: float | int | str) -> Budget:
    """The budget that a float in (0, 1], a fraction as text, a whole number of entries or a size stands for.

    Raises ConfigError, saying how to write what was probably meant.
    """
    value = plain_budget(value)
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"budget must be {_FORMS}, not {shown(value)}.")
    if isinstance(value, int):
        if value < 1:
            raise ConfigError(f"budget must keep at least 1 entry per lane, not {shown(value)}.")
        return Budget("entries", value)
    if 0 < value <= 1:
        return Budget("fraction", value)
    if value > 1 and value.is_integer():
        raise ConfigError(
            f"budget {shown(value)} is more than the whole cache; write {int(value)}, without a point, to "
            "keep that many entries per lane."
        )
    raise ConfigError(
        f"budget must be above 0 and at most 1 as a fraction of the context, not {shown(value)}."
    )


def plain_budget(value: Any) -> Any:
    """A budget with a fraction that is written as text, `1/8`, as a float; another one as it is."""
    part = _PART.fullmatch(value.strip()) if isinstance(value, str) else None
    return value if part is None else int(part[1]) / int(part[2])


def read_budget(text: str) -> float | int | str:
    """A budget typed as text, in the form that the configuration takes: `0.1`, `1/128`, `256` or
    `64MiB`."""
    typed = text.strip()
    if re.fullmatch(r"[+-]?\d+", typed):
        if len(typed) > 18:
            raise ConfigError(f"budget must be {_FORMS}, not {shown(typed)}.")
        value: float | int | str = int(typed)
    elif _PLAIN_NUMBER.fullmatch(typed):
        value = float(typed)
    else:
        value = plain_budget(typed)
    parse_budget(value)
    return value


def _parse_text(value: str) -> Budget:
    if _PLAIN_NUMBER.fullmatch(value.strip()):
        raise ConfigError(
            f"budget {shown(value)} is a number in quotes; write it without them, or as a size with a unit."
        )
    try:
        size = parse_size(value)
    except ConfigError:
        raise ConfigError(f"budget must be {_FORMS}, not {shown(value)}.") from None
    return Budget("bytes", size)
