"""Profile files: what comes back, and how a wrong one is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from model_files import CHAT_TEMPLATE
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import TINY
from tiny_tokenizers import tiny_tokenizer

from minikv.calibration.profile import (
    Measurement,
    find_shipped,
    identity_of,
    load_profile,
    load_profile_for,
    read_measurement,
    read_metadata,
    save_profile,
)
from minikv.errors import ConfigError, ModelError, RequestError
from minikv.models.config import ModelConfig
from minikv.text.tokenizer import Tokenizer

LAYERS, HEADS = TINY.num_layers, TINY.num_query_heads


@dataclass
class Model:
    fingerprint: str = "f" * 64
    tokenizer: Tokenizer = field(
        default_factory=lambda: tiny_tokenizer("byte_level", chat_template=CHAT_TEMPLATE)
    )
    config: ModelConfig = TINY


def measurement() -> Measurement:
    generator = torch.Generator().manual_seed(0)
    heads = [torch.rand(LAYERS, HEADS, generator=generator) for _ in range(3)]
    errors, spread = torch.tensor([0.7, 0.3]), torch.tensor([0.1, 0.2])
    return Measurement(heads[0] - 0.2, heads[1], heads[2], errors, spread, top_heads=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.safetensors"
    save_profile(path, measurement(), identity_of(Model()), {"seed": 5, "trials": 60})
    return path


def refusal(path: Path, model: Model) -> str:
    with pytest.raises(ConfigError) as caught:
        load_profile_for(path, model)
    sentence = str(caught.value)
    assert sentence.endswith(".") and not re.search(r"[.!?] [A-Z]", sentence) and str(path) in sentence
    assert "minikv calibrate MODEL -o FILE" in sentence
    return sentence


def test_a_profile_comes_back_as_it_was_saved(path: Path) -> None:
    saved, found = measurement(), read_measurement(str(path))
    for name, value in vars(saved).items():
        assert torch.equal(torch.as_tensor(getattr(found, name)), torch.as_tensor(value))
    metadata = read_metadata(str(path))
    assert metadata["seed"] == "5" and metadata["trials"] == "60"
    assert metadata["num_kv_heads"] == str(TINY.num_kv_heads) and metadata["top_heads"] == "3"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_policy_gets_scores_from_zero_up_in_the_same_order(path: Path) -> None:
    profile = load_profile_for(path, Model())
    saved = measurement()
    assert profile.retrieval_scores.min() >= 0 and profile.top_heads == 3
    assert torch.equal(profile.layer_errors, saved.layer_errors)
    order = saved.retrieval.argsort(dim=1, descending=True)
    assert torch.equal(profile.retrieval_scores.argsort(dim=1, descending=True), order)


def test_shapes_and_fingerprint_suffice(path: Path) -> None:
    load_profile(path, fingerprint="f" * 64, num_layers=LAYERS, num_query_heads=HEADS)
    with pytest.raises(ConfigError, match="another model"):
        load_profile(path, fingerprint="e" * 64, num_layers=LAYERS, num_query_heads=HEADS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 7}, "2 layers, but this model has 7"),
        ({"num_query_heads": 4}, "6 query heads per layer, but this model has 4"),
        ({"num_kv_heads": 3}, "2 KV heads per layer, but this model has 3"),
        ({"head_dim": 32}, "16 numbers per head, but this model has 32"),
    ],
)
def test_another_shape_is_named(path: Path, changes: dict, words: str) -> None:
    assert words in refusal(path, Model(config=replace(TINY, **changes)))


def test_another_model_tokenizer_or_template_is_named(path: Path) -> None:
    assert "another model (fingerprint ffffffffffff..., but here it is aaaaaaaaaaaa...)" in refusal(
        path, Model(fingerprint="a" * 64)
    )
    other = tiny_tokenizer("metaspace", chat_template=CHAT_TEMPLATE)
    assert "another tokenizer" in refusal(path, Model(tokenizer=other))
    for template in (None, CHAT_TEMPLATE + " "):
        other = tiny_tokenizer("byte_level", chat_template=template)
        assert "another chat template" in refusal(path, Model(tokenizer=other))


def test_a_missing_file_a_folder_and_a_file_of_something_else_are_refused(tmp_path: Path) -> None:
    assert "There is no profile" in refusal(tmp_path / "none.safetensors", Model())
    assert "damaged or not a calibration profile" in refusal(tmp_path, Model())
    for content in (b"", b"garbage", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", bytes(64), b"\xff" * 64):
        (tmp_path / "file").write_bytes(content)
        assert "damaged or not a calibration profile" in refusal(tmp_path / "file", Model())
    save_file({"retrieval": torch.zeros(2, 6)}, tmp_path / "weights.safetensors")
    assert "damaged or not a calibration profile" in refusal(tmp_path / "weights.safetensors", Model())


def test_a_truncated_file_is_refused_wherever_it_ends(path: Path) -> None:
    whole = path.read_bytes()
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        assert "damaged" in refusal(path, Model())


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("stability"),
        lambda tensors: tensors.update(retrieval=torch.zeros(LAYERS, HEADS + 1)),
        lambda tensors: tensors.update(copy=torch.zeros(LAYERS, HEADS, dtype=torch.float64)),
        lambda tensors: tensors["retrieval"].fill_(float("nan")),
        lambda tensors: tensors["layer_errors"].fill_(-1.0),
    ],
    ids=["missing", "shape", "dtype", "nan", "negative"],
)
def test_tensors_that_cannot_be_are_refused(path: Path, change) -> None:
    metadata, tensors = read_metadata(str(path)), load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    assert "damaged" in refusal(path, Model())


def test_a_later_format_is_named(path: Path) -> None:
    metadata = read_metadata(str(path)) | {"format_version": "2"}
    save_file(load_file(path), path, metadata=metadata)
    assert "format version 2, but this minikv reads version 1" in refusal(path, Model())


def test_no_half_file_is_left_when_writing_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    whole = path.read_bytes()
    monkeypatch.setattr("minikv.calibration.profile.os.replace", fail)
    with pytest.raises(RequestError, match=r"Cannot write .*: disk full\.$"):
        save_profile(path, measurement(), identity_of(Model()), {})
    assert path.read_bytes() == whole and len(list(path.parent.iterdir())) == 1


def test_a_full_disk_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device")  # what the library makes of an OSError

    monkeypatch.setattr("minikv.calibration.profile.save_file", fail)
    with pytest.raises(RequestError, match=r"Cannot write .*no space left on device"):
        save_profile(path, measurement(), identity_of(Model()), {})
    assert len(list(path.parent.iterdir())) == 1


def test_models_without_a_shipped_profile_have_none() -> None:
    assert find_shipped("0" * 64) is None


def test_shipped_profiles_load() -> None:
    files = list((resources.files("minikv.calibration") / "profiles").iterdir())
    assert files
    for file in files:
        with resources.as_file(file) as path:
            shipped = read_measurement(str(path))
            assert shipped.layer_errors.sum() == pytest.approx(1)
            assert find_shipped(read_metadata(str(path))["fingerprint"]) is not None


def test_the_shipped_profile_is_of_the_built_in_model() -> None:
    from minikv.models.sources import open_model, resolve_model

    try:
        files = resolve_model("smollm2-135m", offline=True)
    except ModelError:
        pytest.skip("smollm2-135m is not in the model cache")
    model = open_model(files)
    model.weights.close()
    profile = find_shipped(model.fingerprint)
    assert profile is not None
    with resources.as_file(
        resources.files("minikv.calibration") / "profiles/smollm2-135m.safetensors"
    ) as path:
        assert torch.equal(load_profile_for(path, model).retrieval_scores, profile.retrieval_scores)
