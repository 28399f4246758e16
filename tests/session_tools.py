"""Sessions on the tiny model, and files of them that no minikv would write, for tests of session files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from minikv import LLM, CacheConfig, ChatSession, SamplingParams, TierConfig
from minikv.sessions.container import Outgoing, write_container

PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)
QUESTIONS = ("Tell me all about the sea and its many colours, and how deep it is.", "Go on then, please.")
MORE = ("And now?", "What else is there to say of it?")
_OWN = ("format", "format_version", "checksum", "data_checksum")


def keep(policy: str, budget: float | int | str, **options) -> CacheConfig:
    return CacheConfig(policy=policy, budget=budget, **{"sinks": 2, "recent": 4, "window": 6, **options})


def named(cache: CacheConfig | None) -> str:
    """What tells the caches here apart, for the names of tests."""
    if cache is None or cache.policy == "full":
        return "full"
    marks = [cache.policy, cache.budget, cache.prefill, cache.decode_slack, cache.refit]
    return "-".join(str(mark) for mark in marks if mark is not None)


def load(model: Path, **options) -> LLM:
    return LLM(str(model), **{"tiers": TierConfig(hot="4MiB"), "backend": "torch", "threads": 1, **options})


def begun(llm: LLM, cache: CacheConfig | None = None, questions=QUESTIONS) -> ChatSession:
    session = llm.chat_session("Be brief.", cache=cache)
    for question in questions:
        session.send(question, PARAMS)
    return session


def more(session: ChatSession) -> list[tuple[tuple[int, ...], int]]:
    """Two further turns: tokens, and how many were reused."""
    replies = [session.send(question, PARAMS) for question in MORE]
    return [(reply.token_ids, reply.usage.reused_tokens) for reply in replies]


def held(session: ChatSession) -> list[np.ndarray]:
    """All that the lanes hold, in the order of the lanes."""
    store, seq = session._llm.engine.store, session._lanes.seq
    slots, valid = store.slots(seq)
    rows = store.pool.stored(slots[valid])
    return [np.asarray(part.float()) for part in rows if part is not None] + [store.counts(seq).numpy()]


def forge(
    path: Path,
    body: Callable[[dict[str, Any]], object] = lambda body: None,
    tensors: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a session file again with something changed, and with checksums that fit."""
    with safe_open(path, "pt") as file:
        kept = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        facts = {name: text for name, text in file.metadata().items() if name not in _OWN}
    content = json.loads(bytes(kept["conversation"].numpy()))
    body(content)
    kept["conversation"] = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    tensors(kept)
    with path.open("wb") as file:
        write_container(file, facts | (metadata or {}), {n: Outgoing.whole(t) for n, t in kept.items()})
