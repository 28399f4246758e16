"""From the name of a model to its files, and from its files to an open model.

A name is a local directory, a local .gguf file, a built-in model, or a Hub id, tried in the
order built-in, local, Hub.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from minikv.errors import ModelError
from minikv.models.builtin import BUILTIN, BuiltinModel, fetch_builtin, model_cache_dir
from minikv.models.config import ModelConfig
from minikv.models.gguf_config import config_from_gguf
from minikv.models.gguf_file import GGUFFile
from minikv.models.gguf_tokenizer import tokenizer_from_gguf
from minikv.models.gguf_weights import GGUFWeights, rope_factors
from minikv.models.hf_config import normalise_config
from minikv.models.hub import fetch_from_hub, is_hub_id
from minikv.models.safetensors_weights import INDEX_FILE, SINGLE_FILE, SafetensorsWeights, read_json
from minikv.models.weights import WeightSource, check_weights, fingerprint
from minikv.text.tokenizer import Tokenizer

__all__ = [
    "BUILTIN",
    "BuiltinModel",
    "ModelFiles",
    "OpenModel",
    "model_cache_dir",
    "open_model",
    "resolve_model",
]


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk: a GGUF file, or a directory of safetensors. `name` is what was asked for."""

    name: str
    path: Path
    kind: Literal["safetensors", "gguf"]


@dataclass
class OpenModel:
    """A model whose config, tensor names and tokenizer are checked; weights are not yet read.

    `config.eos_token_ids` is the union of all sources. `fingerprint` (sha256, hex) is the same
    for the same model wherever it lies.
    """

    name: str
    config: ModelConfig
    weights: WeightSource
    tokenizer: Tokenizer
    fingerprint: str


def resolve_model(
    name: str, *, revision: str | None = None, offline: bool = False, progress: bool = False
) -> ModelFiles:
    """Find the files of a model, fetching them if needed and not `offline`.

    `revision` is a Hub branch, tag or commit. `progress` shows a bar on stderr if that is a
    terminal. Raises ModelError with the fix.
    """
    if name in BUILTIN:
        _refuse_revision(name, revision)
        return ModelFiles(
            name, fetch_builtin(name, BUILTIN[name], offline=offline, progress=progress), "gguf"
        )
    path = Path(os.path.expanduser(name))
    if name.strip() and _exists(path):
        _refuse_revision(name, revision)
        return ModelFiles(name, path, _kind_on_disk(path))
    if name.endswith(".gguf") or name.startswith(("/", "./", "../", "~")):
        raise ModelError(f"{name} does not exist; check the path.")
    if not is_hub_id(name):
        raise ModelError(
            f'"{name}" is not a model: give a directory, a .gguf file, a Hub id such as org/name, '
            f"or a built-in name ({', '.join(BUILTIN)})."
        )
    snapshot = fetch_from_hub(name, revision=revision, offline=offline, progress=progress)
    if not snapshot.is_dir():
        raise ModelError(f"{name} holds none of the files of a safetensors model, so it cannot be used.")
    return ModelFiles(name, snapshot, _kind_on_disk(snapshot))


def open_model(files: ModelFiles) -> OpenModel:
    """Read everything but the weights, and check all of it.

    Raises ModelError naming the file, key or tensor that is missing, damaged or not supported.
    """
    return _open_gguf(files) if files.kind == "gguf" else _open_directory(files)


def _open_directory(files: ModelFiles) -> OpenModel:
    raw = read_json(files.path / "config.json")
    generation = files.path / "generation_config.json"
    config = normalise_config(raw, read_json(generation) if generation.exists() else None)
    weights = SafetensorsWeights(files.path)
    # transformers ties only tables that are equal, whatever the flag says; so does this.
    tied = config.tied_embeddings and not weights.head_differs()
    config = replace(config, tied_embeddings=tied, dtype=weights.dtype)
    check_weights(weights, config)
    tokenizer = Tokenizer.from_directory(files.path, extra_eos=config.eos_token_ids)
    return _opened(files, config, weights, tokenizer)


def _open_gguf(files: ModelFiles) -> OpenModel:
    file = GGUFFile(files.path)
    origin = str(files.path)
    layout = GGUFWeights(file, None)
    shapes = {name: layout.shape(name) for name in layout.names()}
    config = config_from_gguf(
        file.metadata, shapes, dtype=layout.dtype, frequency_factors=rope_factors(file), origin=origin
    )
    heads = (config.num_query_heads, config.num_kv_heads) if config.architecture == "llama" else None
    weights = GGUFWeights(file, heads)
    check_weights(weights, config)
    tokenizer = tokenizer_from_gguf(file.metadata, origin)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{origin} has {tokenizer.vocab_size} tokens but a token table of only {config.vocab_size} rows."
        )
    return _opened(files, config, weights, tokenizer)


def _opened(files: ModelFiles, config: ModelConfig, weights: WeightSource, tokenizer: Tokenizer) -> OpenModel:
    config = replace(config, eos_token_ids=tokenizer.eos_token_ids)
    return OpenModel(files.name, config, weights, tokenizer, fingerprint(weights, config))


def _kind_on_disk(path: Path) -> Literal["safetensors", "gguf"]:
    """Which kind of model lies there; ModelError when the files of neither are complete."""
    if not path.is_dir():
        if path.suffix == ".safetensors":
            raise ModelError(f"{path} is one weight file; give the directory that holds it and config.json.")
        return "gguf"
    for needed in ("config.json", "tokenizer.json"):
        if not (path / needed).is_file():
            raise ModelError(
                f"{path} lacks {needed}, so it is not a complete model directory{_gguf_hint(path)}."
            )
    if not any((path / weights).is_file() for weights in (SINGLE_FILE, INDEX_FILE)):
        raise ModelError(
            f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are read."
        )
    return "safetensors"


def _gguf_hint(path: Path) -> str:
    files = sorted(path.glob("*.gguf"))
    return f"; to use a GGUF in it, give the file, such as {files[0]}" if files else ""


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # over-long names, null bytes
        return False


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(f'{name} is not a Hub model, so the revision "{revision}" does not apply.')
