"""Whole entries from slot to slot, and rewritten ones into slots: what compression does to a pool."""

from minikv.kernels.triton.language import constexpr, jit, tl
from minikv.kernels.triton.rows import rounded_to_int8


@jit(do_not_specialize=["num_entries"])
def copy_entries(
    keys,
    values,
    key_scales,
    value_scales,
    log_mass,
    positions,
    to_keys,
    to_values,
    to_key_scales,
    to_value_scales,
    to_log_mass,
    to_positions,
    source,
    target,
    num_entries,
    D: constexpr,
    PADDED_D: constexpr,
    ROWS: constexpr,
    BY_SOURCE: constexpr,
    BY_TARGET: constexpr,
    INT8: constexpr,
):
    """Entry source[i] of the first six to place target[i] of the others, bit for bit; without BY_SOURCE or
    BY_TARGET entry i itself."""
    index = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = index < num_entries
    column = tl.arange(0, PADDED_D)
    inside = there[:, None] & (column < D)[None, :]
    one, other = index, index
    if BY_SOURCE:
        one = tl.load(source + index, mask=there, other=0)
    if BY_TARGET:
        other = tl.load(target + index, mask=there, other=0)
    at, to = one[:, None] * D + column[None, :], other[:, None] * D + column[None, :]
    tl.store(to_keys + to, tl.load(keys + at, mask=inside), mask=inside)
    tl.store(to_values + to, tl.load(values + at, mask=inside), mask=inside)
    tl.store(to_log_mass + other, tl.load(log_mass + one, mask=there), mask=there)
    tl.store(to_positions + other, tl.load(positions + one, mask=there), mask=there)
    if INT8:
        tl.store(to_key_scales + other, tl.load(key_scales + one, mask=there), mask=there)
        tl.store(to_value_scales + other, tl.load(value_scales + one, mask=there), mask=there)


@jit
def _put_rounded(
    rows, pool, scales, old, old_scales, index, there, slot, column, D: constexpr, INT8: constexpr
):
    inside = there[:, None] & (column < D)[None, :]
    at, to = index[:, None] * D + column[None, :], slot[:, None] * D + column[None, :]
    x = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    if INT8:
        whole, scale = rounded_to_int8(x, tl.max(tl.abs(x), axis=1))
        was = tl.load(old + at, mask=inside, other=0).to(tl.float32)
        was_scale = tl.load(old_scales + index, mask=there, other=0.0)
        # Rounding again what was rounded before could change its last bit.
        same = tl.sum((was * was_scale[:, None] != x).to(tl.int32), axis=1) == 0
        x = tl.where(same[:, None], was, whole)
        tl.store(scales + slot, tl.where(same, was_scale, scale), mask=there)
    tl.store(pool + to, x.to(pool.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_entries"])
def put_rounded(
    new_keys,
    new_values,
    keys,
    values,
    key_scales,
    value_scales,
    old_keys,
    old_values,
    old_key_scales,
    old_value_scales,
    target,
    num_entries,
    D: constexpr,
    PADDED_D: constexpr,
    ROWS: constexpr,
    INT8: constexpr,
):
    """new_keys, new_values [n, D], rounded to the pool's type, to slots target [n].

    With INT8 a row that equals the old one [n, D] times its scale [n] keeps its bits.
    """
    index = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = index < num_entries
    slot = tl.load(target + index, mask=there, other=0)
    column = tl.arange(0, PADDED_D)
    _put_rounded(new_keys, keys, key_scales, old_keys, old_key_scales, index, there, slot, column, D, INT8)
    _put_rounded(
        new_values, values, value_scales, old_values, old_value_scales, index, there, slot, column, D, INT8
    )
