"""Model directories: sound ones load exactly, broken ones give one sentence each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_files import hf_config, random_tensors, write_directory
from safetensors.torch import load_file, save_file

from minikv.errors import ModelError
from minikv.models.safetensors_weights import SafetensorsWeights
from minikv.models.sources import ModelFiles, open_model, resolve_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"


def open_directory(path):
    return open_model(resolve_model(str(path)))


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def refusal(path) -> str:
    with pytest.raises(ModelError) as caught:
        open_directory(path)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_tensor_loads_as_it_was_saved(tmp_path, shards, dtype):
    tensors = random_tensors(hf_config(), dtype)
    model = open_directory(write_directory(tmp_path, tensors=tensors, shards=shards))
    assert sorted(model.weights.names()) == sorted(tensors)
    assert model.config.dtype == str(dtype).removeprefix("torch.")
    for name, tensor in tensors.items():
        loaded = model.weights.load(name)
        assert loaded.dtype == torch.float32
        assert loaded.is_contiguous()
        assert torch.equal(loaded, tensor.float())
        assert torch.equal(model.weights.load(name, dtype), tensor)


def test_a_loaded_tensor_is_the_callers_own(tmp_path):
    weights = SafetensorsWeights(write_directory(tmp_path))
    before = weights.load(EMBEDDING)
    weights.load(EMBEDDING).zero_()
    assert torch.equal(weights.load(EMBEDDING), before)
    weights.close()
    assert torch.isfinite(before).all()


def test_the_embedding_keeps_its_stored_type_and_looks_up_float32(tmp_path):
    tensors = random_tensors(hf_config(), torch.bfloat16)
    weights = SafetensorsWeights(write_directory(tmp_path, tensors=tensors))
    table = weights.embedding()
    assert table.weight.dtype == torch.bfloat16
    weights.close()
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(table.lookup(ids), tensors[EMBEDDING][ids].float())


def test_opening_a_model_reads_no_weights(tmp_path):
    raw = hf_config(vocab_size=60000, hidden_size=256, head_dim=64)
    path = write_directory(tmp_path, raw)
    before = resident_pages()
    model = open_directory(path)
    assert (resident_pages() - before) * 4096 < (path / "model.safetensors").stat().st_size / 2
    assert model.weights.shape(EMBEDDING) == (60000, 256)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_family_opens(tmp_path, family):
    model = open_directory(write_directory(tmp_path, hf_config(family)))
    assert model.config.architecture == family
    assert model.config.eos_token_ids == (2,)
    assert model.tokenizer.decode(model.tokenizer.encode("the cat")) == "the cat"
    assert "<|im_start|>assistant" in model.tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_end_tokens_are_the_union_of_all_files(tmp_path):
    path = write_directory(tmp_path, hf_config(eos_token_id=[3]))
    (path / "generation_config.json").write_text('{"eos_token_id": [4, 3]}')
    assert sorted(open_directory(path).config.eos_token_ids) == [2, 3, 4]


class TestTiedEmbeddings:
    def test_flag_true_without_head_is_tied(self, tmp_path):
        model = open_directory(write_directory(tmp_path, hf_config(tie_word_embeddings=True)))
        assert model.config.tied_embeddings

    def test_flag_true_with_an_equal_head_is_tied(self, tmp_path):
        raw = hf_config(tie_word_embeddings=True)
        tensors = random_tensors(raw)
        tensors[HEAD] = tensors[EMBEDDING].clone()
        assert open_directory(write_directory(tmp_path, raw, tensors)).config.tied_embeddings

    def test_flag_true_with_another_head_uses_that_head_as_transformers_does(self, tmp_path):
        raw = hf_config(tie_word_embeddings=True)
        tensors = random_tensors(raw)
        tensors[HEAD] = tensors[EMBEDDING] + 1
        model = open_directory(write_directory(tmp_path, raw, tensors))
        assert not model.config.tied_embeddings
        assert torch.equal(model.weights.load(HEAD), tensors[HEAD])

    def test_flag_true_with_a_head_of_another_shape_is_refused(self, tmp_path):
        raw = hf_config(tie_word_embeddings=True)
        tensors = random_tensors(raw) | {HEAD: torch.zeros(5, 64)}
        assert HEAD in refusal(write_directory(tmp_path, raw, tensors))

    def test_flag_false_with_head_is_untied(self, tmp_path):
        model = open_directory(write_directory(tmp_path, hf_config(tie_word_embeddings=False)))
        assert not model.config.tied_embeddings
        assert model.weights.shape(HEAD) == model.weights.shape(EMBEDDING)

    def test_flag_false_without_head_is_refused(self, tmp_path):
        raw = hf_config(tie_word_embeddings=False)
        tensors = random_tensors(raw)
        del tensors[HEAD]
        message = refusal(write_directory(tmp_path, raw, tensors))
        assert HEAD in message
        assert "tie_word_embeddings" in message


class TestBrokenWeights:
    def test_missing_shard(self, tmp_path):
        path = write_directory(tmp_path, shards=3)
        (path / "model-00002-of-00003.safetensors").unlink()
        assert "model-00002-of-00003.safetensors is missing" in refusal(path)

    def test_missing_tensor(self, tmp_path):
        tensors = random_tensors(hf_config())
        del tensors["model.layers.1.mlp.up_proj.weight"]
        assert "lacks the tensor model.layers.1.mlp.up_proj.weight" in refusal(
            write_directory(tmp_path, tensors=tensors)
        )

    def test_extra_tensor(self, tmp_path):
        tensors = random_tensors(hf_config()) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
        assert "model.layers.0.self_attn.q_proj.bias" in refusal(write_directory(tmp_path, tensors=tensors))

    def test_wrong_shape(self, tmp_path):
        tensors = random_tensors(hf_config()) | {"model.norm.weight": torch.zeros(63)}
        message = refusal(write_directory(tmp_path, tensors=tensors))
        assert "model.norm.weight" in message
        assert "[63]" in message
        assert "[64]" in message

    @pytest.mark.parametrize("keep", [0, 5, 400, -100])
    def test_truncated_file(self, tmp_path, keep):
        path = write_directory(tmp_path)
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        assert "model.safetensors is damaged or incomplete" in refusal(path)

    def test_not_a_safetensors_file(self, tmp_path):
        path = write_directory(tmp_path)
        (path / "model.safetensors").write_bytes(b"x" * 1000)
        assert "damaged" in refusal(path)

    def test_quantised_type(self, tmp_path):
        tensors = random_tensors(hf_config())
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)
        message = refusal(write_directory(tmp_path, tensors=tensors))
        assert name in message
        assert "I8" in message

    def test_rotary_tables_of_old_checkpoints_are_ignored(self, tmp_path):
        tensors = random_tensors(hf_config()) | {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)
        }
        assert open_directory(write_directory(tmp_path, tensors=tensors))


class TestBrokenIndex:
    @pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", 7])
    def test_files_outside_the_directory(self, tmp_path, place):
        path = write_directory(tmp_path / "model", shards=2)
        save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "outside.safetensors")
        index = json.loads((path / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = place
        (path / INDEX).write_text(json.dumps(index))
        assert "model.norm.weight" in refusal(path)

    def test_a_tensor_that_is_not_where_the_index_says(self, tmp_path):
        path = write_directory(tmp_path, shards=2)
        index = json.loads((path / INDEX).read_text())
        first, second = sorted(set(index["weight_map"].values()))
        name = next(name for name, file in index["weight_map"].items() if file == first)
        index["weight_map"][name] = second
        (path / INDEX).write_text(json.dumps(index))
        message = refusal(path)
        assert name in message
        assert second in message

    def test_a_tensor_held_twice(self, tmp_path):
        path = write_directory(tmp_path, shards=2)
        first, second = sorted(path.glob("*.safetensors"))
        save_file(load_file(first) | load_file(second), second)
        assert "twice" in refusal(path)

    @pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{"])
    def test_an_index_without_a_map(self, tmp_path, text):
        path = write_directory(tmp_path, shards=2)
        (path / INDEX).write_text(text)
        assert INDEX in refusal(path)


class TestIncompleteDirectory:
    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_missing_file(self, tmp_path, name):
        path = write_directory(tmp_path)
        (path / name).unlink()
        assert f"lacks {name}" in refusal(path)

    def test_no_weights(self, tmp_path):
        path = write_directory(tmp_path)
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
        assert "neither model.safetensors" in refusal(path)

    def test_a_directory_of_gguf_files_names_one(self, tmp_path):
        (tmp_path / "model.Q8_0.gguf").write_bytes(b"GGUF")
        assert "model.Q8_0.gguf" in refusal(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\xff", "[" * 100_000, ""])
    def test_config_that_is_no_object(self, tmp_path, text):
        path = write_directory(tmp_path)
        (path / "config.json").write_bytes(text.encode("latin-1"))
        assert "config.json" in refusal(path)


class TestFingerprint:
    def test_is_the_same_wherever_the_model_lies(self, tmp_path):
        first = open_directory(write_directory(tmp_path / "a"))
        second = open_directory(write_directory(tmp_path / "b", shards=2))
        assert first.fingerprint == second.fingerprint
        assert len(first.fingerprint) == 64

    def test_differs_by_config_values_and_type(self, tmp_path):
        variants = [
            (hf_config(), random_tensors(hf_config())),
            (hf_config(rope_theta=5e4), random_tensors(hf_config())),
            (hf_config(), random_tensors(hf_config(), seed=1)),
            (hf_config(), random_tensors(hf_config(), torch.bfloat16)),
        ]
        found = {
            open_directory(write_directory(tmp_path / str(i), raw, tensors)).fingerprint
            for i, (raw, tensors) in enumerate(variants)
        }
        assert len(found) == len(variants)


def test_files_that_vanish_after_they_were_resolved_are_reported(tmp_path):
    with pytest.raises(ModelError, match="is missing"):
        open_model(ModelFiles("gone", tmp_path / "gone", "safetensors"))
