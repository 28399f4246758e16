"""The one place where flashinfer is imported."""

import importlib
from typing import Any


def load() -> Any:
    """The package, Any to a type checker, which has to pass where it is not installed. Raises ImportError if
    it, or something that it needs, is not there."""
    return importlib.import_module("flashinfer")
