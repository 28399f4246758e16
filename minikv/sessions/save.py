"""Write a session to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minikv.errors import RequestError, SessionError
from minikv.sessions.below import below_tensors
from minikv.sessions.container import FOREIGN, Outgoing, Unusable, is_session_file, write_container
from minikv.sessions.course import plain_course, recorded_tensors
from minikv.sessions.lanes import lane_tensors
from minikv.sessions.plain import plain_cache
from minikv.sessions.replacing import replace_whole
from minikv.text.messages import plain_data
from minikv.version import version

if TYPE_CHECKING:
    from minikv.llm import LLM
    from minikv.session import SessionState

# Of messages and of the text rendered from them together, with room for messages past the context.
_LEAST_TEXT = 64 << 20
_TEXT_PER_TOKEN = 256


def save_session(llm: LLM, state: SessionState, path: str | os.PathLike[str]) -> None:
    """Write a session that is between two turns. SessionError when it cannot be written; what was in the
    file before is then still there."""
    if not llm.engine.bring_back(state.lanes):
        raise SessionError(
            "This session cannot be saved now: its KV cache was demoted and the pool has no room for it; "
            "raise --kv-hot or save when other requests are done."
        )
    metadata = {"minikv_version": version(), "model": llm.name, **llm.session_identity}
    tensors = _tensors(llm, state)
    target = path_of(path)
    try:
        _refuse_foreign(target)
        replace_whole(target, lambda file: write_container(file, metadata, tensors))
    except Unusable as error:
        raise SessionError(f"{path} {error}, so it is not replaced; give another name.") from None
    except OSError as error:
        raise SessionError(f"Cannot save to {path}: {why(error)}.") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise SessionError(f"Cannot save to {path}: there is not enough memory.") from None


def path_of(path: str | os.PathLike[str]) -> Path:
    """The path of a file to read or write; SessionError if none can have that name."""
    if "\0" in os.fspath(path):
        raise SessionError(f"{os.fspath(path)!r} is not a file: no name can hold a NUL character.")
    return Path(path)


def why(error: OSError) -> str:
    """What went wrong, as a clause: `no such file or directory`."""
    text = error.strerror or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


def _refuse_foreign(path: Path) -> None:
    """Unusable if there is a file that was never a session; an empty one has nothing to lose."""
    try:
        if not is_session_file(path) and path.stat().st_size:
            raise Unusable(FOREIGN)
    except FileNotFoundError:
        return


def _tensors(llm: LLM, state: SessionState) -> dict[str, Outgoing]:
    store, lanes = llm.engine.store, state.lanes
    course = lanes.course
    body = {
        "messages": state.messages,
        "template_args": dict(state.template_args),
        "rendered": state.rendered,
        "cache": plain_cache(state.cache),
        "course": plain_course(course, store.pool.page_size, lanes.seq is not None),
        "held_entries": lanes.pages * store.pool.page_size,
        "merged_end": 0 if lanes.seq is None else store.merged_end(lanes.seq),
    }
    text = _json(body)
    if len(text) > most_text(llm):
        raise SessionError("This session cannot be saved: its messages are far longer than the context.")
    small = {
        "conversation": torch.frombuffer(bytearray(text), dtype=torch.uint8),
        "session.ids": torch.tensor(state.ids, dtype=torch.int32),
        "lanes.ids": torch.tensor(lanes.token_ids, dtype=torch.int32),
        **recorded_tensors(course),
    }
    if lanes.prompt_logits is not None:
        small["prompt_logits"] = lanes.prompt_logits
    tensors = {name: Outgoing.whole(tensor) for name, tensor in small.items()}
    tensors |= below_tensors(course.below)
    return tensors | ({} if lanes.seq is None else lane_tensors(store, lanes.seq))


def most_text(llm: LLM) -> int:
    """Most bytes of JSON that a session of this model may have: a file that says it has more is refused
    unread."""
    return _LEAST_TEXT + llm.config.max_context * _TEXT_PER_TOKEN


def _json(body: Mapping[str, Any]) -> bytes:
    """JSON that is read as the same again. SessionError for messages or template arguments that are not."""
    fault = SessionError(
        "This session cannot be saved: its messages or template arguments are not plain data."
    )
    try:
        plain = plain_data(body, "a session")
        text = json.dumps(plain, allow_nan=False)
        same = json.loads(text) == plain
    except (RequestError, ValueError, RecursionError):
        raise fault from None
    if not same:
        raise fault
    return text.encode()
