"""Probe: one model driven by hand, without requests or a scheduler.

For calibration, evaluation and benchmarks, which compute a context once and go on from copies of it
under different policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from minikv.cache.compress import Compressor, Ranges, Report
from minikv.cache.evidence import Recorded, Recorder
from minikv.cache.policies.base import AnyPolicy, Evidence
from minikv.cache.spans.router import Router
from minikv.cache.spans.routing import Zooming
from minikv.cache.spans.share import area_of, lanes_part
from minikv.cache.spans.zoom import Counters, Zoomed, zoom_in
from minikv.cache.surprisal import estimated_surprisal
from minikv.cache.tiers.below import Below
from minikv.cache.tiers.storage import Storage
from minikv.config import CacheConfig, EngineConfig, TierConfig, format_size
from minikv.errors import ConfigError, RequestError
from minikv.kernels.batch import Batch
from minikv.loading import LoadedModel, load_model
from minikv.memory import available_bytes, make_store, resolve_context
from minikv.scheduler.batching import Rows, batch_of

Logits = Literal["none", "last", "all"]
ROUTED = 32  # rows of a prompt that choose together which spans are zoomed in


@dataclass(frozen=True)
class _Spans:
    """What a compressed sequence has below the pool, and pages per lane for what is zoomed in of it."""

    below: Below
    pages: int
    zooming: Zooming
    router: Router | None


class Probe:
    """A loaded model, a store of sequences over a page pool, and a compressor.

    tokenizer, config (`ModelConfig`), model (the decoder), name, fingerprint: of the model;
    store, compressor: of the sequences, which are known by the numbers that `open` and `fork` give.
    tiers: what there is to be below the page pool, for sequences that `demote` or zoom in; without, those
    that zoom in have as much memory as they take.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_context: int | None = None,
        max_seqs: int = 8,
        tiers: TierConfig | None = None,
    ):
        self.name = loaded.name
        self.fingerprint = loaded.fingerprint
        self.tokenizer = loaded.tokenizer
        self.config = loaded.config
        self.model = loaded.decoder
        self.backend_name = loaded.kernels.name
        self.weights = loaded.weights
        self.kv_dtype = loaded.kv_dtype
        self.max_context = resolve_context(max_context, loaded.config.max_context)
        self.store = make_store(
            EngineConfig(max_seqs=max_seqs),
            loaded.config,
            self.max_context,
            loaded.kv_dtype,
            loaded.page_size,
            loaded.kernels.keys_transposed,
            loaded.kernels.entries,
            loaded.kernels.device,
        )
        self.compressor = Compressor(self.store, loaded.decoder)
        self._tiers = tiers if tiers is not None and tiers.below else None
        self._num_tokens: dict[int, int] = {}
        self._spans: dict[int, _Spans] = {}
        self.zoomed = Counters()

    @classmethod
    def load(
        cls,
        model: str = "smollm2-135m",
        *,
        backend: str = "auto",
        weights: str = "auto",
        kv_dtype: str = "auto",
        threads: int | None = None,
        max_context: int | None = None,
        max_seqs: int = 8,
        tiers: TierConfig | None = None,
        revision: str | None = None,
        offline: bool = False,
        progress: bool = False,
    ) -> Probe:
        """Load a model by name or path; the arguments are those of `LLM`."""
        loaded = load_model(
            model,
            CacheConfig(kv_dtype=kv_dtype),
            available_bytes(),
            backend=backend,
            weights=weights,
            revision=revision,
            offline=offline,
            threads=threads,
            progress=progress,
        )
        return cls(loaded, max_context=max_context, max_seqs=max_seqs, tiers=tiers)

    # Sequences

    def open(self) -> int:
        """A new empty sequence; RequestError when `max_seqs` are open."""
        self._require_seq()
        seq = self.store.open()
        self._num_tokens[seq] = 0
        return seq

    def fork(self, seq: int) -> int:
        """An independent copy of a sequence; RequestError when sequences or pages are short."""
        self._require_seq()
        copy = self.store.fork(seq)
        if copy is None:
            raise RequestError(
                f"The KV pool is too full to copy a sequence of {format_size(self.store.bytes_of(seq))}; "
                "close others first."
            )
        self._num_tokens[copy] = self._num_tokens[seq]
        if seq in self._spans:
            self._give_area(copy, self._spans[seq])
        return copy

    def close(self, seq: int) -> None:
        """Free a sequence and its pages."""
        self.store.close(seq)
        del self._num_tokens[seq]
        spans = self._spans.pop(seq, None)
        if spans is not None and not any(other.below is spans.below for other in self._spans.values()):
            spans.below.forget()

    def num_tokens(self, seq: int) -> int:
        """Logical length: tokens fed, whatever is still stored of them."""
        return self._num_tokens[seq]

    # Computing

    def feed(
        self,
        seq: int,
        ids: Sequence[int],
        logits: Logits = "last",
        recorder: Recorder | None = None,
        chunk: int = 256,
    ) -> Tensor | None:
        """Compute tokens at the end of a sequence, `chunk` at a time, as one prompt.

        Returns logits [n, vocab] float32 of all rows or the last one, None for "none". `recorder`
        gets the evidence it wants. RequestError when context or pool are too small.
        """
        start = self._num_tokens[seq]
        chunk = min(chunk, ROUTED) if seq in self._spans else chunk
        self._check_room([seq], [ids])
        outputs = []
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            is_last = first + len(part) == len(ids)
            wanted = "all" if logits == "all" else "last" if logits == "last" and is_last else "none"
            position = start + first
            capture = None if recorder is None else recorder.wanted_rows(position, len(part))
            rows = Rows(seq, part, position, start + len(ids), wanted, capture)
            outputs.append(self._forward(rows, recorder, ids, first + 1))
        return torch.cat(outputs) if logits != "none" and outputs else None

    def feed_many(
        self,
        seqs: Sequence[int],
        ids_per_seq: Sequence[Sequence[int]],
        logits: Literal["last", "all"] = "last",
        reply: bool = False,
    ) -> list[Tensor]:
        """Compute some tokens at the end of several sequences in one pass; any number of tokens each.

        Returns per sequence the logits of its last row [vocab], or of all its rows [n, vocab]. `ids` of a
        sequence are not its prompt: with dynamic RoPE each is rotated for its own position.

        Sequences with spans are fed in several passes, as they would be in an engine: row by row if they are
        of a `reply`, as all are of which all logits are wanted, and else some rows together.
        """
        self._check_room(seqs, ids_per_seq)
        size = 1 if reply or logits == "all" else ROUTED
        outputs: list[list[Tensor]] = [[] for _ in seqs]
        left = dict(enumerate(map(list, ids_per_seq)))
        while left:
            taken = {place: ids[:size] if seqs[place] in self._spans else ids for place, ids in left.items()}
            parts = [
                Rows(seqs[place], ids, self._num_tokens[seqs[place]], 0, logits)
                for place, ids in taken.items()
            ]
            for place, rows in zip(taken, self._pass(parts, logits), strict=True):
                outputs[place].append(rows)
            left = {place: rest for place, ids in left.items() if (rest := ids[len(taken[place]) :])}
        return [rows[-1] if logits == "last" else torch.cat(rows) for rows in outputs]

    def _pass(self, parts: Sequence[Rows], logits: Literal["last", "all"]) -> list[Tensor]:
        for part in parts:
            self._reserve(part.seq, len(part.ids))
        out = self.model.forward(self._batch(parts))
        for part in parts:
            self._append(part.seq, len(part.ids))
        if logits == "last":
            return list(out)
        return list(out.split([len(part.ids) for part in parts]))

    def _batch(self, parts: Sequence[Rows]) -> Batch:
        batch = batch_of(self.store, parts)
        wanted = []
        for index, part in enumerate(parts):
            if (spans := self._spans.get(part.seq)) is not None:
                wanted.append(Zoomed(index, part.seq, spans.below, spans.zooming, spans.router))
        zoom_in(self.store, batch, wanted, self.zoomed)
        return batch

    # Compressing

    def record(self, evidence: Evidence, content: range) -> Recorder:
        """A recorder for `feed`: queries at the positions `content` count."""
        return Recorder(evidence, self.config, self.model.rope, content)

    def compress(
        self,
        seq: int,
        policy: AnyPolicy,
        cache: CacheConfig,
        recorded: Recorded | None = None,
        pinned: Ranges = (),
    ) -> Report:
        """Compress a sequence with a policy of either kind; see `Compressor.compress`. Of a policy whose
        merged entries are zoomed in again, the bytes are with the pages for that, which are taken at once."""
        recorded = recorded or Recorded()
        zooms: bool = getattr(policy, "zooms", False)
        below = None
        if zooms:
            below = Below(self._storage) if seq not in self._spans else self._spans[seq].below
            self.demote(seq, below)
        try:
            report = self.compressor.compress(
                seq, policy, cache, self._num_tokens[seq], recorded, pinned, basis=below and below.basis
            )
        except BaseException:
            if below is not None and seq not in self._spans:
                below.forget()
            raise
        limit = cache.limit
        if below is None or limit is None:
            return report
        if not self.store.num_merged(seq):
            below.forget()
            return report
        below.basis = report.basis
        num_tokens = self._num_tokens[seq]
        part = lanes_part(policy, limit, self.store, num_tokens)
        pages, rows = area_of(limit, part, self.store, num_tokens)
        zooming = replace(getattr(policy, "zooming", Zooming(0)), rows=rows)
        self._give_area(seq, _Spans(below, pages, zooming, getattr(policy, "router", None)))
        return replace(report, bytes=(report.bytes[0], self.store.bytes_of(seq)))

    @cached_property
    def _storage(self) -> Storage:
        """Where spans are kept: in the tiers that were asked for, else in memory, without a ceiling."""
        tiers = self._tiers or TierConfig(warm=f"{1 << 40}B")
        storage = Storage.of(tiers, self.fingerprint, self.config, self.model.rope, self.kv_dtype)
        assert storage is not None
        return storage

    def _give_area(self, seq: int, spans: _Spans) -> None:
        self._spans[seq] = spans
        self.store.ask_area(seq, spans.pages)
        if not self.store.take_area(seq):
            raise RequestError("The KV pool is too full for what is zoomed in; close other sequences first.")

    # Demoting

    def below(self) -> Below:
        """A place for what one sequence demotes; the caller has to `forget` it. ConfigError without tiers
        below the pool."""
        if self._tiers is None:
            raise ConfigError("Nothing can be demoted without a tier below the pool; give tiers a warm size.")
        return Below(self._storage)

    @property
    def room_below(self) -> int:
        """Bytes that the tiers below the pool can still take."""
        return self._storage.tiers.limit - self._storage.tiers.nbytes

    def demote(self, seq: int, below: Below) -> None:
        """Keep what a sequence holds of the tokens since it was last compressed; to be done before it is
        compressed. RequestError when the tiers have no room for it."""
        below.add(self.store, seq, self._num_tokens[seq])
        if below.lost:
            raise RequestError("The tiers below the KV pool have no room for what is demoted.")

    def put_back(self, seq: int, below: Below) -> int:
        """In the place of a sequence, one that holds all its tokens as they were computed, which may have
        been against compressed lanes. RequestError when pages are short or `below` has lost some."""
        num_tokens = self._num_tokens[seq]
        self.demote(seq, below)
        self._check_pages(self.store.pages_for(num_tokens) - self.store.pages_of(seq))
        spans = below.spans(num_tokens)
        if spans is None:
            raise RequestError("What was demoted cannot be read any more.")
        self.close(seq)
        restored = below.restore(self.store, spans, num_tokens)
        if restored is None:
            raise RequestError("There is not enough memory to put back what was demoted.")
        self._num_tokens[restored] = num_tokens
        return restored

    # Inside

    def _forward(
        self, rows: Rows, recorder: Recorder | None, prompt: Sequence[int], following: int
    ) -> Tensor:
        """Compute rows and hand the recorder what it wants; prompt[following:] come after each row."""
        count = len(rows.ids)
        self._reserve(rows.seq, count)
        batch = self._batch([rows])
        hidden = self.model.hidden_states(batch)
        self._append(rows.seq, count)
        if recorder is not None:
            if batch.capture_rows is not None and batch.captured is not None:
                taken = batch.capture_rows
                at, lengths = batch.positions[taken], batch.rope_lengths[taken]
                recorder.add(at, batch.captured, lengths, batch.captured_norms)
            known = torch.arange(min(count, len(prompt) - following))
            if recorder.wants_surprisal and len(known):
                logits_of = partial(self.model.some_logits, hidden)
                values = estimated_surprisal(logits_of, self.config.vocab_size, known, prompt, following)
                recorder.add_surprisal(rows.first + 1, values)
        return self.model.logits(hidden, batch.logit_rows)

    def _require_seq(self) -> None:
        if not self.store.num_free_seqs:
            raise RequestError(f"All {self.store.max_seqs} sequences are open; close one or raise max_seqs.")

    def _check_room(self, seqs: Sequence[int], ids_per_seq: Sequence[Sequence[int]]) -> None:
        missing = 0
        for seq, ids in zip(seqs, ids_per_seq, strict=True):
            end = self._num_tokens[seq] + len(ids)
            if end > self.max_context:
                raise RequestError(
                    f"The sequence would have {end} tokens, and the context is {self.max_context}."
                )
            missing += self.store.pages_missing(seq, len(ids))
        self._check_pages(missing)

    def _check_pages(self, missing: int) -> None:
        pool = self.store.pool
        if missing > pool.num_free:
            raise RequestError(
                f"{format_size(missing * pool.page_bytes)} more of KV cache are needed and "
                f"{format_size(pool.num_free * pool.page_bytes)} are free; close a sequence first."
            )

    def _reserve(self, seq: int, count: int) -> None:
        reserved = self.store.reserve(seq, count)
        assert reserved, "the caller has checked that there is room"

    def _append(self, seq: int, count: int) -> None:
        self.store.append(seq, count)
        self._num_tokens[seq] += count
