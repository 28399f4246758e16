"""Attention over lanes: a tile of query rows goes over a lane or one split of it; splits are merged after."""

from minikv.kernels.triton.blocks import LN_2, attend_block, nothing_seen, outcome, slots_of
from minikv.kernels.triton.language import constexpr, jit, tl


@jit(do_not_specialize=["layer", "num_layers", "table_length", "max_splits"])
def attend_lanes(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    log_mass,
    tables,
    past_lengths,
    limits,
    sequences,
    starts,
    counts,
    parts,
    out,
    lse,
    scale,
    layer,
    num_layers,
    table_length,
    max_splits,
    q_row_stride,
    KV_HEADS: constexpr,
    GROUP: constexpr,
    ROWS: constexpr,
    D: constexpr,
    PADDED_D: constexpr,
    PAGE: constexpr,
    ENTRIES: constexpr,
    SPLIT: constexpr,
    LIMITED: constexpr,
    HAS_MASS: constexpr,
    INT8: constexpr,
    DOT: constexpr,
):
    """One tile of the new rows of one sequence and KV head, over one split of the lane.

    Rows of the tile: new row 0 with each query head of the group, new row 1 with each, and so on. New row t
    sees the entries before the pass and the first t + 1 of the pass, which is the end of the lane.

    q: [T, query_heads, D]. tables: [S, layers, KV_HEADS, table_length]; past_lengths: [S, layers, KV_HEADS].
    limits: the same shape; with LIMITED no more than so many entries of a lane are read, its first.
    sequences, starts, counts, parts: [n] int32, whose lanes are read, the first row of q, how many there are,
    and how many rows the members before have. With SPLIT 0: out [T, query_heads, D] and lse [T, query_heads]
    (natural). Else out [rows, query_heads, max_splits, D] and lse [rows, query_heads, max_splits] (base 2),
    both float32, only for splits in which a row of the tile sees an entry.
    """
    tile, which, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    member, head = which // KV_HEADS, which % KV_HEADS
    count = tl.load(counts + member)
    if tile * ROWS >= count * GROUP:
        return
    lane = (tl.load(sequences + member) * num_layers + layer) * KV_HEADS + head
    past = tl.load(past_lengths + lane)
    first, last = 0, past + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, count - 1) + 1
    if LIMITED:
        last = tl.minimum(last, tl.load(limits + lane))
    if SPLIT:
        first = split * SPLIT
        if first >= last:
            return
        last = tl.minimum(last, first + SPLIT)
    table = tables + lane.to(tl.int64) * table_length

    place, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_D)
    new = place // GROUP
    query_head = head * GROUP + place % GROUP
    real = (new < count)[:, None] & (column < D)[None, :]
    row = (tl.load(starts + member) + new).to(tl.int64)
    at = (row * q_row_stride + query_head * D)[:, None] + column[None, :]
    query = tl.load(q + at, mask=real, other=0.0).to(DOT)

    state = nothing_seen(ROWS, PADDED_D)
    for begin in range(first, last, ENTRIES):
        entries = begin + tl.arange(0, ENTRIES)
        held = entries < last
        slots = slots_of(table, entries, held, PAGE)
        seen = entries[None, :] <= past + new[:, None]
        state = attend_block(
            query, state, keys, values, key_scales, value_scales, log_mass, slots, held, seen & held[None, :],
            scale, D, PADDED_D, HAS_MASS, INT8, DOT,
        )  # fmt: skip
    result, result_lse = outcome(state)
    to = row * (KV_HEADS * GROUP) + query_head
    if SPLIT:
        part = (tl.load(parts + member) + new).to(tl.int64)
        to = (part * (KV_HEADS * GROUP) + query_head) * max_splits + split
    else:
        result_lse = result_lse * LN_2
    tl.store(out + to[:, None] * D + column[None, :], result.to(out.dtype.element_ty), mask=real)
    tl.store(lse + to, result_lse, mask=new < count)


@jit(do_not_specialize=["layer", "num_layers", "max_splits"])
def merge_splits(
    split_out,
    split_lse,
    past_lengths,
    limits,
    sequences,
    rows,
    ordinals,
    out,
    lse,
    layer,
    num_layers,
    max_splits,
    KV_HEADS: constexpr,
    GROUP: constexpr,
    D: constexpr,
    PADDED_D: constexpr,
    SPLIT: constexpr,
    LIMITED: constexpr,
    AT_ONCE: constexpr,
):
    """One query head of one row that was split: out [T, query_heads, D], lse [T, query_heads] (natural).

    sequences, rows, ordinals: [rows] int32, whose row it is, which of q, and which of the sequence's.
    """
    part, query_head = tl.program_id(0), tl.program_id(1)
    lane = (tl.load(sequences + part) * num_layers + layer) * KV_HEADS + query_head // GROUP
    num_splits = (tl.load(past_lengths + lane) + tl.load(ordinals + part) + SPLIT) // SPLIT
    if LIMITED:
        num_splits = tl.minimum(num_splits, (tl.load(limits + lane) + SPLIT - 1) // SPLIT)
    column = tl.arange(0, PADDED_D)

    weighted = tl.zeros([PADDED_D], tl.float32)
    total, largest = 0.0, float("-inf")
    for begin in range(0, num_splits, AT_ONCE):
        split = begin + tl.arange(0, AT_ONCE)
        held = split < num_splits
        at = (part.to(tl.int64) * (KV_HEADS * GROUP) + query_head) * max_splits + split
        part_lse = tl.load(split_lse + at, mask=held, other=float("-inf"))
        peak = tl.maximum(largest, tl.max(part_lse, axis=0))
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        kept, weights = tl.exp2(largest - anchor), tl.exp2(part_lse - anchor)
        inside = held[:, None] & (column < D)[None, :]
        partial = tl.load(split_out + at[:, None] * D + column[None, :], mask=inside, other=0.0)
        weighted = weighted * kept + tl.sum(weights[:, None] * partial, axis=0)
        total = total * kept + tl.sum(weights, axis=0)
        largest = peak
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    to = tl.load(rows + part).to(tl.int64) * (KV_HEADS * GROUP) + query_head
    tl.store(out + to * D + column, (weighted / divisor).to(out.dtype.element_ty), mask=column < D)
    tl.store(lse + to, tl.where(empty, float("-inf"), (largest + tl.log2(divisor)) * LN_2))
