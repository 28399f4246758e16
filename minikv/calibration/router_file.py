"""The file of a router: like a profile's, with the same checks of what model it is of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minikv.cache.spans.router import Router
from minikv.calibration.profile import (
    CalibratedModel,
    Kind,
    ModelIdentity,
    check_identity,
    identity_of,
    read_metadata,
    write_tensors,
)
from minikv.config import ROUTERS
from minikv.errors import ConfigError

KIND = Kind("minikv-router", "2", "router", "`minikv train-router MODEL -o FILE`")


def save_router(path: Path, router: Router, identity: ModelIdentity, facts: Mapping[str, object]) -> None:
    """Write a router, whole or not at all; `facts` go to the metadata. RequestError when that fails."""
    write_tensors(path, vars(router), vars(identity) | dict(facts), KIND)


def load_router_for(path: str | os.PathLike[str], model: CalibratedModel) -> Router:
    """The router in a file. ConfigError, in one sentence, if there is none or it is another model's."""
    path = os.fspath(path)
    metadata = read_metadata(path, KIND)
    check_identity(path, metadata, vars(identity_of(model)), KIND)
    return _read(path, metadata)


SHIPPED, WITHOUT = ROUTERS


def named_router(profile: str | None, model: CalibratedModel) -> Router | None:
    """The router that a configuration names: a file's, none, or as long as it names none of these the one in
    this package, if there is one for the model. ConfigError, in one sentence, if one that is named is not
    there or another model's."""
    if profile == WITHOUT:
        return None
    if profile not in (None, SHIPPED):
        return load_router_for(profile, model)
    router = find_shipped_router(model.fingerprint)
    if router is None and profile == SHIPPED:
        raise ConfigError(
            f"minikv comes with no router for this model; make one with {KIND.command} and give its path."
        )
    return router


def find_shipped_router(fingerprint: str) -> Router | None:
    """The router in this package for the model of that fingerprint, if there is one."""
    folder = resources.files("minikv.calibration") / "routers"
    if not folder.is_dir():
        return None
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".safetensors"):
            with resources.as_file(entry) as path:
                metadata = read_metadata(str(path), KIND)
                if metadata["fingerprint"] == fingerprint:
                    return _read(str(path), metadata)
    return None


def _read(path: str, metadata: Mapping[str, str]) -> Router:
    try:
        layers, heads, width = (int(metadata[n]) for n in ("num_layers", "num_query_heads", "head_dim"))
        with safe_open(path, framework="pt") as file:
            parts: dict[str, Tensor] = {name: file.get_tensor(name) for name in ("scale", "bias")}
    except (OSError, SafetensorError, KeyError, ValueError):
        raise ConfigError(KIND.broken(path)) from None
    shapes = {"scale": (layers, heads, width // 4), "bias": (layers, heads)}
    for name, part in parts.items():
        finite = part.dtype == torch.float32 and bool(part.isfinite().all())
        if tuple(part.shape) != shapes[name] or not finite:
            raise ConfigError(KIND.broken(path))
    return Router(**parts)
