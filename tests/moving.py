"""Sessions that are saved where one backend holds them and loaded where another does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from session_tools import PARAMS, held, keep, load

from minikv import LLM, CacheConfig, TierConfig

CACHES = {
    "full": None,
    "snapkv": keep("snapkv", 30),
    "gracekv": keep("gracekv", 0.4),
    "sekv": keep("sekv", 60),
    "demote": keep("snapkv", 30, evicted="demote"),
}
QUESTIONS = ("Tell me of the sea.", "Go on.")


def load_at(model: Path, **options: Any) -> LLM:
    """The model with float16 entries, which every backend has, and a tier below."""
    tiers = TierConfig(hot="8MiB", warm="8MiB")
    return load(model, cache=CacheConfig(kv_dtype="float16"), **{"tiers": tiers, **options})


def check_moved(here: LLM, there: LLM, cache, folder: Path) -> None:
    """Hold a session here, go on there, and come back. Fails unless each holds bit for bit what the one
    before held, has the whole conversation, and computes nothing of it again."""
    session = here.chat_session("Be brief.", cache=cache)
    for question in QUESTIONS:
        session.send(question, PARAMS)
    for number, (llm, of) in enumerate(((there, here), (here, there))):
        # What is demoted is brought back when a session is saved.
        of.save_session(session, folder / f"{number}")
        before, messages = held(session), session.messages
        session = llm.load_session(folder / f"{number}")
        after = held(session)
        assert all(map(np.array_equal, after, before)), "other entries were loaded"
        assert session.messages == messages
        known = len(session._ids)
        reply = session.send("And then?", PARAMS)
        assert reply.finish_reason == "length"
        assert reply.usage.reused_tokens >= known - 1, "what was loaded is computed again"
        assert session.messages[-1]["content"] == reply.text
