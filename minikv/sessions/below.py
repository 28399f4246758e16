"""What was demoted of a session, in its file: the records of the tiers as they are.

below.parts  [p, 2] int64, tokens up to which a part goes and how many spans it has
below.sizes  [n] int64, bytes of each span
below.data   [sum of sizes] uint8
below.basis  [layers, kv_heads, 1 + 2 * components, head_dim] float16, of the codes in lanes that hold any
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from minikv.cache.entries import Entries
from minikv.cache.lanes import LaneStore
from minikv.cache.spans.codes import Basis
from minikv.cache.tiers.below import Below
from minikv.cache.tiers.span import ALL_HEADS, FORMS, HEADER_BYTES, Header, Span, SpanFault
from minikv.cache.tiers.storage import Storage
from minikv.config import format_size
from minikv.scheduler.course import Course
from minikv.sessions.container import Container, Outgoing, Unusable, damaged
from minikv.sessions.lanes import SavedLanes

_SPANS = frozenset({"below.parts", "below.sizes", "below.data"})
NAMES = _SPANS | {"below.basis"}
_UNFIT = "what was demoted of it does not fit together"
_MOST_OVERHEAD = 4096  # of a span's header and the lengths of its lanes


def below_tensors(below: Below | None) -> dict[str, Outgoing]:
    """What is to be written; nothing if nothing was demoted, or if it is lost."""
    spans = None if below is None or not below.end else below.spans(below.end)
    if below is None or spans is None:
        return {}
    basis = {} if below.basis is None else {"below.basis": Outgoing.whole(below.basis.packed())}
    data = [torch.frombuffer(bytearray(span.to_bytes()), dtype=torch.uint8) for span in spans]
    sizes = torch.tensor([len(part) for part in data])
    return basis | {
        "below.parts": Outgoing.whole(torch.tensor(below.parts)),
        "below.sizes": Outgoing.whole(sizes),
        "below.data": Outgoing(torch.uint8, (int(sizes.sum()),), data),
    }


def most_bytes(store: LaneStore, num_tokens: int) -> int:
    """Most bytes that the spans of so many tokens can take."""
    row = 2 * store.pool.head_dim * store.pool.dtype.itemsize + 24
    return num_tokens * store.num_lanes * row + num_tokens * store.lane_shape[0] * _MOST_OVERHEAD


def check_below(file: Container, store: LaneStore, num_tokens: int) -> None:
    """Unusable unless the tensors are all there, or none, and of sizes that they can have. Reads none."""
    given = NAMES & file.tensors.keys()
    if not given:
        return
    basis = file.tensors.get("below.basis")
    if given - {"below.basis"} != _SPANS or (basis and not _is_basis(basis.dtype, basis.shape, store)):
        raise damaged(_UNFIT)
    parts, sizes, data = (file.tensors[name] for name in ("below.parts", "below.sizes", "below.data"))
    types = (parts.dtype, sizes.dtype, data.dtype) == (torch.int64, torch.int64, torch.uint8)
    shapes = len(parts.shape) == 2 and parts.shape[1] == 2 and len(sizes.shape) == len(data.shape) == 1
    if not (types and shapes):
        raise damaged(_UNFIT)
    few = parts.shape[0] <= num_tokens and sizes.shape[0] <= num_tokens * store.lane_shape[0]
    if not few or data.nbytes > most_bytes(store, num_tokens):
        raise damaged("what was demoted of it cannot be of that size")


def _is_basis(dtype: torch.dtype, shape: tuple[int, ...], store: LaneStore) -> bool:
    """Whether codes of such lanes can have a basis of that size."""
    width = store.pool.head_dim
    return dtype == torch.float16 and shape == (*store.lane_shape, 1 + 2 * (width // 4), width)


def read_below(
    file: Container, store: LaneStore, storage: Storage | None, course: Course, num_tokens: int
) -> Below | None:
    """What was demoted, in the tiers of this engine; the file's checksum has been looked at. Unusable, with
    nothing kept, if it does not fit or there is no room. course: of the session, which gets it."""
    if "below.parts" not in file.tensors:
        return None
    if storage is None:
        raise damaged("it demotes nothing and has demoted entries")
    sizes = file.read("below.sizes").tolist()
    if min(sizes, default=0) < HEADER_BYTES or sum(sizes) != file.tensors["below.data"].nbytes:
        raise damaged(_UNFIT)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    spans = [_span(file, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    parts = _parts(file.read("below.parts").tolist(), spans, store.lane_shape[0], num_tokens)
    _check_parts(parts, store, storage, course)
    below = Below(storage, name=f"the session {file.path}")
    if "below.basis" in file.tensors:
        packed = file.read("below.basis")
        if not bool(packed.isfinite().all()):
            raise Unusable("holds numbers that are not finite")
        below.basis = Basis.unpacked(packed)
    if not below.resume(parts):
        needed = format_size(sum(sizes))
        raise Unusable(
            f"holds {needed} of demoted entries, for which the warm and cold tiers have no room; raise "
            "--kv-warm or --kv-cold"
        )
    return below


def check_rest(lanes: SavedLanes, course: Course, end: int) -> None:
    """Unusable unless lanes hold what is still to be demoted of them: some of each layer, and of the tokens
    after the first `end`, which were, all."""
    last = course.compressions[-1].num_tokens if course.compressions else 0
    some = bool(lanes.lengths.any(axis=1).all()) or not lanes.num_tokens
    if not some or 0 < end < last:
        raise damaged(_UNFIT)
    if end:
        positions = lanes.file.read("lanes.positions")
        lane = torch.from_numpy(lanes.lengths.reshape(-1)).long()
        lane = torch.arange(len(lane)).repeat_interleave(lane)[positions >= end]
        if bool((lane.bincount(minlength=lanes.lengths.size) != lanes.num_tokens - end).any()):
            raise damaged(_UNFIT)


def _span(file: Container, start: int, end: int) -> Span:
    try:
        return Span.from_bytes(bytes(file.read_rows("below.data", start, end).numpy()))
    except SpanFault:
        raise damaged(_UNFIT) from None


def _parts(
    listed: list[list[int]], spans: list[Span], layers: int, num_tokens: int
) -> list[tuple[int, list[Span]]]:
    """Spans by the part that they are of."""
    parts, start, taken = [], 0, 0
    for end, count in listed:
        of_part = spans[taken : taken + count]
        if not start < end <= num_tokens or count != layers or len(of_part) != layers:
            raise damaged(_UNFIT)
        parts.append((end, of_part))
        start, taken = end, taken + count
    if taken != len(spans):
        raise damaged(_UNFIT)
    return parts


def _check_parts(
    parts: list[tuple[int, list[Span]]], store: LaneStore, storage: Storage, course: Course
) -> None:
    """Unusable unless a sequence can have these spans."""
    start = 0
    for end, spans in parts:
        # Only lanes that were compressed before anything was demoted went down as a policy had left them.
        counts = [c.num_tokens for c in course.compressions if c.num_tokens <= end]
        whole = bool(start) or (len(counts) < 2 and counts[:1] in ([], [end]))
        for layer, span in enumerate(spans):
            _check_header(span.header, layer, range(start, end), store)
            _check_entries(_decoded(span, start, storage), span.header, range(start, end), whole)
        start = end


def _check_header(header: Header, layer: int, tokens: range, store: LaneStore) -> None:
    lanes = store.lane_shape[1]
    shape = (header.owner.layer, header.owner.head, header.head_dim, header.num_lanes, header.dtype)
    fits = (
        shape == (layer, ALL_HEADS, store.pool.head_dim, lanes, store.pool.dtype)
        and {header.key_form, header.value_form} <= set(FORMS)
        and 0 < header.num_rows <= lanes * len(tokens)
        and header.num_tokens == tokens.stop
        and header.merged_end <= tokens.stop
        and 0 <= header.error < torch.inf
    )
    if not fits:
        raise damaged(_UNFIT)


def _decoded(span: Span, start: int, storage: Storage) -> Entries:
    """The entries of a span whose header fits; Unusable unless its body is what that says, of tokens from
    `start` on."""
    header, body = span.header, memoryview(span.body)
    if len(body) < 4 * header.num_lanes:
        raise damaged(_UNFIT)
    lengths = np.frombuffer(body, dtype="<i4", count=header.num_lanes).tolist()
    if min(lengths) < 0 or sum(lengths) != header.num_rows:
        raise damaged(_UNFIT)
    end = 4 * header.num_lanes + 4 * header.num_rows * (1 + header.has_mass + header.has_counts)
    for form in (header.key_form, header.value_form):
        end += _rows_bytes(body[end:], header, form, lengths)
    if end != len(body):
        raise damaged(_UNFIT)
    # Before keys are turned to them.
    positions = np.frombuffer(body[4 * header.num_lanes :], dtype="<i4", count=header.num_rows)
    if positions.min() < start or positions.max() >= header.num_tokens:
        raise damaged(_UNFIT)
    # Rows of other weights or kernels have another fingerprint; whose they may be is looked at before.
    own = replace(header, fingerprint=storage.sparing.fingerprint)
    return storage.sparing.decode(Span(own, span.body))


def _rows_bytes(body: memoryview, header: Header, form: str, lengths: list[int]) -> int:
    """Bytes of the keys or of the values that `body` begins with."""
    dim, scale = header.head_dim, 4
    if form == "exact":
        row = dim * header.dtype.itemsize + (scale if header.dtype == torch.int8 else 0)
        return header.num_rows * row
    if form == "int8":
        return header.num_rows * (scale + dim)
    end = 0
    for count in lengths:
        rank = int.from_bytes(body[end : end + 2], "little", signed=True)
        if not (1 <= rank <= dim if count else rank == 0):
            raise damaged(_UNFIT)
        end += 2 + 2 * dim * rank + count * (scale + rank)
    return end


def _check_entries(entries: Entries, header: Header, tokens: range, whole: bool) -> None:
    """Unusable unless a layer can have held these of `tokens`; whole: nothing was compressed before."""
    lengths, rows = entries.lengths, entries.rows
    numbers = (rows.keys, rows.values, rows.key_scales, rows.value_scales, rows.log_mass)
    if not all(bool(part.isfinite().all()) for part in numbers if part is not None):
        raise Unusable("holds numbers that are not finite")
    if whole:
        every = torch.arange(tokens.start, tokens.stop).repeat(len(lengths))
        altered = header.has_mass or header.has_counts or header.merged_end
        if altered or not (
            bool((lengths == len(tokens)).all()) and torch.equal(rows.positions.long(), every)
        ):
            raise damaged(_UNFIT)
        return
    lane = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions, counts = rows.positions, entries.counts.long()
    rises = (positions[1:] > positions[:-1]) | (lane[1:] != lane[:-1])
    held = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, lane, counts)
    if not bool(rises.all()) or int(counts.min()) < 1 or int(held.max()) > tokens.stop:
        raise damaged(_UNFIT)
