"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """Such as `0.1.0`; `(not installed)` when run from the source folder alone."""
    try:
        return installed_version("minikv")
    except PackageNotFoundError:
        return "(not installed)"
