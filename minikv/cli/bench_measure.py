"""The measurements of `minikv bench`: memory bandwidth, prefills, single decode steps, peak memory."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.cli.bench_plan import WARM_UP
from minikv.errors import RequestError

if TYPE_CHECKING:
    from minikv import LLM
    from minikv.engine import Engine

SEED = 20_000
# More than the caches hold, and less than torch takes: the peak memory stays that of the model.
_READ_BYTES = 128 << 20
_READ_SECONDS = 0.5


def read_bandwidth(threads: int) -> float:
    """Bytes per second of the best pass that `threads` threads make over a block of memory.

    More threads than processors count as one per processor. Loads no torch.
    """
    import numpy as np

    count = max(1, min(threads, os.cpu_count() or 1))
    parts = np.array_split(np.ones(_READ_BYTES // 4, dtype=np.int32), count)
    best = float("inf")
    with ThreadPoolExecutor(count) as pool:
        end = time.perf_counter() + _READ_SECONDS
        while time.perf_counter() < end:
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - begin)
    return _READ_BYTES / best


def weights_read(llm: LLM) -> int:
    """Bytes of the matrices, each of which a step reads once whatever its batch size."""
    packed = getattr(llm.engine.model, "weight_bytes", None)
    if packed is not None:
        return packed
    config = llm.config
    # Rows of the table of inputs are looked up; it is read as a whole only where it is the head too.
    looked_up = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    return 4 * (config.num_parameters() - looked_up)


def time_prefill(llm: LLM, length: int) -> float:
    """Seconds from a prompt of `length` random tokens to its first output token."""
    ids = _random_ids(llm, length)
    begin = time.perf_counter()
    _fill(llm.engine, ids, batch_size=1, max_tokens=1)
    return time.perf_counter() - begin


def kv_bytes_kept(llm: LLM, context: int) -> int:
    """Bytes of keys and values that a sequence of `context` tokens is to hold under the policy."""
    full = context * llm.kv_bytes_per_token
    limit = llm.engine.config.cache.limit
    if limit is None:
        return full
    if limit.kind == "bytes":
        return min(full, int(limit.amount))
    lanes = llm.engine.store.num_lanes
    return min(full, limit.entries(context, lanes) * llm.kv_bytes_per_token // lanes)


def time_steps(llm: LLM, context: int, batch_size: int, steps: int) -> tuple[list[float], int]:
    """Seconds of each of `steps` decode steps that end with `context` tokens in every sequence, and the
    bytes of KV pages that all sequences held together before the last one.

    The sequences are copies of one prompt's lanes: each has memory of its own, and the prompt is
    computed once.
    """
    ids = _random_ids(llm, context - WARM_UP - steps)
    _fill(llm.engine, ids, batch_size, max_tokens=1 + WARM_UP + steps)
    seconds, held = [], 0
    for _ in range(WARM_UP + steps):
        held = llm.kv_bytes_in_use
        begin = time.perf_counter()
        produced = _step(llm.engine)
        seconds.append(time.perf_counter() - begin)
        assert produced == batch_size
    return seconds[WARM_UP:], held


def peak_memory() -> int | None:
    """Bytes: the most memory this process has held at once; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _random_ids(llm: LLM, length: int) -> list[int]:
    rng = random.Random(SEED)
    return [rng.randrange(llm.config.vocab_size) for _ in range(length)]


def _fill(engine: Engine, ids: list[int], batch_size: int, max_tokens: int) -> None:
    """Compute a prompt up to the first token of each of its `batch_size` completions."""
    from minikv.sampling import SamplingParams

    engine.add(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=batch_size))
    produced = 0
    while not produced:
        produced = _step(engine)
    assert produced == batch_size


def _step(engine: Engine) -> int:
    """One engine step; the tokens that it produced. Raises RequestError when a request fails."""
    from minikv.scheduler.request import FinishEvent

    produced = 0
    for event in engine.step():
        if not isinstance(event, FinishEvent):
            produced += 1
        elif event.reason != "length":
            raise RequestError(event.message or "A request of the benchmark failed.")
    return produced
