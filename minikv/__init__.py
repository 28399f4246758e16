"""minikv: a small LLM inference engine built around its KV cache.

    from minikv import LLM, SamplingParams
    with LLM("smollm2-135m") as llm:
        print(llm.generate("The lighthouse", SamplingParams(max_tokens=20))[0].text)

Importing this package loads nothing heavy; torch comes with the first use of `LLM`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from minikv.config import CacheConfig, TierConfig
from minikv.errors import (
    ConfigError,
    MinikvError,
    ModelError,
    RequestError,
    SessionError,
    TemplateError,
)
from minikv.results import Result, StreamPiece, TokenLogprob, Usage

if TYPE_CHECKING:
    from minikv.jobs import Job
    from minikv.llm import LLM
    from minikv.sampling import SamplingParams
    from minikv.session import ChatSession

__all__ = [
    "LLM",
    "CacheConfig",
    "ChatSession",
    "ConfigError",
    "Job",
    "MinikvError",
    "ModelError",
    "RequestError",
    "Result",
    "SamplingParams",
    "SessionError",
    "StreamPiece",
    "TemplateError",
    "TierConfig",
    "TokenLogprob",
    "Usage",
]

if "torch" not in sys.modules:
    # OpenMP reads this when torch loads it. Threads that spin while they wait burn the time slices of
    # the threads they wait for as soon as another process is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_LAZY = {
    "LLM": "minikv.llm",
    "Job": "minikv.jobs",
    "SamplingParams": "minikv.sampling",
    "ChatSession": "minikv.session",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
