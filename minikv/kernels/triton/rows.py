"""Rows on their way into the pool: rotated and rounded; and whole entries moved from slot to slot."""

from minikv.kernels.triton.language import constexpr, jit, tl


@jit
def rounded_to_int8(x, largest):
    """x in whole steps of largest / 127, half to even, as float32; and the step."""
    scale = tl.div_rn(largest, 127.0)
    steps = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
    # There is no rounding operator: past 1.5 * 2**23 a float32 has no room for anything but whole numbers.
    return (steps + 12582912.0) - 12582912.0, scale


@jit(do_not_specialize=["num_rows"])
def rotate_and_write(
    qkv,
    cos,
    sin,
    slots,
    out,
    keys,
    values,
    key_scales,
    value_scales,
    num_rows,
    QUERY_HEADS: constexpr,
    KV_HEADS: constexpr,
    D: constexpr,
    PADDED_HALF: constexpr,
    ROWS: constexpr,
    INT8: constexpr,
):
    """Some rows of one head of qkv [T, heads, D] into out, of the same shape: rotated if it is a query or a
    key, with the pool's rounding if it is a key or a value, which go to slots [KV_HEADS, T] as well.

    cos, sin: [T, D] float32, of which the first half is read; pair i is (i, i + D / 2).
    """
    head = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    pair = tl.arange(0, PADDED_HALF)
    inside = (row < num_rows)[:, None] & (pair < D // 2)[None, :]
    at = (row * (QUERY_HEADS + 2 * KV_HEADS) + head)[:, None] * D + pair[None, :]
    first = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    if head < QUERY_HEADS + KV_HEADS:
        angle = row[:, None] * D + pair[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    if head >= QUERY_HEADS:
        is_key = head < QUERY_HEADS + KV_HEADS
        lane = (head - QUERY_HEADS) % KV_HEADS
        slot = tl.load(slots + lane * num_rows + row, mask=row < num_rows, other=0)
        to = slot[:, None] * D + pair[None, :]
        stored = (keys if is_key else values) + to
        kind = keys.dtype.element_ty
        if INT8:
            largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
            first, scale = rounded_to_int8(first, largest)
            second, scale = rounded_to_int8(second, largest)
            tl.store((key_scales if is_key else value_scales) + slot, scale, mask=row < num_rows)
            tl.store(stored, first.to(kind), mask=inside)
            tl.store(stored + D // 2, second.to(kind), mask=inside)
            first, second = first * scale[:, None], second * scale[:, None]
        else:
            tl.store(stored, first.to(kind), mask=inside)
            tl.store(stored + D // 2, second.to(kind), mask=inside)
            first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    tl.store(out + at, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + D // 2, second.to(out.dtype.element_ty), mask=inside)
