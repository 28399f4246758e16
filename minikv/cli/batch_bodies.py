"""Results as OpenAI batch output lines."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from minikv.cli.batch_lines import InputLine
from minikv.results import Result, TokenLogprob

if TYPE_CHECKING:
    from minikv.text.tokenizer import Tokenizer

# The form knows one reason for every limit.
_FINISH = {"context": "length"}


def success_line(
    line: InputLine, result: Result, *, chat: bool, model: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The output line of a request that was served."""
    choices = result.choices or (result,)
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    make = _chat_choice if chat else _text_choice
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{line.number}-{line.digest}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [make(index, choice, tokenizer) for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": result.usage.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": result.usage.reused_tokens},
        },
    }
    return _line(line, 200, body, None)


def error_line(line: InputLine, code: str, message: str) -> dict[str, Any]:
    """The output line of a request that could not be served, and why."""
    return _line(line, 400, None, {"code": code, "message": message})


def _line(line: InputLine, status: int, body: Any, error: Any) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{line.number}_{line.digest}", "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}


def _finish(result: Result) -> str:
    return _FINISH.get(result.finish_reason, result.finish_reason)


def _chat_choice(index: int, result: Result, tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = None
    if result.logprobs is not None:
        logprobs = {"content": [_token_entry(entry, tokenizer) for entry in result.logprobs]}
    message = {"role": "assistant", "content": result.text}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _finish(result)}


def _token_entry(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top]
    return {**_token(entry.token_id, entry.logprob, tokenizer), "top_logprobs": top}


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    # A token may hold part of a code point only; then its bytes cannot be told from its text.
    known = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if known else None}


def _text_choice(index: int, result: Result, tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = None
    if result.logprobs is not None:
        tokens = [tokenizer.token_text(entry.token_id) for entry in result.logprobs]
        starts = list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in result.logprobs],
            "top_logprobs": [
                {tokenizer.token_text(token_id): logprob for token_id, logprob in entry.top}
                for entry in result.logprobs
            ],
            "text_offset": starts,
        }
    return {"index": index, "text": result.text, "logprobs": logprobs, "finish_reason": _finish(result)}
