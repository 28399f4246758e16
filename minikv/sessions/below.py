"""What was demoted of a session, in its file: the records of the tiers as they are.

below.parts  [p, 2] int64, tokens up to which a part goes and how many spans it has
below.sizes  [n] int64, bytes of each span
below.data   [sum of sizes] uint8
"""

from __future__ import annotations

import torch

from minikv.cache.lanes import LaneStore
from minikv.cache.tiers.below import Below
from minikv.cache.tiers.encode import lengths_of
from minikv.cache.tiers.span import ALL_HEADS, HEADER_BYTES, Span, SpanFault
from minikv.cache.tiers.storage import Storage
from minikv.config import format_size
from minikv.sessions.container import Container, Outgoing, Unusable, damaged

NAMES = frozenset({"below.parts", "below.sizes", "below.data"})
_UNFIT = "what was demoted of it does not fit together"
_MOST_OVERHEAD = 4096  # of a span's header and the lengths of its lanes


def below_tensors(below: Below | None) -> dict[str, Outgoing]:
    """What is to be written; nothing if nothing was demoted, or if it is lost."""
    spans = None if below is None or not below.end else below.spans(below.end)
    if below is None or spans is None:
        return {}
    data = [torch.frombuffer(bytearray(span.to_bytes()), dtype=torch.uint8) for span in spans]
    sizes = torch.tensor([len(part) for part in data])
    return {
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
    if given != NAMES:
        raise damaged(_UNFIT)
    parts, sizes, data = (file.tensors[name] for name in ("below.parts", "below.sizes", "below.data"))
    types = (parts.dtype, sizes.dtype, data.dtype) == (torch.int64, torch.int64, torch.uint8)
    shapes = len(parts.shape) == 2 and parts.shape[1] == 2 and len(sizes.shape) == len(data.shape) == 1
    if not (types and shapes):
        raise damaged(_UNFIT)
    few = parts.shape[0] <= num_tokens and sizes.shape[0] <= num_tokens * store.lane_shape[0]
    if not few or data.nbytes > most_bytes(store, num_tokens):
        raise damaged("what was demoted of it cannot be of that size")


def read_below(file: Container, store: LaneStore, storage: Storage | None, num_tokens: int) -> Below | None:
    """What was demoted, in the tiers of this engine; the file's checksum has been looked at. Unusable, with
    nothing kept, if it does not fit or there is no room."""
    if "below.parts" not in file.tensors:
        return None
    if storage is None:
        raise damaged("it demotes nothing and has demoted entries")
    sizes = file.read("below.sizes").tolist()
    if min(sizes, default=0) < HEADER_BYTES or sum(sizes) != file.tensors["below.data"].nbytes:
        raise damaged(_UNFIT)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    spans = [_span(file, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    parts = _parts(file.read("below.parts").tolist(), spans, store, storage, num_tokens)
    below = Below(storage)
    if not below.resume(parts):
        needed = format_size(sum(sizes))
        raise Unusable(
            f"holds {needed} of demoted entries, for which the warm and cold tiers have no room; raise "
            "--kv-warm or --kv-cold"
        )
    return below


def _span(file: Container, start: int, end: int) -> Span:
    try:
        return Span.from_bytes(bytes(file.read_rows("below.data", start, end).numpy()))
    except SpanFault:
        raise damaged(_UNFIT) from None


def _parts(
    listed: list[list[int]], spans: list[Span], store: LaneStore, storage: Storage, num_tokens: int
) -> list[tuple[int, list[Span]]]:
    """Spans by the part that they are of, once it is sure that a sequence can have them."""
    layers, parts, start, taken = store.lane_shape[0], [], 0, 0
    for end, count in listed:
        of_part = spans[taken : taken + count]
        if not start < end <= num_tokens or count != layers or len(of_part) != layers:
            raise damaged(_UNFIT)
        for layer, span in enumerate(of_part):
            _check_span(span, layer, range(start, end), store, storage)
        parts.append((end, of_part))
        start, taken = end, taken + count
    if taken != len(spans):
        raise damaged(_UNFIT)
    return parts


def _check_span(span: Span, layer: int, tokens: range, store: LaneStore, storage: Storage) -> None:
    header = span.header
    if header.fingerprint != storage.sparing.fingerprint:
        raise Unusable("holds demoted entries of another model, KV dtype or rotation")
    shape = (header.owner.layer, header.owner.head, header.head_dim, header.num_lanes, header.dtype)
    if shape != (layer, ALL_HEADS, store.pool.head_dim, store.lane_shape[1], store.pool.dtype):
        raise damaged(_UNFIT)
    if not 0 <= header.merged_end <= tokens.stop or int(lengths_of(span).sum()) != header.num_rows:
        raise damaged(_UNFIT)
    entries = storage.sparing.decode(span)
    lane = torch.arange(len(entries.lengths)).repeat_interleave(entries.lengths)
    positions = entries.rows.positions
    rises = (positions[1:] > positions[:-1]) | (lane[1:] != lane[:-1])
    inside = (positions >= tokens.start) & (positions < tokens.stop)
    held = torch.zeros(len(entries.lengths), dtype=torch.int64).index_add_(0, lane, entries.counts.long())
    if not (bool(rises.all()) and bool(inside.all()) and int(held.max()) <= tokens.stop):
        raise damaged(_UNFIT)
