"""Tiny random models for tests of numerics and scheduling: real decoders, no files."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from minikv.config import EngineConfig
from minikv.engine import Engine
from minikv.kernels.backend import AttentionBackend
from minikv.kernels.torch_cpu import TorchBackend
from minikv.models.config import ModelConfig, RopeConfig, expected_shapes
from minikv.models.decoder import Decoder
from minikv.models.embedding import DenseEmbedding
from minikv.results import FinishReason
from minikv.sampling import SamplingParams
from minikv.scheduler.request import FinishEvent, TokenEvent

TINY = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_context=256,
    rope=RopeConfig(),
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    bos_token_id=1,
    eos_token_ids=(2,),
    dtype="float32",
)


class RandomWeights:
    """A weight source of seeded random tensors, scaled so that greedy output is varied."""

    path = "random"

    def __init__(self, config: ModelConfig, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self._tensors = {}
        for name, shape in expected_shapes(config).items():
            noise = torch.randn(shape, generator=generator)
            scale = 1.0 if "embed" in name else 1.5 / math.sqrt(shape[-1])
            self._tensors[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else noise * scale

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def stored_dtype(self, name: str) -> str:
        return "float32"

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._tensors[name].to(dtype).clone()

    def blocks(self, name: str) -> None:
        return None

    def sample(self, name: str) -> bytes:
        return b""

    def embedding(self) -> DenseEmbedding:
        return DenseEmbedding(self._tensors["model.embed_tokens.weight"])

    def close(self) -> None:
        pass


def tiny_decoder(backend: AttentionBackend | None = None, seed: int = 0, **changes) -> Decoder:
    config = replace(TINY, **changes)
    return Decoder(config, RandomWeights(config, seed), backend or TorchBackend())


def tiny_engine(
    decoder: Decoder | None = None, *, page_size: int = 4, kv_dtype=torch.float32, **options
) -> Engine:
    """An engine that checks its cache after every step and poisons freed pages."""
    decoder = decoder or tiny_decoder()
    config = EngineConfig(debug_checks=True, **options)
    kernels = decoder.backend.entries if isinstance(decoder, Decoder) else None
    eos = decoder.config.eos_token_ids
    return Engine(decoder, config, kv_dtype, page_size, eos, entry_kernels=kernels)


def hot_bytes(pages: int, page_size: int = 4, head_dim: int = 16) -> int:
    """`tiers.hot` that gives a float32 pool exactly `pages` usable pages."""
    return (pages + 1) * page_size * (2 * head_dim * 4 + 8)


def prompt(length: int, seed: int = 0, vocab: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


class Collector:
    """Tokens and terminal events by request id; fails if a request ends twice or speaks after its end."""

    def __init__(self):
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishEvent] = {}

    def take(self, events) -> None:
        for event in events:
            assert event.request_id not in self.finished, "an event after the terminal event"
            if isinstance(event, TokenEvent):
                self.tokens.setdefault(event.request_id, []).append(event.token_id)
            else:
                self.finished[event.request_id] = event

    def reason(self, request_id: int) -> FinishReason:
        return self.finished[request_id].reason


def drain(engine: Engine, collector: Collector | None = None, limit: int = 5000) -> Collector:
    collector = collector or Collector()
    for _ in range(limit):
        if not engine.has_work:
            return collector
        collector.take(engine.step())
    raise AssertionError("the engine does not come to an end")


def greedy(max_tokens: int = 12, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


def alone(token_ids: list[int], params: SamplingParams, decoder: Decoder | None = None) -> list[int]:
    """What a request gives with an engine of its own."""
    engine = tiny_engine(decoder)
    (request_id,) = engine.add(token_ids, params)
    return drain(engine).tokens[request_id]
