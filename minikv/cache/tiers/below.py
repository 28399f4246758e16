"""What a conversation held before it was compressed, kept in the tiers below the pool.

lanes, before each compression --> add: copies, in spans of one layer each --> tiers
tiers, when the next turn begins --> spans --> restore: a new sequence that holds everything again

Entries go down once, as they were computed, and are never made of what a policy has left: to select again
and again loses nothing more, and what was merged is whole when it is put back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minikv.cache.entries import Stored
from minikv.cache.lanes import LaneStore
from minikv.cache.spans.codes import Basis
from minikv.cache.tiers.base import Handle
from minikv.cache.tiers.late import span_of
from minikv.cache.tiers.moves import put_back
from minikv.cache.tiers.span import Owner, Span
from minikv.cache.tiers.storage import Storage

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    """Tokens up to `end`, from where the part before it ends; a span for each layer. whole: an entry for each
    of these tokens in every lane. shared: the spans are everybody's, of a prefix."""

    end: int
    handles: list[Handle]
    whole: bool = False
    shared: bool = False


def _is_whole(span: Span, num_tokens: int) -> bool:
    """Whether every lane of a span holds an entry for each of so many tokens."""
    header = span.header
    return header.num_rows == header.num_lanes * num_tokens and not header.has_counts


@dataclass(eq=False)
class Below:
    """The entries of the first `end` tokens of one sequence, of all lanes. `lost` once any cannot be had any
    more, for want of room or because a file was damaged: the sequence then goes on with what it has, or
    ends. basis: what the codes in the sequence's lanes mean, if they hold any; in no tier's bytes.
    name: whose entries these are, for the log.

    Belongs to the course of the sequence, which has to `forget` it.
    """

    storage: Storage
    lost: bool = False
    basis: Basis | None = None
    name: str = "a sequence"
    _parts: list[_Part] = field(default_factory=list)
    _key: bytes = b""

    def __post_init__(self) -> None:
        self._key = self.storage.new_key()

    @property
    def end(self) -> int:
        """Tokens whose entries are here."""
        return self._parts[-1].end if self._parts else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all spans."""
        return sum(handle.nbytes for part in self._parts for handle in part.handles)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Of each part the tokens up to which it goes, and its spans."""
        return [(part.end, len(part.handles)) for part in self._parts]

    def covers(self, num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens can be put back, as far as is known: a part ends there."""
        return not self.lost and any(part.end == num_tokens for part in self._parts)

    def add(self, store: LaneStore, seq: int, num_tokens: int) -> None:
        """Take copies of the entries of tokens `end` .. `num_tokens`, which are not compressed yet."""
        if self.lost or num_tokens <= self.end:
            return
        if not self._parts:
            _LOG.info("KV entries that do not stay are demoted from here on.")
        handles: list[Handle] = []
        try:
            whole = self._copy(store, seq, num_tokens, handles)
        except (MemoryError, RuntimeError):  # torch's way to say that memory is short
            _LOG.debug("a demotion failed", exc_info=True)
            whole = None
        if whole is not None:
            self._parts.append(_Part(num_tokens, handles, whole))
        else:
            self.storage.forget(handles)
            self.lose("the warm and cold tiers have no room for it; raise --kv-warm or --kv-cold")

    def _copy(self, store: LaneStore, seq: int, num_tokens: int, handles: list[Handle]) -> bool | None:
        """Note spans of the next part, and say whether it is whole; None if there is no room for it."""
        start, whole = self.end, True
        # Lanes may have been compressed before anything was to be demoted.
        merged_end = 0 if start else store.merged_end(seq)
        for layer in range(store.lane_shape[0]):
            positions = store.positions_of(seq, layer)
            places = store.places(seq, layer, (positions >= start) & (positions < num_tokens))
            whole &= bool((places.lengths == num_tokens - start).all() and (places.counts == 1).all())
            encoder, owner = self.storage.sparing, Owner(self._key, layer)
            span = span_of(store, seq, places, encoder, owner, num_tokens, merged_end)
            handle = self.storage.keep(span)
            if handle is None:
                return None
            handles.append(handle)
        return whole

    def adopt(self, end: int, handles: list[Handle]) -> None:
        """Take spans of a prefix, one of each layer, for the tokens up to `end`; they are owned for this."""
        self._parts.append(_Part(end, handles, whole=True, shared=True))

    def resume(self, parts: list[tuple[int, list[Span]]]) -> bool:
        """Take the parts of another, with the spans that it gave; False, with nothing kept, if there is no
        room."""
        fingerprint = self.storage.sparing.fingerprint
        try:
            for end, spans in parts:
                whole = all(_is_whole(span, end - self.end) for span in spans)
                self._parts.append(_Part(end, [], whole))
                for span in spans:
                    owner = Owner(self._key, span.owner.layer)
                    header = replace(span.header, owner=owner, fingerprint=fingerprint)
                    handle = self.storage.keep(Span(header, span.body))
                    if handle is None:
                        self.forget()
                        return False
                    self._parts[-1].handles.append(handle)
        except BaseException:
            self.forget()
            raise
        return True

    def copy(self) -> Below:
        """The same of another sequence, lost if there is no room for both."""
        other = Below(self.storage, self.lost, self.basis, self.name)
        if self._parts and not self.lost:
            try:
                spans = self.spans(self.end)
                parts = iter(spans or [])
                taken = [(part.end, [next(parts) for _ in part.handles]) for part in self._parts if spans]
                other.lost = spans is None or not other.resume(taken)
            except (MemoryError, RuntimeError):
                _LOG.debug("what was demoted could not be copied", exc_info=True)
                other.lost = True
        return other

    @property
    def whole(self) -> list[tuple[int, int]]:
        """Ranges of tokens [start, end) all entries of which are here, ascending."""
        return [(start, end) for start, end, _ in self.whole_parts()]

    def whole_parts(self) -> list[tuple[int, int, list[Handle]]]:
        """Of each range of `whole` its tokens [start, end) and a span for each layer."""
        starts = [0, *(part.end for part in self._parts)]
        pairs = zip(starts, self._parts, strict=False)
        return [(start, part.end, part.handles) for start, part in pairs if part.whole]

    def rows(self, layer: int, heads: Tensor, tokens: Tensor) -> Stored | None:
        """Entries [n] of a layer, of KV heads [n] and tokens [n] that lie in `whole`, n at least 1; None, and
        lost, if they cannot be had any more."""
        starts = torch.tensor([0, *(part.end for part in self._parts)])
        place = torch.searchsorted(starts, tokens, right=True) - 1
        pieces, order = [], []
        for number in place.unique().tolist():
            part, mine = self._parts[number], (place == number).nonzero()[:, 0]
            span = self.storage.tiers.read(part.handles[layer])
            if span is None:
                self.lose("it cannot be read any more")
                return None
            start, end = int(starts[number]), part.end
            at = heads[mine] * (end - start) + tokens[mine] - start
            pieces.append(self.storage.sparing.pick(span, at))
            order.append(mine)
        rows = pieces[0]
        for piece in pieces[1:]:
            rows = rows.and_then(piece)
        return rows if len(pieces) == 1 else rows.at(torch.cat(order).argsort())

    @property
    def all_whole(self) -> bool:
        """Whether an entry for each of its tokens is here, in every lane, as far as is known."""
        return not self.lost and all(part.whole for part in self._parts)

    def layer(self, layer: int, num_tokens: int) -> list[tuple[int, int, Stored]] | None:
        """All entries of a layer of the first `num_tokens` tokens, which are `all_whole`, in parts of tokens
        [start, end), lane after lane; None, and lost, if they cannot be had any more."""
        if self.lost:
            return None
        found = []
        for start, end, handles in self.whole_parts():
            if start >= num_tokens:
                break
            span = self.storage.tiers.read(handles[layer])
            if span is None:
                self.lose("it cannot be read any more")
                return None
            entries = self.storage.sparing.decode(span)
            if end > num_tokens:
                entries, end = entries.before(num_tokens), num_tokens
            found.append((start, end, entries.rows))
        return found

    def ahead(self, layer: int) -> None:
        """Begin to read what rows of a layer will come from, if it is in cold alone; `rows` waits for it."""
        for _, _, handles in self.whole_parts():
            self.storage.tiers.fetch(handles[layer])

    def spans(self, num_tokens: int) -> list[Span] | None:
        """Those of the first `num_tokens` tokens, once all is known of them; None, and lost, if one of them
        is not there any more."""
        if not self.covers(num_tokens):
            return None
        handles = [handle for part in self._parts if part.end <= num_tokens for handle in part.handles]
        for handle in handles:
            self.storage.tiers.fetch(handle)
        spans = []
        for handle in handles:
            span = self.storage.tiers.read(handle)
            if span is None:
                self.lose("it cannot be read any more")
                return None
            spans.append(span)
        return spans

    def restore(self, store: LaneStore, spans: list[Span], num_tokens: int) -> int | None:
        """A new sequence with what `spans` gave for `num_tokens` tokens, for which the caller has made room;
        None, and lost, if memory is short."""
        seq = store.open()
        try:
            enough = self.fill(store, seq, spans, num_tokens)
        except (MemoryError, RuntimeError):
            _LOG.debug("what was demoted could not be put back", exc_info=True)
            store.close(seq)
            self.lose("there is not enough memory to put it back")
            return None
        assert enough, "the caller must make room for what is put back"
        return seq

    def fill(self, store: LaneStore, seq: int, spans: list[Span], num_tokens: int) -> bool:
        """Put what `spans` gave for `num_tokens` tokens into an empty sequence; False if pages are short."""
        return put_back(store, seq, spans, self.storage.sparing, num_tokens)

    def cut(self, num_tokens: int, held: bool) -> None:
        """Forget all tokens after the first `num_tokens`. held: lanes are still there, which hold what the
        part that reaches further has of the first ones as it was, since nothing is compressed within a part;
        without them, that is kept."""
        kept = [part for part in self._parts if part.end <= num_tokens]
        cut = self._parts[len(kept) :]
        self._parts = kept
        if cut and not held and self.end < num_tokens:
            self._shorten(cut.pop(0), num_tokens)
        for part in cut:
            self._give_up(part)

    def _give_up(self, part: _Part) -> None:
        if not part.shared:
            self.storage.forget(part.handles)
            return
        for handle in part.handles:
            self.storage.tiers.release(handle)

    def _shorten(self, part: _Part, end: int) -> None:
        """Put the beginning of a part in its place."""
        handles: list[Handle] = []
        try:
            cut = all(self._shorten_span(part, place, end, handles) for place in range(len(part.handles)))
        except (MemoryError, RuntimeError):
            _LOG.debug("what was demoted could not be cut", exc_info=True)
            cut = False
        if cut:
            self._parts.append(_Part(end, handles, part.whole))
        else:
            self._give_up(replace(part, handles=part.handles[len(handles) :]))
            self.storage.forget(handles)
            self.lose("it cannot be read any more, or there is no room to cut it")

    def _shorten_span(self, part: _Part, place: int, end: int, handles: list[Handle]) -> bool:
        """Keep the beginning of a span, which is given up, and note it; False if that cannot be."""
        span = self.storage.tiers.read(part.handles[place])
        if span is None:
            return False
        if not part.shared:
            self.storage.forget([part.handles[place]])  # its room is needed
        entries, owner = self.storage.sparing.decode(span).before(end), Owner(self._key, span.owner.layer)
        kept = self.storage.keep(self.storage.sparing.encode(entries, owner, end, span.header.merged_end))
        if kept is None:
            return False
        handles.append(kept)
        if part.shared:
            self.storage.tiers.release(part.handles[place])
        return True

    def forget(self) -> None:
        """Give up all spans."""
        for part in self._parts:
            self._give_up(part)
        self._parts.clear()

    def lose(self, reason: str) -> None:
        """Give up all spans for good, and say why."""
        if self.lost:
            return
        _LOG.warning("What was demoted of %s is given up: %s.", self.name, reason)
        self.forget()
        self.lost = True
