"""The peer: transformers, running the very weights that minikv reads, as float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from minikv.models.config import ModelConfig
    from minikv.models.sources import OpenModel


def peer_settings(config: ModelConfig) -> dict[str, object]:
    """`config` in the words of transformers."""
    if config.rope.kind != "default":
        raise SystemExit(f"The benchmark builds its peer for default RoPE only, not {config.rope.kind}.")
    settings: dict[str, object] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_context,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if config.architecture != "qwen2":  # qwen2 always has these biases and no such setting
        settings["attention_bias"] = config.qkv_bias
    return settings


def load_peer(opened: OpenModel) -> PreTrainedModel:
    """A transformers model that holds the dequantised weights once, without a second copy."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(opened.config.architecture, **peer_settings(opened.config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    state = {name: opened.weights.load(name) for name in opened.weights.names()}
    if opened.config.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    # The rotary table is no weight: made on the meta device it has no values yet.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


class Peer:
    """Greedy generation of a given number of tokens, a whole padded batch at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
        """`counts[i]` tokens after `prompts[i]`. The batch runs to its largest count, since no row
        can leave it earlier; the tokens past a row's own count are thrown away."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(counts), do_sample=False)  # pyright: ignore
        return [row[longest : longest + count] for row, count in zip(out.tolist(), counts, strict=True)]
