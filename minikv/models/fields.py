"""Typed reading of untrusted key-value settings (config.json, GGUF metadata).

Every refusal names the file, the key and the value in one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, NoReturn

from minikv.errors import ModelError

# Larger sizes are damage, not models; the limits keep derived tables small.
LARGEST_SIZE = 2**31
MOST_LAYERS = 4096


class Fields:
    """One mapping of settings and the name it has in messages.

    A key whose value is null counts as absent throughout.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin

    def get(self, key: str) -> Any:
        """The raw value, None when absent."""
        return self.values.get(key)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise ModelError: `origin` has key = value, and why that cannot be used."""
        raise ModelError(f"{self.origin} has {key} = {shorten(self.get(key))}, {why}.")

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """A whole number in [least, most]; without a default the key is required."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelError(
                    f"{self.origin} lacks {key}, which must be a whole number of at least {least}."
                )
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(key, f"which must be a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        """A finite number greater than `above`; without a default the key is required."""
        value = self.optional_number(key, above)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.origin} lacks {key}, which must be a number above {above:g}.")
        return default

    def optional_number(self, key: str, above: float = 0.0) -> float | None:
        """A finite number greater than `above`, None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "which must be a number")
        if not isfinite(value) or value <= above:
            self.refuse(key, f"which must be a finite number above {above:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, "which must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; without a default the key is required."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.origin} lacks {key}, which must be a text.")
            return default
        if not isinstance(value, str):
            self.refuse(key, "which must be a text")
        return value

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """One token id, None when the key is null or absent without a default.

        Unlike the other readers this tells null (no such token) from absent (the default)."""
        ids = self.token_ids(key, default)
        if len(ids) > 1:
            self.refuse(key, "which must be one token id or null")
        return ids[0] if ids else None

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """One token id or a list of them, as a tuple without repeats; () for null."""
        value = self.values.get(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_token_id(item) for item in ids):
            self.refuse(key, "which must be a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_SIZE


def shorten(value: Any, width: int = 80) -> str:
    """`repr` of an untrusted value, cut to `width` characters."""
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."
