"""From a request's tokens to its text: detokenising, stop strings and the final result."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minikv.results import FinishReason, KVUsage, Result, StreamPiece, Timings, TokenLogprob, Usage
from minikv.sampling import SamplingParams
from minikv.scheduler.request import FinishEvent, TokenEvent
from minikv.text.detokenizer import IncrementalDetokenizer
from minikv.text.stops import StopMatcher
from minikv.text.tokenizer import Tokenizer


class OutputText:
    """Collects one request's output. Pieces wait in `pieces` until a stream takes them.

    `before` are the ids of a text that the output goes on with, none for a text of its own.
    `hit_stop` tells the caller, who owns the engine, that a stop string was completed and the
    request must end; tokens that come after it are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], params: SamplingParams, load_s: float):
        self.pieces: deque[StreamPiece] = deque()
        self.result: Result | None = None
        self.hit_stop = False
        self._detokenizer = IncrementalDetokenizer(tokenizer, before)
        self._stops = StopMatcher(params.stop_strings)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._load_s = load_s

    def add(self, event: TokenEvent) -> None:
        """Take the next token."""
        if self.hit_stop:
            return
        self._token_ids.append(event.token_id)
        if self._logprobs is not None and event.logprob is not None:
            self._logprobs.append(event.logprob)
        # The stop token ends the text; it is never part of it.
        text = "" if event.is_stop else self._match(self._detokenizer.add(event.token_id))
        self._emit(StreamPiece(text, (event.token_id,)))

    def finish(self, event: FinishEvent) -> None:
        """Take the terminal event: what was held back comes out and the result is made."""
        text = ""
        if not self.hit_stop:
            text = self._match(self._detokenizer.flush())
            text += self._stops.flush()
        reason: FinishReason = "stop" if self.hit_stop and event.reason != "error" else event.reason
        self._text.append(text)
        self.result = self._make_result(event, reason)
        self.pieces.append(StreamPiece(text, (), reason, self.result))

    def _match(self, text: str) -> str:
        shown, self.hit_stop = self._stops.add(text)
        return shown

    def _emit(self, piece: StreamPiece) -> None:
        self._text.append(piece.text)
        self.pieces.append(piece)

    def _make_result(self, event: FinishEvent, reason: FinishReason) -> Result:
        request = event.request
        started, first, ended = request.started, request.first_token, request.ended
        prefill = (first or ended or 0.0) - started if started is not None else 0.0
        decode = ended - first if first is not None and ended is not None else 0.0
        timings = Timings(self._load_s, max(prefill, 0.0), max(decode, 0.0), request.compress_s)
        return Result(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            usage=Usage(request.num_prompt, len(self._token_ids), request.num_reused),
            kv=KVUsage(request.kv_bytes, request.full_kv_bytes),
            timings=timings,
            message=event.message,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )
