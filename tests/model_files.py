"""Tiny model files on disk: Hugging Face directories and GGUF files, sound unless asked otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, TokenType
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from minikv.models.config import expected_shapes
from minikv.models.hf_config import normalise_config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("Ġ", "a"))
TOKENS = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES))
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def hf_config(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of a tiny model; a change to `...` removes the key."""
    raw = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": len(TOKENS) + 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | changes
    return {key: value for key, value in raw.items() if value is not ...}


def random_tensors(
    raw: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    """Every tensor that the config requires."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(normalise_config(raw))
    return {name: (torch.randn(shape, generator=generator) * 0.1).to(dtype) for name, shape in shapes.items()}


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer of all tiny models here: GPT-2 splitting, five merges, three control tokens."""
    vocab = {token: i for i, token in enumerate(TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


def write_directory(
    path: Path,
    raw: dict[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    shards: int = 1,
) -> Path:
    """A model directory; with `shards` > 1 the tensors are dealt out over files with an index."""
    path.mkdir(parents=True, exist_ok=True)
    raw = hf_config() if raw is None else raw
    tensors = random_tensors(raw) if tensors is None else tensors
    _dump(path / "config.json", raw)
    _dump(
        path / "tokenizer_config.json",
        {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE},
    )
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
        return path
    file_names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: file_names[i % shards] for i, name in enumerate(tensors)}
    for file_name in file_names:
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file_name}
        save_file(part, path / file_name, metadata={"format": "pt"})
    _dump(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return path


def gguf_metadata(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """GGUF keys for a config; `changes` spell dots as __ and `...` removes a key."""
    architecture = raw["model_type"]
    own = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": raw["head_dim"],
        "attention.value_length": raw["head_dim"],
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "rope.freq_base": raw["rope_theta"],
    }
    metadata = {f"{architecture}.{key}": value for key, value in own.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [int(_token_type(token)) for token in TOKENS],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.bos_token_id": raw["bos_token_id"],
        "tokenizer.ggml.eos_token_id": raw["eos_token_id"],
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not ...}


def write_gguf(
    path: Path,
    raw: dict[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    quant: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    architecture: str | None = None,
    **metadata: Any,
) -> Path:
    """A GGUF of the same model, as llama.cpp stores it: matrices in `quant`, the rest float32.

    `extra` adds tensors by their GGUF name as (stored rows, type). `architecture` overrides
    general.architecture only; `metadata` overrides as in `gguf_metadata`.
    """
    raw = hf_config() if raw is None else raw
    writer = gguf.GGUFWriter(path, architecture or raw["model_type"])
    for key, value in gguf_metadata(raw, **metadata).items():
        _add(writer, key, value)
    for name, tensor in (random_tensors(raw) if tensors is None else tensors).items():
        values = _interleave(name, tensor, raw).numpy()
        kind = quant if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    for name, (rows, kind) in (extra or {}).items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{_GGUF_NAMES[rest]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _interleave(name: str, tensor: Tensor, raw: dict[str, Any]) -> Tensor:
    """llama.cpp's conversion for architecture llama: rows i and i + d/2 of a head become neighbours."""
    is_q, is_k = ".q_proj." in name, ".k_proj." in name
    if raw["model_type"] != "llama" or not (is_q or is_k):
        return tensor
    rows = []
    head_dim = raw["head_dim"]
    for head in range(raw["num_attention_heads"] if is_q else raw["num_key_value_heads"]):
        for pair in range(head_dim // 2):
            rows += [head * head_dim + pair, head * head_dim + pair + head_dim // 2]
    return tensor[rows]


def _token_type(token: str) -> TokenType:
    return TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
