"""Fixtures shared by all tests."""

from __future__ import annotations

import os

# Several test processes on few cores must not spin against each other; set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if find_spec("triton") and not torch.cuda.is_available():
    # Its kernels are interpreted; triton looks at this when it is imported, by whatever.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "minikv",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("minikv")


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The built-in model's GGUF file, fetched into the model cache the first time."""
    from minikv.models.sources import resolve_model

    return resolve_model("smollm2-135m").path


@pytest.fixture(scope="session")
def smollm(smollm_path: Path):
    """The built-in model, loaded once for all tests that only generate with it."""
    from minikv import LLM, TierConfig

    with LLM(str(smollm_path), tiers=TierConfig(hot="512MiB")) as llm:
        yield llm
