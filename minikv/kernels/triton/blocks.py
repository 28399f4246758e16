"""What the attention kernels have in common: the entries of a lane, and one step of the softmax.

Inside the kernels scores are in base 2, because the processors have exp2; at the interface
log masses and log-sum-exps are natural logarithms.
"""

from minikv.kernels.triton.language import constexpr, jit, tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@jit
def slots_of(table, entries, held, PAGE: constexpr):
    """Pool rows of a lane's entries, in 64 bits: a pool may hold more than 2**31 numbers."""
    page = tl.load(table + entries // PAGE, mask=held, other=0).to(tl.int64)
    return page * PAGE + entries % PAGE


@jit
def attend_block(
    q,
    state,
    keys,
    values,
    key_scales,
    value_scales,
    log_mass,
    slots,
    held,
    seen,
    scale,
    D: constexpr,
    PADDED_D: constexpr,
    HAS_MASS: constexpr,
    INT8: constexpr,
    DOT: constexpr,
):
    """Take one block of entries into the running (weighted values, sum, maximum) of the query rows `q`.

    held: entries that exist, nothing else is read. seen: [rows, entries], which row sees which.
    """
    weighted, total, largest = state
    column = tl.arange(0, PADDED_D)
    at = slots[:, None] * D + column[None, :]
    inside = held[:, None] & (column < D)[None, :]
    key = tl.load(keys + at, mask=inside, other=0)
    scores = tl.dot(q, tl.trans(key.to(DOT)), input_precision="ieee") * scale
    if INT8:
        scores *= tl.load(key_scales + slots, mask=held, other=0.0)[None, :]
    if HAS_MASS:
        scores += tl.load(log_mass + slots, mask=held, other=0.0)[None, :] * LOG2_E
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no finite maximum to subtract.
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    kept = tl.exp2(largest - anchor)
    weights = tl.exp2(scores - anchor[:, None])
    total = total * kept + tl.sum(weights, axis=1)
    value = tl.load(values + at, mask=inside, other=0)
    if INT8:
        value = value.to(tl.float32) * tl.load(value_scales + slots, mask=held, other=0.0)[:, None]
    weighted = weighted * kept[:, None] + tl.dot(weights.to(DOT), value.to(DOT), input_precision="ieee")
    return weighted, total, peak


@jit
def nothing_seen(ROWS: constexpr, PADDED_D: constexpr):
    """The running state before the first block."""
    return (
        tl.zeros([ROWS, PADDED_D], tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
    )


@jit
def outcome(state):
    """Outputs and log-sum-exps (base 2) of a running state; zero and -inf for a row that saw nothing."""
    weighted, total, largest = state
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    return weighted / divisor[:, None], tl.where(empty, float("-inf"), largest + tl.log2(divisor))
