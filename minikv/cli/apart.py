"""Files of a command that must not be the one that its cold tier is kept in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minikv.config import TierConfig
from minikv.errors import ConfigError


def check_apart(engine: Mapping[str, Any], path: Path, what: str) -> None:
    """Raise ConfigError if the engine options name the file at `path`, which is `what`, as the cold tier."""
    cold = TierConfig(cold=engine.get("kv_cold")).cold_file
    if cold is not None and _same_file(Path(cold[0]), path):
        raise ConfigError(f"{path} cannot be both {what} and the cold tier; give --kv-cold another file.")


def _same_file(one: Path, other: Path) -> bool:
    """Also of files that are not there yet."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return os.path.realpath(one) == os.path.realpath(other)
