"""LLM: text in, text out. A thin shell that joins a tokenizer, a model and an engine."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from operator import index
from types import TracebackType
from typing import Any, overload

from minikv.cache.compress import Ranges
from minikv.config import CacheConfig, EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.errors import ConfigError, MinikvError, RequestError, shown
from minikv.jobs import Job, Message, Prompt
from minikv.loading import load_model
from minikv.memory import available_bytes
from minikv.output import OutputText
from minikv.profiles import ProfileFinder
from minikv.results import Result, StreamPiece
from minikv.sampling import SamplingParams
from minikv.scheduler.request import FinishEvent, Lanes
from minikv.session import ChatSession, Pieces
from minikv.sessions.identity import identity_of
from minikv.sessions.load import load_session
from minikv.sessions.save import save_session
from minikv.text.spans import content_end


class _NoMore:
    """The end of the jobs."""


_NO_MORE = _NoMore()
_IDLE_SECONDS = 0.01


@dataclass(frozen=True)
class _Request:
    """What goes to the engine, and whether the output goes on in the middle of the prompt's text."""

    token_ids: Sequence[int]
    params: SamplingParams
    continues: bool
    lanes: Lanes | None = None
    cache: CacheConfig | None = None
    content_end: int | None = None
    pinned: Ranges = ()


class LLM:
    """A loaded model with its KV pool.

    model: a built-in name, a local directory, a local .gguf file, or a Hub id.
    cache: how KV entries are stored and which are kept; each request may keep its own way.
    tiers: the byte ceilings of the tiers.
    device: `auto`, `cpu` or `cuda`; `auto` is the CPU unless the backend is one for GPUs and there is one.
    backend: `auto`, `cpu` (compiled), `torch`, `reference`, `triton` or `flashinfer`.
    weights: `auto` keeps what the file has; `q4`, `q8`, `bf16`, `f32` convert (`torch`: `q8`, `f32`).
        For the CPU.
    dtype: of weights and activations on a CUDA device, in the place of `weights`: `auto`, `bf16`, `fp16` or
        `fp32`; `auto` is the file's own if that has 16 bits, or else bf16.
    cuda_graphs: on a CUDA device, replay decode steps from graphs that are captured as they come up.
    max_context: tokens of one sequence that may be held; None is the model's own limit.
    max_seqs: sequences that hold KV at once. prefill_chunk, max_batch_tokens: rows per step.
    threads: compute threads; None is one per physical core that the process may use.
    progress: show a bar on stderr while a model is fetched.

    Raises ModelError or ConfigError, each one sentence, when the model cannot be used as asked.
    Not thread-safe: one thread drives it, any number of streams and sessions may be open.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        cache: CacheConfig | None = None,
        tiers: TierConfig | None = None,
        device: str = "auto",
        backend: str = "auto",
        weights: str = "auto",
        dtype: str = "auto",
        revision: str | None = None,
        offline: bool = False,
        max_context: int | None = None,
        max_seqs: int = 16,
        prefill_chunk: int = 512,
        max_batch_tokens: int | None = None,
        threads: int | None = None,
        cuda_graphs: bool = True,
        progress: bool = False,
    ):
        started = time.perf_counter()
        cache, tiers = cache or CacheConfig(), tiers or TierConfig()
        config = EngineConfig(
            max_seqs, max_batch_tokens, prefill_chunk, max_context, cache=cache, tiers=tiers
        )
        loaded = load_model(
            model,
            cache,
            available_bytes(),
            device=device,
            backend=backend,
            weights=weights,
            dtype=dtype,
            revision=revision,
            offline=offline,
            threads=threads,
            cuda_graphs=cuda_graphs,
            progress=progress,
        )
        finder = ProfileFinder(loaded)
        self._engine: Engine | None = Engine(
            loaded.decoder,
            config,
            kv_dtype=loaded.kv_dtype,
            page_size=loaded.page_size,
            eos_token_ids=loaded.tokenizer.eos_token_ids,
            keys_transposed=loaded.kernels.keys_transposed,
            find_profile=finder,
            # Weights in other bits, or other kernels, make other rows.
            fingerprint=f"{loaded.fingerprint} {loaded.weights} {loaded.kernels.name} {loaded.instructions}",
            entry_kernels=loaded.kernels.entries,
            device=loaded.kernels.device,
            find_router=finder.router,
        )
        self.name = loaded.name
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.fingerprint = loaded.fingerprint
        self.backend_name = loaded.kernels.name
        self.backend_reason = loaded.reason
        self.kv_dtype = str(loaded.kv_dtype).removeprefix("torch.")
        self.load_seconds = time.perf_counter() - started
        self._outputs: dict[int, OutputText] = {}

    # What is there

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._engine is None

    @property
    def engine(self) -> Engine:
        """The engine below; ConfigError once closed."""
        if self._engine is None:
            raise ConfigError("This LLM is closed; make a new one.")
        return self._engine

    @property
    def max_context(self) -> int:
        """Tokens of one sequence whose keys and values may be held; one more can be sampled."""
        return self.engine.max_context

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes over all layers, uncompressed."""
        return self.config.kv_bytes_per_token(self.engine.store.pool.dtype)

    def full_kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the whole pages that the full cache of a sequence takes."""
        store = self.engine.store
        return store.pages_for(num_tokens) * store.pool.page_bytes

    @property
    def pool_bytes(self) -> int:
        """The hot tier's ceiling in bytes: all pages of the pool."""
        pool = self.engine.store.pool
        return pool.num_pages * pool.page_bytes

    @property
    def kv_bytes_in_use(self) -> int:
        """Bytes of the pages that running requests and open sessions hold now."""
        return self.engine.store.pool.bytes_in_use

    @property
    def tier_stats(self) -> dict[str, int] | None:
        """Bytes and spans in the tiers below the pool, hits, misses and movements, by name; None without
        tiers. `docs/cli.md` lists the names."""
        return self.engine.tier_stats

    # Work

    @overload
    def generate(
        self, prompts: str, params: SamplingParams | None = None, *, cache: CacheConfig | None = None
    ) -> list[Result]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[int] | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheConfig | None = None,
    ) -> list[Result]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheConfig | None = None,
    ) -> list[Result]:
        """Complete raw prompts (text or token ids) in one continuous batch; results keep their order.

        cache: which KV entries to keep, here and in the methods below; None: as the LLM was told.
        A request that cannot be served is a Result with finish_reason `error`; the others finish.
        """
        if not hasattr(prompts, "__iter__"):
            raise ConfigError(f"prompts must be text, token ids or a list of either, not {shown(prompts)}.")
        listed = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[arg-type]
        return self._run_in_order([{"prompt": prompt, "cache": cache} for prompt in listed], params)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        /,
        params: SamplingParams | None = None,
        *,
        cache: CacheConfig | None = None,
        **template_kwargs: Any,
    ) -> Result: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        /,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheConfig | None = None,
        **template_kwargs: Any,
    ) -> list[Result]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        /,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheConfig | None = None,
        **template_kwargs: Any,
    ) -> Result | list[Result]:
        """Answer a conversation, or several in one batch, through the model's chat template."""
        single = not messages or isinstance(messages[0], Mapping)
        listed = [messages] if single else messages
        work = [{"messages": m, "template_kwargs": template_kwargs, "cache": cache} for m in listed]
        results = self._run_in_order(work, params)
        return results[0] if single else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache: CacheConfig | None = None
    ) -> Pieces:
        """Complete one raw prompt piece by piece; closing the iterator aborts the request.

        While the prompt is computed, pieces with no text come between steps. The last piece has
        the Result. A request that cannot be served raises RequestError.
        """
        return self.stream_ids(self.encode_prompt(prompt), params, continues=True, cache=cache)

    def stream_chat(
        self,
        messages: Sequence[Message],
        /,
        params: SamplingParams | None = None,
        *,
        cache: CacheConfig | None = None,
        **template_kwargs: Any,
    ) -> Pieces:
        """`stream` for a conversation, through the model's chat template."""
        job = Job(None, None, messages, params or SamplingParams(), template_kwargs, cache)
        return self.stream_job(job)

    def run(
        self, jobs: Iterable[Job | None], on_progress: Callable[[int], None] | None = None
    ) -> Generator[tuple[Job, Result], None, None]:
        """Serve jobs from an iterable, read only as fast as they are served; results come as they
        finish. A None among the jobs says that none is there yet, and the run goes on with those it
        has. `on_progress` gets the number of tokens produced by each step. Closing the iterator
        aborts what is unfinished."""
        waiting = iter(jobs)
        open_jobs: dict[int, tuple[Job, list[int]]] = {}
        more = True
        try:
            while more or open_jobs:
                while more and len(open_jobs) < 2 * self.engine.config.max_seqs:
                    job = next(waiting, _NO_MORE)
                    if isinstance(job, _NoMore):
                        more = False
                        break
                    if job is None:
                        break
                    try:
                        ids = self._submit(self._request(job))
                        open_jobs[ids[0]] = (job, ids)
                    except MinikvError as error:
                        yield job, Result("", (), "error", message=str(error))
                if more and not open_jobs:
                    time.sleep(_IDLE_SECONDS)
                produced = self._pump()
                for first, (job, ids) in list(open_jobs.items()):
                    if all(self._outputs[i].result is not None for i in ids):
                        del open_jobs[first]
                        yield job, self._collect(ids)
                if on_progress is not None:
                    on_progress(produced)
        finally:
            for _, ids in open_jobs.values():
                self._drop(ids)

    def chat_session(
        self, system: str | None = None, *, cache: CacheConfig | None = None, **template_kwargs: Any
    ) -> ChatSession:
        """A conversation that keeps its KV lanes between turns and computes only what is new.

        cache: which KV entries it keeps; None: as the LLM was told. The system message's are pinned unless
        the configuration pins others.
        """
        return ChatSession(self, system, template_kwargs, cache)

    @cached_property
    def session_identity(self) -> dict[str, str]:
        """Hashes of what a saved session must find again, see `minikv.sessions.identity`."""
        return identity_of(self)

    def save_session(self, session: ChatSession, path: str | os.PathLike[str]) -> None:
        """`ChatSession.save`."""
        save_session(self, session.state(self), path)

    def load_session(self, path: str | os.PathLike[str]) -> ChatSession:
        """The session in a file, as it was: what was computed is not computed again. It keeps its own cache
        configuration. SessionError, changing nothing, says why not."""
        return load_session(self, path)

    def close(self) -> None:
        """Free weights and pool and close the tiers. Open streams end; further calls raise ConfigError."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._outputs.clear()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For sessions and streams

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Ids of a raw prompt; a list of ids is taken as it is."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [index(i) for i in prompt]
        except TypeError as error:
            raise RequestError(
                f"A prompt must be text or a list of token ids, not {shown(prompt)}."
            ) from error

    def encode_chat(self, messages: Sequence[Message], /, **template_kwargs: Any) -> list[int]:
        """Ids of a conversation rendered for the assistant's next turn."""
        return self.tokenizer.encode_rendered(self.tokenizer.render_chat(messages, **template_kwargs))

    def stream_ids(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        lanes: Lanes | None = None,
        continues: bool = False,
        should_stop: Callable[[], bool] | None = None,
        cache: CacheConfig | None = None,
        content_end: int | None = None,
        pinned: Ranges = (),
    ) -> Pieces:
        """`stream` over token ids, on a conversation's lanes if given.

        `continues`: the output goes on in the middle of the prompt's text, so that its first space
        counts; a reply is a text of its own. `should_stop` is asked before each step; when it says
        so, the stream ends with a Result of finish reason `abort`. The rest is for `Engine.add`.
        """
        params = params or SamplingParams()
        if params.n > 1:
            raise ConfigError("A stream gives one completion; use generate or run for n > 1.")
        request = _Request(token_ids, params, continues, lanes, cache, content_end, pinned)
        return self._stream(request, should_stop)

    def _stream(self, request: _Request, should_stop: Callable[[], bool] | None) -> Pieces:
        ids = self._submit(request)
        output = self._outputs[ids[0]]
        try:
            while True:
                if should_stop is not None and should_stop():
                    self.engine.abort(ids[0])
                self._pump()
                if not output.pieces:
                    yield StreamPiece("")
                while output.pieces:
                    piece = output.pieces.popleft()
                    if piece.result is not None and piece.result.finish_reason == "error":
                        raise RequestError(piece.result.message or "The request failed.")
                    yield piece
                if output.result is not None:
                    return
        finally:
            self._drop(ids)

    def stream_job(
        self, job: Job, should_stop: Callable[[], bool] | None = None, lanes: Lanes | None = None
    ) -> Pieces:
        """`stream` or `stream_chat`, as the job asks; the rest as in `stream_ids`."""
        if job.params.n > 1:
            raise ConfigError("A stream gives one completion; use generate or run for n > 1.")
        return self._stream(replace(self._request(job), lanes=lanes), should_stop)

    def keeps_all(self, cache: CacheConfig | None) -> bool:
        """Whether a cache configuration (None: the LLM's own) drops no entries."""
        return (cache or self.engine.config.cache).policy == "full"

    def _request(self, job: Job) -> _Request:
        ids, end = self.encode_job(job), None
        if job.messages is not None and not self.keeps_all(job.cache):
            end = content_end(self.tokenizer, job.messages, ids, **job.template_kwargs)
        return _Request(ids, job.params, job.messages is None, cache=job.cache, content_end=end)

    def _submit(self, request: _Request) -> list[int]:
        params, before = request.params, request.token_ids if request.continues else ()
        outputs = [OutputText(self.tokenizer, before, params, self.load_seconds) for _ in range(params.n)]
        ids = self.engine.add(
            request.token_ids, params, request.lanes, request.cache, request.content_end, request.pinned
        )
        self._outputs.update(zip(ids, outputs, strict=True))
        return ids

    def _pump(self) -> int:
        """One engine step, its events handed to the outputs they belong to; the tokens produced."""
        produced = 0
        for event in self.engine.step():
            output = self._outputs.get(event.request_id)
            if isinstance(event, FinishEvent):
                if output is not None:
                    output.finish(event)
            elif output is not None:
                produced += 1
                output.add(event)
                if output.hit_stop:
                    self.engine.abort(event.request_id, "stop")
        return produced

    def _drop(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            if self._engine is not None:
                self._engine.abort(request_id)
            self._outputs.pop(request_id, None)

    def _collect(self, ids: Sequence[int]) -> Result:
        results = []
        for request_id in ids:
            result = self._outputs.pop(request_id).result
            assert result is not None
            results.append(result)
        return replace(results[0], choices=tuple(results))

    def encode_job(self, job: Job) -> list[int]:
        """Ids of a job's prompt or conversation."""
        if (job.prompt is None) == (job.messages is None):
            raise RequestError("A job needs either a prompt or messages.")
        if job.messages is not None:
            return self.encode_chat(job.messages, **job.template_kwargs)
        assert job.prompt is not None
        return self.encode_prompt(job.prompt)

    def _run_in_order(
        self, work: list[dict[str, Any]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Result]:
        if params is None or isinstance(params, SamplingParams):
            listed = [params or SamplingParams()] * len(work)
        else:
            listed = list(params)
        for entry in listed:
            if not isinstance(entry, SamplingParams):
                raise ConfigError(f"params must be SamplingParams, not {shown(entry)}.")
        if len(listed) != len(work):
            raise ConfigError(f"{len(work)} prompts need as many sampling parameters, not {len(listed)}.")
        jobs = deque(Job(i, params=p, **w) for i, (p, w) in enumerate(zip(listed, work, strict=True)))
        results = {job.key: result for job, result in self.run(jobs)}
        return [results[i] for i in range(len(work))]


def _is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
