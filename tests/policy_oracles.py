"""Policies written a second time from their specifications: float64, dense, one plain loop inside another.

Nothing is shared with `minikv.cache.policies` but the types of its questions. Scores are lists
[kv_heads][length]; entries past a lane's end do not exist here.
"""

from __future__ import annotations

import math

from minikv.cache.policies import HeadProfile, LayerView
from minikv.models.rope import Rope

KERNEL = 5


def lane_length(view: LayerView, head: int) -> int:
    return int(view.valid[head].sum())


def dot(a, b) -> float:
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    total = math.fsum(powers)
    return [p / total for p in powers]


# What a query head of the window attends to


def observed(view: LayerView, row: int) -> list[float]:
    """Attention to each entry of the lane of query head `view.query_heads[row]`, mean over the window."""
    head = int(view.query_heads[row]) // view.group
    length = lane_length(view, head)
    scale = math.sqrt(view.keys.shape[2])
    queries = view.queries[row].double().tolist()
    keys = view.keys[head].double().tolist()
    mass = [0.0] * length
    for query, at in zip(queries, view.query_positions.tolist(), strict=True):
        seen = [j for j in range(length) if int(view.positions[head, j]) <= at]
        if not seen:
            continue
        logits = [dot(query, keys[j]) / scale + float(view.log_mass[head, j]) for j in seen]
        for j, p in zip(seen, softmax(logits), strict=True):
            mass[j] += p / len(queries)
    return mass


def pooled(view: LayerView, head: int, mass: list[float]) -> list[float]:
    """Mean with the neighbours, over entries before the window only."""
    first = int(view.query_positions[0])
    before = [j for j in range(len(mass)) if int(view.positions[head, j]) < first]
    out = list(mass)
    for j in before:
        near = [mass[i] for i in range(j - KERNEL // 2, j + KERNEL // 2 + 1) if i in before]
        out[j] = math.fsum(near) / len(near)
    return out


def observed_heads(view: LayerView) -> list[list[float]]:
    rows = range(len(view.query_heads))
    return [pooled(view, int(view.query_heads[r]) // view.group, observed(view, r)) for r in rows]


# Scores


def window(view: LayerView, profile: HeadProfile | None, rope: Rope) -> list[list[float]]:
    return [[float(view.positions[h, j]) for j in range(lane_length(view, h))] for h in range(len(view.keys))]


def snapkv(view: LayerView, profile: HeadProfile | None, rope: Rope) -> list[list[float]]:
    mass = observed_heads(view)
    out = []
    for head in range(len(view.keys)):
        own = [mass[head * view.group + g] for g in range(view.group)]
        out.append([math.fsum(column) / view.group for column in zip(*own, strict=True)])
    return out


def compresskv(view: LayerView, profile: HeadProfile | None, rope: Rope) -> list[list[float]]:
    """One score per position for all KV heads: the mean over the retrieval heads whose lanes hold it."""
    by_position: dict[int, list[float]] = {}
    for row, mass in enumerate(observed_heads(view)):
        head = int(view.query_heads[row]) // view.group
        for j, p in enumerate(mass):
            by_position.setdefault(int(view.positions[head, j]), []).append(p)
    means = {at: math.fsum(values) / len(values) for at, values in by_position.items()}
    return [
        [means.get(int(view.positions[h, j]), 0.0) for j in range(lane_length(view, h))]
        for h in range(len(view.keys))
    ]


def compresskv_own(view: LayerView, profile: HeadProfile | None, rope: Rope) -> list[list[float]]:
    """A KV head's own retrieval heads, where it has any."""
    shared, mass = compresskv(view, profile, rope), observed_heads(view)
    out = []
    for head in range(len(view.keys)):
        own = [mass[r] for r in range(len(mass)) if int(view.query_heads[r]) // view.group == head]
        columns = zip(*own, strict=True)
        out.append([math.fsum(c) / len(own) for c in columns] if own else shared[head])
    return out


def expected(view: LayerView, profile: HeadProfile | None, rope: Rope) -> list[list[float]]:
    width, group = view.keys.shape[2], view.group
    rotation = mean_rotation(rope, view.num_tokens, 512, width)
    out = []
    for head in range(len(view.keys)):
        length = lane_length(view, head)
        total = [0.0] * length
        for q in range(head * group, (head + 1) * group):
            mean = apply(rotation, view.statistics.mean[q].double().tolist())
            rows = [apply(rotation, row) for row in view.statistics.covariance[q].double().tolist()]
            covariance = [apply(rotation, column) for column in zip(*rows, strict=True)]
            logits = []
            for j in range(length):
                key = view.keys[head, j].double().tolist()
                spread = dot(key, apply(covariance, key)) / (2 * width)
                logits.append(dot(mean, key) / math.sqrt(width) + spread + float(view.log_mass[head, j]))
            weight = view.output_weight[:, q * width : (q + 1) * width].double().tolist()
            for j, p in enumerate(softmax(logits)):
                out_vector = apply(weight, view.values[head, j].double().tolist())
                total[j] += (p + 1e-4) * math.sqrt(dot(out_vector, out_vector)) / group
        out.append(total)
    return out


def apply(matrix, vector) -> list[float]:
    return [dot(row, vector) for row in matrix]


def mean_rotation(rope: Rope, start: int, count: int, width: int) -> list[list[float]]:
    """Mean over positions start .. start + count of the half-split rotation, as a matrix on columns."""
    half = width // 2
    out = [[0.0] * width for _ in range(width)]
    for position in range(start, start + count):
        for i in range(half):
            angle = position * float(rope.inv_freq[i])
            cos = math.cos(angle) * rope.attention_factor / count
            sin = math.sin(angle) * rope.attention_factor / count
            out[i][i] += cos
            out[i + half][i + half] += cos
            out[i][i + half] -= sin
            out[i + half][i] += sin
    return out


# Allocation: scores [layers][kv_heads] lists with inf for protected entries


def uniform(lengths, protected, total) -> list[list[int]]:
    """One entry at a time to the shortest lane that has more, the first of equals."""
    counts = [list(row) for row in protected]
    lanes = [(layer, head) for layer in range(len(counts)) for head in range(len(counts[0]))]
    for _ in range(min(total, sum(map(sum, lengths))) - sum(map(sum, protected))):
        open_lanes = [(a, b) for a, b in lanes if counts[a][b] < lengths[a][b]]
        layer, head = min(open_lanes, key=lambda lane: counts[lane[0]][lane[1]])
        counts[layer][head] += 1
    return counts


def across_heads(scores, lengths, protected, shares, floor=0.2) -> list[list[int]]:
    """Floors first, then the best entry of the layer, again and again."""
    counts = []
    for layer, heads in enumerate(scores):
        share = shares[layer]
        taken = [max(protected[layer][h], math.floor(share[h] * floor + 1e-6)) for h in range(len(heads))]
        order = [sorted(range(len(s)), key=lambda j, s=s: (-s[j], j)) for s in heads]
        while sum(taken) < sum(share):
            left = [h for h in range(len(heads)) if taken[h] < lengths[layer][h]]
            best = min(left, key=lambda h: (-heads[h][order[h][taken[h]]], order[h][taken[h]], h))
            taken[best] += 1
        counts.append(taken)
    return counts


def layer_rows(errors, total, minimum=32, ceiling=3) -> list[int]:
    """CompressKV's layer budgets: `total` entries over layers, by error share, with exact residual."""
    count, weights = len(errors), [float(e) for e in errors]
    low, high = min(minimum, total // count), math.floor(ceiling * total / count)
    rest, whole = total - low * count, math.fsum(weights)
    rows = [min(max(low + round(w / whole * rest), low), high) for w in weights]
    while (missing := total - sum(rows)) != 0:
        step = 1 if missing > 0 else -1
        moved = False
        for layer in sorted(range(count), key=lambda i: (-step * weights[i], i)):
            if sum(rows) != total and low <= rows[layer] + step <= high:
                rows[layer] += step
                moved = True
        if not moved:
            break
    return rows


def keep(scores: list[list[float]], counts: list[int]) -> list[set[int]]:
    """The `counts` highest entries of each lane, of equals the first."""
    return [
        set(sorted(range(len(lane)), key=lambda j: (-lane[j], j))[:count])
        for lane, count in zip(scores, counts, strict=True)
    ]
