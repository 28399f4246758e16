"""Attention and the engine on a CUDA device: one table, in some minutes.

    python benchmarks/bench_gpu.py [--quick] [--backends triton flashinfer]

Decode attention is set against the device's own copy bandwidth, prefill attention against torch's fused
attention, whole generations against transformers on a model of the same shape with random weights. Then
what a long context costs whole, at 53 % and at 3 % of its entries, and what policy sekv does to decoding.
Medians; attention is checked before it is timed, except over very long lanes.
With TRITON_INTERPRET=1 and --tiny it runs on the CPU, which tests this file and measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.pool import PagePool, page_bytes
from minikv.config import CacheConfig, EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.kernels.backend import ON_DEVICES
from minikv.kernels.batch import Batch
from minikv.kernels.triton.probe import interpreted
from minikv.models.config import ModelConfig, RopeConfig, expected_shapes
from minikv.models.decoder import Decoder
from minikv.models.embedding import DenseEmbedding
from minikv.models.graphs import CudaGraphs
from minikv.sampling import SamplingParams
from minikv.scheduler.request import TokenEvent

HEAD_DIM, KV_HEADS, GROUP = 128, 8, 4
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_context=8192,
    rope=RopeConfig(),
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    bos_token_id=1,
    eos_token_ids=(2,),
    dtype="bfloat16",
)


@dataclass(frozen=True)
class Sizes:
    """decode: (sequences, entries) each. chunks: (rows, past). engine: (sequences, prompt, reply). zoom:
    prompt, reply and the part of the cache that is left of it."""

    copy_bytes: int
    rounds: int
    decode: tuple[tuple[int, int], ...]
    chunks: tuple[tuple[int, int], ...]
    context: int
    model: ModelConfig
    engine: tuple[tuple[int, int, int], ...]
    zoom: tuple[int, int, float]


WHOLE = Sizes(
    1 << 30,
    20,
    ((1, 1024), (1, 8192), (1, 131_072), (16, 8192), (64, 4096)),
    ((512, 0), (2048, 0), (8192, 0), (512, 32_768)),
    131_072,
    MODEL,
    ((1, 512, 128), (16, 512, 128)),
    (7168, 128, 0.1),
)
QUICK = replace(WHOLE, rounds=5, decode=WHOLE.decode[1:4], chunks=WHOLE.chunks[1:2], engine=WHOLE.engine[:1])
TINY = Sizes(
    1 << 12,
    1,
    ((1, 40), (2, 300)),
    ((20, 0), (5, 40)),
    128,
    replace(
        MODEL, vocab_size=64, hidden_size=64, intermediate_size=64,
        num_layers=1, num_query_heads=2, num_kv_heads=1,
    ),
    ((2, 20, 2),),
    (150, 3, 0.5),
)  # fmt: skip


class Timer:
    """Medians of seconds on one device."""

    def __init__(self, device: torch.device, rounds: int):
        self.device, self.rounds = device, rounds

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        return statistics.median(self._once(run) for _ in range(self.rounds))

    def _once(self, run: Callable[[], object]) -> float:
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def copy_bandwidth(sizes: Sizes, time_of: Timer) -> float:
    """Bytes read and written per second by a copy within the device."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=time_of.device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / time_of(lambda: target.copy_(source))


def batch_of(rows: list[int], past: list[int], page_size: int, dtype: torch.dtype, device: Any) -> Batch:
    """One layer; the pages of all lanes lie in random order."""
    num_pages = [-(-(a + b) // page_size) for a, b in zip(rows, past, strict=True)]
    total = sum(num_pages) * KV_HEADS
    pool = PagePool(total, page_size, HEAD_DIM, dtype, device=device)
    pool.keys.copy_(torch.randn(pool.keys.shape, device=device))
    pool.values.copy_(torch.randn(pool.values.shape, device=device))
    order = (1 + torch.randperm(total)).to(torch.int32)
    tables = torch.zeros(len(rows), 1, KV_HEADS, max(num_pages), dtype=torch.int32)
    at = 0
    for s, count in enumerate(num_pages):
        tables[s, 0, :, :count] = order[at : at + count * KV_HEADS].view(KV_HEADS, count)
        at += count * KV_HEADS
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    positions = torch.arange(starts[-1])
    lengths = torch.tensor(past)[:, None, None].expand(-1, 1, KV_HEADS).contiguous()
    return Batch(
        pool, positions, positions, positions, starts, positions, tables, lengths, [False] * len(rows)
    )


def dense_lane(batch: Batch, s: int, backend: Any) -> tuple[Tensor, Tensor]:
    """Keys and values [1, KV_HEADS, entries, HEAD_DIM] of a sequence, new rows included."""
    page_size = batch.pool.page_size
    count = int(batch.past_lengths[s, 0, 0]) + batch.row_starts[s + 1] - batch.row_starts[s]
    entry = torch.arange(count)
    slots = batch.lane_pages[s, 0][:, entry // page_size].long() * page_size + entry % page_size
    slots = slots.to(backend.device)
    return tuple(t.view(-1, HEAD_DIM)[slots][None] for t in (batch.pool.keys, batch.pool.values))  # type: ignore[return-value]


def check(batch: Batch, q: Tensor, out: Tensor, backend: Any) -> None:
    """Fail unless the outputs are those of torch's attention over the same entries."""
    for s, (start, stop) in enumerate(pairwise(batch.row_starts)):
        keys, values = (t.float().repeat_interleave(GROUP, 1) for t in dense_lane(batch, s, backend))
        rows = q[start:stop].float().transpose(0, 1)[None]
        seen = torch.ones(stop - start, keys.shape[2], dtype=torch.bool, device=q.device)
        seen = seen.tril(keys.shape[2] - (stop - start))
        expected = F.scaled_dot_product_attention(rows, keys, values, seen)[0].transpose(0, 1)
        torch.testing.assert_close(out[start:stop].float(), expected, atol=2e-2, rtol=2e-2)
        if s == 1:
            return  # the others are like the first two


def prepared(rows: list[int], past: list[int], backend: Any) -> tuple[Batch, Tensor]:
    """A planned batch and its queries, checked once."""
    dtype = torch.float32 if interpreted() else torch.bfloat16
    batch = batch_of(rows, past, backend.page_size, dtype, backend.device)
    backend.plan(batch)
    q = torch.randn(batch.num_rows, KV_HEADS * GROUP, HEAD_DIM, device=backend.device).to(dtype)
    if max(rows) * (max(rows) + max(past)) <= 1 << 26:
        check(batch, q, backend.attend(q, q, q, batch, 0)[0], backend)
    return batch, q


def bench_decode(sizes: Sizes, time_of: Timer, backend: Any) -> None:
    """Bytes of keys and values per second, beside a copy's."""
    copy = copy_bandwidth(sizes, time_of)
    print(f"copy within the device: {copy / 1e9:.0f} GB/s")
    print("decode   sequences  entries      us    GB/s  of copy")
    for sequences, entries in sizes.decode:
        batch, q = prepared([1] * sequences, [entries - 1] * sequences, backend)
        seconds = time_of(lambda b=batch, x=q: backend.attend(x, x, x, b, 0))
        moved = sequences * entries * KV_HEADS * HEAD_DIM * 2 * batch.pool.dtype.itemsize / seconds
        print(f"{sequences:18} {entries:8} {seconds * 1e6:7.0f} {moved / 1e9:7.1f} {moved / copy:8.0%}")


def bench_chunks(sizes: Sizes, time_of: Timer, backend: Any) -> None:
    """Products per second, and torch's fused attention over keys and values that lie together."""
    print("prefill  rows     past      ms  TFLOPS  torch ms  ratio")
    for rows, past in sizes.chunks:
        batch, q = prepared([rows], [past], backend)
        seconds = time_of(lambda b=batch, x=q: backend.attend(x, x, x, b, 0))
        keys, values = (t.repeat_interleave(GROUP, 1) for t in dense_lane(batch, 0, backend))
        queries = q.transpose(0, 1)[None]
        rival = "-"
        if past == 0:  # torch's causal mask starts at the first entry
            theirs = time_of(
                lambda x=queries, k=keys, v=values: F.scaled_dot_product_attention(x, k, v, is_causal=True)
            )
            rival = f"{theirs * 1e3:8.2f} {theirs / seconds:6.2f}"
        products = 4 * KV_HEADS * GROUP * HEAD_DIM * (rows * past + rows * (rows + 1) / 2)
        print(f"{rows:13} {past:8} {seconds * 1e3:7.2f} {products / seconds / 1e12:7.1f}  {rival}")


def bench_context(sizes: Sizes, time_of: Timer, backend: Any) -> None:
    """A long context whole and compressed: bytes of a model's KV cache, and one layer's decode attention."""
    model, dtype = sizes.model, torch.bfloat16
    print(f"context of {sizes.context:,} tokens     entries   KV bytes  attention us per layer")
    for share in (1.0, 0.53, 0.03):
        entries = max(2, round(share * sizes.context))
        pages = -(-entries // backend.page_size) * model.num_layers * model.num_kv_heads
        size = pages * page_bytes(backend.page_size, model.head_dim, dtype)
        batch, q = prepared([1], [entries - 1], backend)
        seconds = time_of(lambda b=batch, x=q: backend.attend(x, x, x, b, 0))
        print(f"{share:26.0%} {entries:11,} {size / 2**20:7.0f} MiB {seconds * 1e6:10.0f}")


class RandomWeights:
    """Weights of a shape, made when they are asked for."""

    path = "random"

    def __init__(self, config: ModelConfig):
        self.shapes = expected_shapes(config)

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def stored_dtype(self, name: str) -> str:
        return "bfloat16"

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = self.shapes[name]
        return torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[-1] ** -0.5

    def blocks(self, name: str) -> None:
        return None

    def sample(self, name: str) -> bytes:
        return b""

    def embedding(self) -> DenseEmbedding:
        return DenseEmbedding(self.load("model.embed_tokens.weight"))

    def close(self) -> None:
        pass


def engine_of(sizes: Sizes, backend: Any, warm: str | None = None) -> Engine:
    """An engine over random weights. warm: a tier below its pool."""
    kind = "f32" if interpreted() else "bf16"
    decoder = Decoder(sizes.model, RandomWeights(sizes.model), backend, kind)
    if backend.device.type == "cuda" and backend.name == "triton":
        decoder.use_graphs(CudaGraphs())
    tiers = TierConfig(hot="8MiB" if interpreted() else "8GiB", warm=warm, prefixes=False)
    config = EngineConfig(max_seqs=64, tiers=tiers)
    dtype = torch.float32 if interpreted() else torch.bfloat16
    return Engine(
        decoder, config, dtype, backend.page_size, entry_kernels=backend.entries, device=backend.device
    )


def generate(engine: Engine, prompts: list[list[int]], reply: int) -> int:
    """Tokens that come of prompts in one batch."""
    for ids in prompts:
        engine.add(ids, SamplingParams(max_tokens=reply, ignore_eos=True))
    count = 0
    while engine.has_work:
        count += sum(isinstance(event, TokenEvent) for event in engine.step())
    return count


def transformers_model(config: ModelConfig, device: torch.device) -> Any:
    """The same shape in transformers, or None if that is not installed."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    shape = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_query_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim,
        max_position_embeddings=config.max_context, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(shape)
    return model.to(device, torch.bfloat16).eval()


def bench_engine(sizes: Sizes, time_of: Timer, backend: Any) -> None:
    """Tokens per second end to end, prompts included."""
    engine = engine_of(sizes, backend)
    rival = transformers_model(sizes.model, backend.device)
    print("end to end  sequences  prompt  reply  tokens/s  without graphs  transformers  ratio")
    few = Timer(backend.device, min(3, time_of.rounds))
    for sequences, length, reply in sizes.engine:
        prompts = torch.randint(3, sizes.model.vocab_size, (sequences, length)).tolist()
        ours = sequences * reply / few(lambda p=prompts, n=reply: generate(engine, p, n))
        eager, beside = f"{'-':>14}", "-"
        graphs, engine.model.graphs = engine.model.graphs, None
        if graphs is not None:
            eager = f"{sequences * reply / few(lambda p=prompts, n=reply: generate(engine, p, n)):14.0f}"
        engine.model.graphs = graphs
        if rival is not None:
            ids = torch.tensor(prompts, device=backend.device)
            options = {
                "max_new_tokens": reply,
                "min_new_tokens": reply,
                "do_sample": False,
                "pad_token_id": 0,
            }
            options["attention_mask"] = torch.ones_like(ids)
            theirs = sequences * reply / few(lambda i=ids, o=options: rival.generate(i, **o))
            beside = f"{theirs:12.0f} {ours / theirs:6.2f}"
        print(f"{sequences:21} {length:7} {reply:6} {ours:9.0f}  {eager}  {beside}")


def bench_zoom(sizes: Sizes, time_of: Timer, backend: Any) -> None:
    """Decoding after a long prompt, and the rows that come back for each token, in all layers."""
    engine, (length, reply, share) = engine_of(sizes, backend, "4GiB"), sizes.zoom
    ids = torch.randint(3, sizes.model.vocab_size, (length,)).tolist()
    print("decode after a prompt  tokens  of cache  tokens/s  rows back per token")
    for cache, part in ((CacheConfig(), 1.0), (CacheConfig(policy="sekv", budget=share), share)):
        decoding(engine, ids, reply, cache, time_of)  # kernels are compiled, and graphs captured
        seconds, rows = decoding(engine, ids, reply, cache, time_of)
        speed, back = (reply - 1) / seconds, rows / (reply - 1)
        print(f"{cache.policy:>21} {length:7} {part:9.0%} {speed:9.0f} {back:20.0f}")


def decoding(
    engine: Engine, ids: list[int], reply: int, cache: CacheConfig, time_of: Timer
) -> tuple[float, int]:
    """Seconds that all tokens of a reply but the first take, and rows that are zoomed in meanwhile."""
    engine.add(ids, SamplingParams(max_tokens=reply, ignore_eos=True), cache=cache)
    while not any(isinstance(event, TokenEvent) for event in engine.step()):
        pass
    rows = engine.zoomed.rows
    time_of.wait()
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    time_of.wait()
    return time.perf_counter() - started, engine.zoomed.rows - rows


def backend_of(name: str, device: torch.device) -> Any:
    """A backend by name, or why it cannot serve here."""
    if name == "triton":
        from minikv.kernels.triton.backend import TritonBackend

        return TritonBackend(device)
    from minikv.kernels.flashinfer.probe import load

    library = load(device.type, HEAD_DIM, None, "auto")
    if isinstance(library, str):
        return library
    from minikv.kernels.flashinfer.backend import FlashInferBackend

    return FlashInferBackend(library, device)


@torch.inference_mode()
def main() -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--tiny", action="store_true", help="sizes for the interpreter")
    parser.add_argument("--backends", nargs="+", choices=ON_DEVICES, default=ON_DEVICES)
    given = parser.parse_args()
    if not interpreted() and not torch.cuda.is_available():
        print("There is no CUDA device.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    device = torch.device("cpu" if interpreted() else "cuda")
    sizes = TINY if given.tiny else QUICK if given.quick else WHOLE
    name = "the CPU, interpreted" if interpreted() else torch.cuda.get_device_name(device)
    print(
        f"{name}; torch {torch.__version__}; head_dim {HEAD_DIM}, {KV_HEADS} KV heads of {GROUP} query heads"
    )
    for backend in given.backends:
        made = backend_of(backend, device)
        if isinstance(made, str):
            print(f"\nbackend {backend} is left out: {made}")
            continue
        print(f"\nbackend {backend}")
        for bench in (bench_decode, bench_chunks, bench_context, bench_engine, bench_zoom):
            bench(sizes, Timer(device, sizes.rounds), made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
