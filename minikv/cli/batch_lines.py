"""One line of a batch input file: what it asks for, or why it cannot be served."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minikv.cli.compression import REQUEST_FIELDS, changed
from minikv.cli.inputs import encodable
from minikv.cli.options import RESERVED_ARGS
from minikv.config import CacheConfig
from minikv.errors import MinikvError

if TYPE_CHECKING:
    from minikv import SamplingParams

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
_ENVELOPE = ("custom_id", "method", "url", "body")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "stop_token_ids",
)


class LineError(MinikvError):
    """An input line that cannot be served; `code` is for programs, the sentence for people."""

    def __init__(self, sentence: str, code: str = "invalid_request") -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class BatchRequest:
    """A line in the right form. `chat` is its kind; `prompt` or `messages` is set accordingly.

    What the messages hold is checked by whoever renders them. `cache` is None when the line has no
    compression fields of its own.
    """

    chat: bool
    prompt: str | list[int] | None
    messages: Any
    params: SamplingParams
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    cache: CacheConfig | None = None


@dataclass(frozen=True)
class InputLine:
    """A line that is not blank. `number` counts from 1, blank lines included.

    `fields` is None when the line is not a JSON object. `custom_id` is None when the line has
    none that can be used; a plain line without one gets `line-NUMBER`.
    """

    number: int
    digest: str
    fields: dict[str, Any] | None
    fault: str | None
    custom_id: str | None

    @property
    def id(self) -> str:
        """Identifies the line by place and content, so that a resumed run can tell them apart."""
        return f"batch_line_{self.number}_{self.digest}"


def read_line(data: bytes, number: int) -> InputLine:
    """Split a line into fields without judging them; never raises."""
    digest = hashlib.sha256(data.strip()).hexdigest()[:8]
    fields, fault = _fields(data)
    custom_id = None
    if fields is not None:
        custom_id = fields.get("custom_id")
        if custom_id is None and not _is_openai(fields):
            custom_id = f"line-{number}"
        if not isinstance(custom_id, str) or not encodable(custom_id):
            custom_id = None
    return InputLine(number, digest, fields, fault, custom_id)


def _fields(data: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError:
        return None, "The line is not UTF-8 text."
    except ValueError as error:
        return None, f"The line is not JSON: {error}."
    except RecursionError:
        return None, "The line is not JSON that can be read: it is nested too deeply."
    if not isinstance(value, dict):
        return None, "The line is not a JSON object."
    return value, None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _is_openai(fields: Mapping[str, Any]) -> bool:
    return any(name in fields for name in ("method", "url", "body"))


def parse_request(
    line: InputLine, defaults: Mapping[str, Any], cache: CacheConfig | None = None
) -> BatchRequest:
    """The request of a line; `defaults` are sampling values for fields that it does not set, and `cache`
    has those for compression.

    Raises LineError, or ConfigError for a value out of range.
    """
    if line.fields is None:
        raise LineError(line.fault or "The line cannot be read.", "invalid_json")
    if _is_openai(line.fields):
        chat, body = _openai_body(line.fields)
    else:
        body = {key: value for key, value in line.fields.items() if key != "custom_id"}
        chat = "messages" in body
        if not chat and "prompt" not in body:
            raise LineError("The line has neither prompt nor messages.")
    if line.custom_id is None:
        raise LineError("custom_id must be a string.")
    given = {key: value for key, value in body.items() if value is not None}
    return _request(given, chat, defaults, cache or CacheConfig())


def _openai_body(fields: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    for name in _ENVELOPE:
        if name not in fields:
            raise LineError(f"The line has no {name}.")
    for name in fields:
        if name not in _ENVELOPE:
            raise LineError(f"The line has an unknown field {name!r}.")
    if fields["method"] != "POST":
        raise LineError(f'method must be "POST", not {fields["method"]!r}.')
    if fields["url"] not in (CHAT_URL, COMPLETION_URL):
        raise LineError(f"url must be {CHAT_URL} or {COMPLETION_URL}, not {fields['url']!r}.")
    if not isinstance(fields["body"], dict):
        raise LineError("body must be an object.")
    return fields["url"] == CHAT_URL, fields["body"]


def _request(
    body: dict[str, Any], chat: bool, defaults: Mapping[str, Any], cache: CacheConfig
) -> BatchRequest:
    if not isinstance(body.pop("model", ""), str):
        raise LineError("model must be a string.")
    if body.pop("stream", False) is not False:
        raise LineError("stream must be false or left out: a batch gives whole results.")
    template_kwargs = body.pop("chat_template_kwargs", {}) if chat else {}
    if not isinstance(template_kwargs, dict):
        raise LineError("chat_template_kwargs must be an object.")
    for name in RESERVED_ARGS:
        if name in template_kwargs:
            raise LineError(f"chat_template_kwargs cannot set {name!r}.")
    name = "messages" if chat else "prompt"
    if name not in body:
        raise LineError(f"The request has no {name}.")
    content = body.pop(name)
    if not chat:
        _check_prompt(content)
    own_cache = _compression(body, cache)
    params = _sampling(body, chat, defaults)
    prompt, messages = (None, content) if chat else (content, None)
    return BatchRequest(chat, prompt, messages, params, template_kwargs, own_cache)


def _check_prompt(value: Any) -> None:
    is_ids = isinstance(value, list) and all(type(item) is int for item in value)
    if not isinstance(value, str) and not is_ids:
        raise LineError("prompt must be one string or one list of token ids.")
    if not value:
        raise LineError("prompt is empty.")


def _compression(body: dict[str, Any], cache: CacheConfig) -> CacheConfig | None:
    """Takes the compression fields out of `body`: `cache` with them, None if there are none."""
    fields = {name: body.pop(name) for name in REQUEST_FIELDS if name in body}
    return changed(cache, fields) if fields else None


def _sampling(body: dict[str, Any], chat: bool, defaults: Mapping[str, Any]) -> SamplingParams:
    """Takes what it knows out of `body`; whatever remains is an error that names it."""
    from minikv import SamplingParams

    values = {**defaults, **{name: body.pop(name) for name in _SAMPLING if name in body}}
    limits = [body.pop(name) for name in ("max_completion_tokens", "max_tokens") if name in body]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise LineError("max_tokens and max_completion_tokens differ; give one of them.")
    if limits:
        values["max_tokens"] = limits[0]
    if "logit_bias" in body:
        values["logit_bias"] = _logit_bias(body.pop("logit_bias"))
    values |= _chat_logprobs(body) if chat else _completion_logprobs(body)
    if body:
        raise LineError(f"The request has an unknown field {next(iter(body))!r}.")
    return SamplingParams(**values)


def _logit_bias(value: Any) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except (AttributeError, ValueError):
        raise LineError("logit_bias must be an object with token ids as keys.") from None


def _chat_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    wanted, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if wanted is not None and not isinstance(wanted, bool):
        raise LineError(f"logprobs must be true or false, not {wanted!r}.")
    if not wanted:
        if top is not None:
            raise LineError("top_logprobs needs logprobs to be true.")
        return {} if wanted is None else {"logprobs": None}
    return {"logprobs": 0 if top is None else top}


def _completion_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": body.pop("logprobs")} if "logprobs" in body else {}
