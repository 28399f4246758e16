"""The file of a profile: what it holds, which model it is of, and how a wrong one is refused.

    save_profile --> FILE.safetensors --> load_profile(path, of this model) --> HeadProfile
                     minikv/calibration/profiles/ --> find_shipped(fingerprint)

Everything that says which model a profile is of stands in the metadata, as text.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minikv.cache.policies.profile import HeadProfile
from minikv.calibration.scores import without_negatives
from minikv.errors import ConfigError, RequestError
from minikv.models.config import ModelConfig
from minikv.text.tokenizer import Tokenizer

FORMAT = "minikv-profile"
VERSION = "1"


@dataclass(frozen=True)
class Kind:
    """A kind of file that belongs to a model: format and version in its metadata, what it is called, and the
    command that makes one."""

    format: str
    version: str
    name: str
    command: str

    def broken(self, path: str) -> str:
        """That a file is none of these."""
        what = "calibration profile" if self.name == "profile" else self.name
        return f"{path} is damaged or not a {what}; make one with {self.command}."


PROFILE = Kind(FORMAT, VERSION, "profile", "`minikv calibrate MODEL -o FILE`")
# Text whose tokens tell apart tokenizers that have the same vocabulary.
_PROBE = "Lantern 40721: naïve café – Größe, ёлка, 灯塔\n\n\tdef f(x):  return x+1"


@dataclass(frozen=True)
class ModelIdentity:
    """What a profile depends on. Hashes are sha256 in hex; `template_hash` is that of "" without one."""

    fingerprint: str
    tokenizer_hash: str
    template_hash: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Measurement:
    """The tensors of a profile, all float32.

    retrieval: [layers, query_heads], mean span-normalised attention on the answer; copy: the same shape,
    share of argmax hits; stability: the same shape, share of bootstrap resamples with the head among its
    layer's `top_heads` by retrieval score; layer_errors: [layers], sum 1; layer_spread: [layers], standard
    deviation of the errors between texts.
    """

    retrieval: Tensor
    copy: Tensor
    stability: Tensor
    layer_errors: Tensor
    layer_spread: Tensor
    top_heads: int

    def profile(self) -> HeadProfile:
        """What a policy needs of it."""
        return HeadProfile(without_negatives(self.retrieval), self.layer_errors, self.top_heads)


class CalibratedModel(Protocol):
    """What a profile is made from or applied to; an `OpenModel`, `LLM` or `Probe`."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def config(self) -> ModelConfig: ...


def identity_of(model: CalibratedModel) -> ModelIdentity:
    """All that ties a profile to a model. Hashes the whole vocabulary."""
    config = model.config
    return ModelIdentity(
        fingerprint=model.fingerprint,
        tokenizer_hash=tokenizer_hash(model.tokenizer),
        template_hash=template_hash(model.tokenizer),
        num_layers=config.num_layers,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hash of a tokenizer's vocabulary and of how it splits a text."""
    vocabulary = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items())
    return _sha256(repr((vocabulary, tokenizer.encode(_PROBE))))


def template_hash(tokenizer: Tokenizer) -> str:
    """Hash of a tokenizer's chat templates."""
    sources = tokenizer.chat_template_sources
    return _sha256(repr(sorted(sources.items())) if sources else "")


def save_profile(
    path: Path, measurement: Measurement, identity: ModelIdentity, facts: Mapping[str, object]
) -> None:
    """Write a profile, whole or not at all; `facts` (seed, number of trials, ...) go to the metadata.

    RequestError when the file cannot be written.
    """
    tensors = {name: t for name, t in vars(measurement).items() if isinstance(t, Tensor)}
    values = {"top_heads": measurement.top_heads, **vars(identity), **facts}
    write_tensors(path, tensors, values, PROFILE)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, object], kind: Kind) -> None:
    """Write tensors and what the metadata are to say, whole or not at all. RequestError when that fails."""
    values = {"format": kind.format, "format_version": kind.version, **facts}
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        save_file(whole, temporary, metadata={name: str(value) for name, value in values.items()})
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except (OSError, SafetensorError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"Cannot write {path}: {what.lower().rstrip('.')}.") from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def load_profile(
    path: str | os.PathLike[str],
    *,
    fingerprint: str,
    num_layers: int,
    num_query_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    tokenizer_hash: str | None = None,
    template_hash: str | None = None,
) -> HeadProfile:
    """The profile in a file, if it is of the model that the other arguments describe.

    What is None is not compared. Raises ConfigError, in one sentence, for a file that cannot be read or
    is no profile, and for the first thing in which the model it was made from differs from this one.
    """
    path = os.fspath(path)
    metadata = read_metadata(path)
    wanted: dict[str, object] = {
        "num_layers": num_layers,
        "num_query_heads": num_query_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "tokenizer_hash": tokenizer_hash,
        "template_hash": template_hash,
        "fingerprint": fingerprint,
    }
    check_identity(path, metadata, wanted)
    return _read_measurement(path, metadata).profile()


def check_identity(
    path: str, metadata: Mapping[str, str], wanted: Mapping[str, object], kind: Kind = PROFILE
) -> None:
    """ConfigError for the first thing that the metadata say otherwise; what is None is not compared."""
    for name, value in wanted.items():
        if value is not None and metadata.get(name) != str(value):
            raise ConfigError(_mismatch(path, name, metadata.get(name), value, kind))


def load_profile_for(path: str | os.PathLike[str], model: CalibratedModel) -> HeadProfile:
    """`load_profile`, comparing everything."""
    return load_profile(path, **vars(identity_of(model)))


def read_metadata(path: str, kind: Kind = PROFILE) -> dict[str, str]:
    """The metadata of a profile or a router; ConfigError when the file is none of this version."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise ConfigError(f"There is no {kind.name} {path}; make one with {kind.command}.") from None
    except (OSError, SafetensorError):
        raise ConfigError(kind.broken(path)) from None
    if metadata.get("format") != kind.format:
        raise ConfigError(kind.broken(path))
    if metadata.get("format_version") != kind.version:
        raise ConfigError(
            f"The {kind.name} {path} has format version {metadata.get('format_version')}, but this minikv "
            f"reads version {kind.version}; make it anew with {kind.command}."
        )
    return metadata


def read_measurement(path: str) -> Measurement:
    """All tensors of a profile, of whatever model; ConfigError as in `load_profile`."""
    return _read_measurement(path, read_metadata(path))


def find_shipped(fingerprint: str) -> HeadProfile | None:
    """The profile in this package for the model of that fingerprint, if there is one."""
    folder = resources.files("minikv.calibration") / "profiles"
    if not folder.is_dir():
        return None
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".safetensors"):
            with resources.as_file(entry) as path:
                metadata = read_metadata(str(path))
                if metadata["fingerprint"] == fingerprint:
                    return _read_measurement(str(path), metadata).profile()
    return None


_WORDS = {
    "num_layers": "layers",
    "num_query_heads": "query heads per layer",
    "num_kv_heads": "KV heads per layer",
    "head_dim": "numbers per head",
}


def _mismatch(path: str, name: str, found: str | None, wanted: object, kind: Kind) -> str:
    fix = f"give a {kind.name} that was made from this model, or make one with {kind.command}."
    if name in _WORDS:
        has = f"{found} {_WORDS[name]}"
        return f"The {kind.name} {path} is of a model with {has}, but this model has {wanted}; {fix}"
    what = {"tokenizer_hash": "tokenizer", "template_hash": "chat template", "fingerprint": "model"}[name]
    key = {"fingerprint": "fingerprint"}.get(name, "hash")
    found, wanted = (f"{text[:12]}..." for text in (str(found), str(wanted)))
    which = f"{key} {found}, but here it is {wanted}"
    return f"The {kind.name} {path} was made with another {what} ({which}); {fix}"


def _read_measurement(path: str, metadata: Mapping[str, str]) -> Measurement:
    try:
        layers, heads, top = (int(metadata[name]) for name in ("num_layers", "num_query_heads", "top_heads"))
        shapes = dict.fromkeys(("retrieval", "copy", "stability"), (layers, heads))
        shapes |= dict.fromkeys(("layer_errors", "layer_spread"), (layers,))
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError, KeyError, ValueError):
        raise ConfigError(PROFILE.broken(path)) from None
    for name, shape in shapes.items():
        tensor = tensors[name]
        finite = tensor.dtype == torch.float32 and bool(tensor.isfinite().all())
        if tuple(tensor.shape) != shape or not finite:
            raise ConfigError(PROFILE.broken(path))
    if not 1 <= top <= heads or bool((tensors["layer_errors"] < 0).any()):
        raise ConfigError(PROFILE.broken(path))
    return Measurement(**tensors, top_heads=top)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
