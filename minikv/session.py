"""ChatSession: a conversation whose KV lanes stay between turns."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minikv.cache.picture import resolution
from minikv.config import CacheConfig
from minikv.errors import ConfigError, shown
from minikv.results import Result, StreamPiece
from minikv.sampling import SamplingParams
from minikv.scheduler.request import Lanes
from minikv.text.spans import content_end, system_end

if TYPE_CHECKING:
    from minikv.llm import LLM

Pieces = Generator[StreamPiece, None, None]


@dataclass(frozen=True)
class SessionState:
    """All that a session is made of between two turns: the conversation, the ids behind it and the text they
    stand for, which entries it keeps, and the lanes."""

    messages: list[dict[str, Any]]
    template_args: dict[str, Any]
    ids: list[int]
    rendered: str
    cache: CacheConfig
    lanes: Lanes


class ChatSession:
    """Made by `LLM.chat_session`. One turn at a time; several sessions may share an LLM.

    The transcript exists twice: as messages, which the chat template renders, and as the token ids
    behind the lanes. A turn renders the messages, and where the rendered text goes on from the text
    that the tokens stand for, only the rest is tokenised: the ids the model produced are kept as
    they are, so everything before the new turn is reused.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None,
        template_kwargs: Mapping[str, Any],
        cache: CacheConfig | None = None,
        lanes: Lanes | None = None,
    ):
        self._llm = llm
        self._cache = cache or llm.engine.config.cache
        self._template_kwargs = dict(template_kwargs)
        self._messages: list[dict[str, Any]] = []
        self._lanes = lanes or Lanes()
        self._ids: list[int] = []
        self._rendered = ""
        self._pieces: Pieces | None = None  # of the turn begun last
        # A session that is dropped without `close` must not hold its pages until others need them.
        weakref.finalize(self, setattr, self._lanes, "abandoned", True)
        self.set_system(system)

    # On disk

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the session, its KV lanes included, to a file that `LLM.load_session` goes on from.
        SessionError when it cannot be written; the file is then as it was."""
        self._llm.save_session(self, path)

    def state(self, llm: LLM) -> SessionState:
        """What a file of the session holds. ConfigError in a turn, or if it is not of that LLM."""
        self._require_idle()
        if llm is not self._llm:
            raise ConfigError("This session belongs to another LLM, which has to save it.")
        return SessionState(
            self.messages, self.template_args, list(self._ids), self._rendered, self._cache, self._lanes
        )

    @classmethod
    def restored(cls, llm: LLM, state: SessionState) -> ChatSession:
        """The session of a state, around its lanes."""
        session = cls(llm, None, state.template_args, state.cache, state.lanes)
        session._messages, session._ids, session._rendered = state.messages, state.ids, state.rendered
        return session

    # The conversation

    @property
    def template_args(self) -> dict[str, Any]:
        """A copy of the arguments for the chat template."""
        return dict(self._template_kwargs)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the conversation so far: role and content of each message."""
        return [dict(message) for message in self._messages]

    def set_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the conversation; what it shares with the old one stays computed.

        Raises TemplateError, changing nothing, if the chat template refuses it.
        """
        self._require_idle()
        if messages:
            self._llm.tokenizer.render_chat(messages, **self._template_kwargs)
        self._messages = [dict(message) for message in messages]

    def set_system(self, text: str | None) -> None:
        """Set, replace or (None) remove the system message."""
        self._require_idle()
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"The system message must be text, not {shown(text)}.")
        rest = self._messages[1:] if self._has_system else self._messages
        self._messages = ([] if text is None else [{"role": "system", "content": text}]) + rest

    def clear(self) -> None:
        """Forget the conversation, except the system message, and free the lanes."""
        self._require_idle()
        self._messages = self._messages[:1] if self._has_system else []
        self._forget()

    def close(self) -> None:
        """End a running turn and free the lanes. The messages can still be read, and a further turn
        computes them again."""
        if self._pieces is not None:
            self._pieces.close()
        self._forget()

    def __enter__(self) -> ChatSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Turns

    def send(self, text: str, params: SamplingParams | None = None) -> Result:
        """Say something and wait for the whole reply. Raises RequestError or TemplateError if the
        turn cannot be served; the conversation is then as before."""
        return _last(self.stream(text, params))

    def stream(self, text: str, params: SamplingParams | None = None) -> Pieces:
        """Say something and read the reply piece by piece; the last piece has the Result.

        Closing the iterator ends the turn; what has been said of the reply stays in the messages.
        """
        return self._turn({"role": "user", "content": text}, params)

    def regenerate(self, params: SamplingParams | None = None) -> Pieces:
        """Answer the last user message again, in place of the last reply."""
        return self._turn(None, params)

    # What it costs

    @property
    def cache(self) -> CacheConfig:
        """Which KV entries it keeps."""
        return self._cache

    @property
    def num_tokens(self) -> int:
        """Tokens that the lanes stand for between turns, whatever is kept of them, in the pool or, even if it
        is all of them, below it; 0 while a turn runs."""
        return len(self._lanes.token_ids) if self._lanes.holds else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pages that the lanes hold now; 0 while they are demoted to tiers below the pool."""
        return 0 if self._lanes.seq is None else self._llm.engine.store.bytes_of(self._lanes.seq)

    @property
    def demoted_bytes(self) -> int:
        """Bytes in the tiers below the pool of what this session demoted."""
        below = self._lanes.course.below
        swapped = self._lanes.swapped
        whole = 0 if swapped is None else sum(handle.nbytes for handle in swapped.handles)
        return whole + (0 if below is None else below.nbytes)

    @property
    def kv_entries(self) -> Tensor:
        """Entries of each lane: [layers, kv_heads] int32; 0 while they are demoted."""
        store = self._llm.engine.store
        if self._lanes.seq is None:
            return torch.zeros(store.lane_shape, dtype=torch.int32)
        return torch.from_numpy(store.lengths[self._lanes.seq].copy())

    def kv_map(self) -> Tensor:
        """How many tokens the entry stands for that each token is in, as `minikv.cache.picture.resolution`
        has it: [layers, kv_heads, num_tokens] int32, 1 for a token kept itself, 0 for one that is dropped or
        demoted."""
        store, seq = self._llm.engine.store, self._lanes.seq
        if seq is None:
            return torch.zeros(*store.lane_shape, self.num_tokens, dtype=torch.int32)
        return resolution(store.positions(seq), store.counts(seq), self.num_tokens)

    # Inside

    @property
    def _has_system(self) -> bool:
        return bool(self._messages) and self._messages[0]["role"] == "system"

    def _turn(self, question: dict[str, Any] | None, params: SamplingParams | None) -> Pieces:
        # Nothing here runs before the first piece is asked for: of two streams, the second is refused.
        self._require_idle()
        before = self._messages
        messages = self._unanswered() if question is None else [*before, question]
        ids, rendered = self._encode(messages)
        self._pieces = pieces = self._llm.stream_ids(
            ids, params, self._lanes, cache=self._cache, **self._spans(messages, ids)
        )
        self._messages = messages
        said: list[str] = []
        produced: list[int] = []
        answered = False
        reason = None
        try:
            for piece in pieces:
                said.append(piece.text)
                produced += piece.token_ids
                reason = piece.finish_reason
                yield piece
            # A context that was full before the first word leaves the question unanswered.
            answered = reason != "context" or bool(produced)
        except GeneratorExit:
            # Stopped by the reader: what was said stands, unless nothing was.
            answered = any(said)
            raise
        finally:
            pieces.close()
            if answered:
                self._keep("".join(said), ids, rendered, produced)
            else:
                self._messages = before

    def _unanswered(self) -> list[dict[str, Any]]:
        """The conversation up to the last user message."""
        messages = list(self._messages)
        if messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or messages[-1]["role"] != "user":
            raise ConfigError("There is no user message to answer again; say something first.")
        return messages

    def _require_idle(self) -> None:
        if self._lanes.busy and not self._llm.is_closed:
            raise ConfigError("This session is in the middle of a turn; finish or close its stream first.")

    def _keep(self, said: str, ids: list[int], rendered: str, produced: list[int]) -> None:
        self._messages = [*self._messages, {"role": "assistant", "content": said}]
        tokenizer = self._llm.tokenizer
        self._ids = ids + produced
        self._rendered = rendered + tokenizer.decode(produced, skip_special=False)

    def _encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], str]:
        """Ids of the conversation, keeping those already known, and the text they stand for."""
        tokenizer = self._llm.tokenizer
        rendered = tokenizer.render_chat(messages, **self._template_kwargs)
        if self._ids and rendered.startswith(self._rendered):
            return self._ids + tokenizer.encode_rendered(rendered[len(self._rendered) :]), rendered
        return tokenizer.encode_rendered(rendered), rendered

    def _spans(self, messages: list[dict[str, Any]], ids: list[int]) -> dict[str, Any]:
        """Which tokens a policy learns from and which it must not touch."""
        if self._llm.keeps_all(self._cache):
            return {}
        tokenizer, kwargs = self._llm.tokenizer, self._template_kwargs
        spans: dict[str, Any] = {"content_end": content_end(tokenizer, messages, ids, **kwargs)}
        system = 0 if self._cache.pinned else system_end(tokenizer, messages, ids, **kwargs)
        return spans | ({"pinned": ((0, system),)} if system else {})

    def _forget(self) -> None:
        if not self._llm.is_closed:
            self._llm.engine.release(self._lanes)
        self._ids, self._rendered = [], ""


def _last(pieces: Iterator[StreamPiece]) -> Result:
    result = None
    for piece in pieces:
        result = piece.result
    assert result is not None
    return result
