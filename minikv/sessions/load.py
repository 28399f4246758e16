"""Read a session from a file. Everything is looked at before anything is made or given up for it:

header      small; format, version, its own checksum, the model
sizes       of all tensors, against what the model's context and policies can need
data        the checksum of all the rest
contents    messages, tokens, course, records, positions
room        idle lanes of other conversations make way, as for a request
lanes       into pages
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minikv.config import CacheConfig, format_size
from minikv.errors import ConfigError, MinikvError, SessionError
from minikv.scheduler.course import Course
from minikv.scheduler.request import Lanes
from minikv.scheduler.retention import Retention
from minikv.session import ChatSession, SessionState
from minikv.sessions.below import NAMES, check_below, check_rest, read_below
from minikv.sessions.container import Container, Unusable, damaged
from minikv.sessions.course import RECORDS, CourseReader, read_ids
from minikv.sessions.identity import check_identity
from minikv.sessions.lanes import SavedLanes, check_lanes, read_lengths
from minikv.sessions.plain import cache_of, field_of, whole
from minikv.sessions.save import most_text, path_of, why

if TYPE_CHECKING:
    from minikv.llm import LLM

_LARGEST_COUNT = 1 << 40


def load_session(llm: LLM, path: str | os.PathLike[str]) -> ChatSession:
    """The session in a file. SessionError, one sentence, when it cannot be had; nothing has changed then."""
    target = path_of(path)
    try:
        with Container(target) as file:
            return _Loader(llm, file).load()
    except Unusable as error:
        raise SessionError(f"{path} {error}.") from None
    except OSError as error:
        raise SessionError(f"Cannot read {path}: {why(error)}.") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise SessionError(f"Cannot read {path}: there is not enough memory.") from None


class _Loader:
    """One file that is read for one LLM."""

    def __init__(self, llm: LLM, file: Container) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._file = file
        check_identity(file.metadata, llm)

    def load(self) -> ChatSession:
        """The session, with its lanes in the pool."""
        num_tokens = self._check_sizes()
        self._file.check_data()
        body = self._body()
        lanes = self._lanes(body, num_tokens)
        state = self._state(body, lanes)
        saved = self._saved_lanes(body, num_tokens)
        session = ChatSession.restored(self._llm, state)
        store, course = self._engine.store, lanes.course
        try:
            course.below = read_below(self._file, store, self._engine.storage, course, num_tokens)
            if saved is not None:
                self._fill(lanes, saved, state.cache)
            else:
                self._engine.adopt(lanes)
        except BaseException:
            course.forget_below()
            raise
        return session

    def _fill(self, lanes: Lanes, saved: SavedLanes, cache: CacheConfig) -> None:
        store, below = self._engine.store, lanes.course.below
        if cache.evicted == "demote" or lanes.course.zooms:
            check_rest(saved, lanes.course, 0 if below is None else below.end)
        pages = saved.num_pages(store.pool.page_size)
        if not self._engine.restore(lanes, pages, lambda seq: saved.fill(store, seq)):
            raise Unusable(self._too_large(pages, "takes"))

    # Sizes

    def _check_sizes(self) -> int:
        """Tokens that the lanes stand for, once no tensor is larger than it can have reason to be; what the
        policies record is looked at more closely when they are known."""
        tensors, limit = self._file.tensors, self._engine.max_context
        num_tokens = self._length("lanes.ids", torch.int32, self._llm.config.max_context)
        self._length("session.ids", torch.int32, self._llm.config.max_context + 1)
        self._length("conversation", torch.uint8, most_text(self._llm))
        logits = tensors.get("prompt_logits")
        if logits and (logits.dtype, logits.shape) != (torch.float32, (self._llm.config.vocab_size,)):
            raise damaged("its logits cannot be of that size")
        self._check_names(num_tokens)
        check_below(self._file, self._engine.store, num_tokens)
        if num_tokens > limit:
            raise Unusable(
                f"stands for {num_tokens:,} tokens, and the context is {limit:,}; raise max_context if the "
                "model allows"
            )
        if "lanes.lengths" in tensors:
            read_lengths(self._file, self._engine.store, num_tokens)
        return num_tokens

    def _length(self, name: str, dtype: torch.dtype, most: int) -> int:
        tensor = self._file.tensors.get(name)
        if tensor is None or tensor.dtype != dtype or len(tensor.shape) != 1 or tensor.shape[0] > most:
            raise damaged(f"its {name.replace('.', ' ')} cannot be of that size")
        return tensor.shape[0]

    def _check_names(self, num_tokens: int) -> None:
        tensors, config = self._file.tensors, self._llm.config
        known = {"conversation", "session.ids", "prompt_logits", "lanes.ids"} | NAMES
        rest = tensors.keys() - known
        if "lanes.lengths" in tensors:
            rest = {name for name in rest if not name.startswith("lanes.")}
        if any(not name.startswith(RECORDS) for name in rest):
            raise damaged("it holds tensors that no session has")
        rows = max(num_tokens, config.head_dim, 256)
        per_tensor = 8 * config.num_layers * config.num_query_heads * config.head_dim * rows
        sizes: dict[str, int] = {}
        for name in rest:
            # What was recorded before a turn is a record of its own, of each turn.
            kind = "recorder" if name.startswith("recorder.") else ".".join(name.split(".")[:2])
            sizes[kind] = sizes.get(kind, 0) + tensors[name].nbytes
        if max(sizes.values(), default=0) > 3 * per_tensor:
            raise damaged("its records cannot be of that size")

    # Contents

    def _body(self) -> Any:
        try:
            return json.loads(bytes(self._file.read("conversation").numpy()))
        except (ValueError, RecursionError):
            raise damaged("its conversation cannot be read") from None

    def _state(self, body: Any, lanes: Lanes) -> SessionState:
        most, vocab = self._llm.config.max_context + 1, self._llm.config.vocab_size
        cache = cache_of(field_of(body, "cache", dict))
        self._retention(cache)
        state = SessionState(
            messages=field_of(body, "messages", list),
            template_args=field_of(body, "template_args", dict),
            ids=read_ids(self._file, "session.ids", most, vocab),
            rendered=field_of(body, "rendered", str),
            cache=cache,
            lanes=lanes,
        )
        try:
            # Of a conversation that has not begun, the arguments alone are tried.
            messages = state.messages or [{"role": "user", "content": "?"}]
            self._llm.tokenizer.render_chat(messages, **state.template_args)
        except (MinikvError, TypeError):
            raise Unusable("holds messages that the chat template refuses") from None
        return state

    def _retention(self, cache: CacheConfig) -> Retention:
        try:
            return self._engine.retention(cache)
        except ConfigError as error:
            reason = str(error).rstrip(".")
            raise Unusable(f"keeps its KV cache in a way that does not go here: {reason}") from None

    def _lanes(self, body: Any, num_tokens: int) -> Lanes:
        """The lanes without their entries."""
        engine = self._engine
        pool, vocab = engine.store.pool, self._llm.config.vocab_size
        course = self._course(field_of(body, "course", dict), num_tokens)
        if course.peak > pool.num_pages:
            raise Unusable(self._too_large(course.peak, "took at most"))
        pages = -(-whole(body, "held_entries", 0, _LARGEST_COUNT) // pool.page_size)
        logits: Tensor | None = None
        if "prompt_logits" in self._file.tensors:
            logits = self._file.read("prompt_logits")
        ids = read_ids(self._file, "lanes.ids", num_tokens, vocab)
        return Lanes(None, ids, course, min(pages, pool.num_pages), logits)

    def _course(self, body: Any, num_tokens: int) -> Course:
        engine, store = self._engine, self._engine.store
        reader = CourseReader(
            self._file,
            engine.model,
            self._retention,
            num_tokens,
            self._llm.config.max_context,
            store.pool.page_size,
            store.num_lanes,
        )
        course = reader.course(body)
        held = "lanes.lengths" in self._file.tensors
        if course.done != (len(course.compressions) if held else 0):
            raise damaged("its lanes and its compressions do not fit together")
        reader.check_recorders(course)
        reader.read_recorders(course)
        return course

    def _saved_lanes(self, body: Any, num_tokens: int) -> SavedLanes | None:
        if "lanes.lengths" not in self._file.tensors:
            return None
        lengths = read_lengths(self._file, self._engine.store, num_tokens)
        return check_lanes(self._file, lengths, num_tokens, whole(body, "merged_end", 0, num_tokens))

    def _too_large(self, pages: int, verb: str) -> str:
        pool = self._engine.store.pool
        return (
            f"holds a KV cache that {verb} {format_size(pages * pool.page_bytes)}, and the pool has "
            f"{format_size(pool.num_pages * pool.page_bytes)}, some of which may be in use; raise --kv-hot"
        )
