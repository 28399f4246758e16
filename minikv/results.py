"""What a request gives back: values only, no engine state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "context", "abort", "error"]


@dataclass(frozen=True)
class Usage:
    """Token counts. `reused_tokens` of the prompt were already in the KV cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True)
class KVUsage:
    """Bytes of KV pages a request held at its end, and what the full cache would hold."""

    bytes: int = 0
    full_bytes: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds. `load_s` is the model load, the same for every result of one LLM; `compress_s` is what
    choosing and moving KV entries took of the other two."""

    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compress_s: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a chosen token under the raw logits, with the top-n beside."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Result:
    """One completion.

    `finish_reason` is `error` with the sentence in `message` when the request could not be
    served; `text` and `token_ids` then hold what was produced before. With `n > 1` the first
    completion is the result and `choices` holds all n of them, itself included.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage = Usage()
    kv: KVUsage = KVUsage()
    timings: Timings = Timings()
    message: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    choices: tuple[Result, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready form, as `minikv generate --json` prints it."""
        keep: Mapping[str, Any] = asdict(self)
        out = {k: v for k, v in keep.items() if k not in ("choices", "logprobs", "message")}
        if self.message is not None:
            out["message"] = self.message
        if self.logprobs is not None:
            out["logprobs"] = keep["logprobs"]
        if len(self.choices) > 1:
            out["choices"] = [c.to_dict() for c in self.choices]
        return out


@dataclass(frozen=True)
class StreamPiece:
    """A piece of streamed output: new whole-code-point text and the tokens behind it.

    The last piece of a stream has `finish_reason` and `result` set (its text may be empty).
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    result: Result | None = None
