"""GraceKV written a second time from its specification: float64, one plain loop inside another.

Nothing is shared with `minikv.cache.policies.trees` but the types of its questions. A node is the list of
entries that it holds; a tree is (entries, left, right) or (entries,) for a leaf; both are per lane.
"""

from __future__ import annotations

import heapq
import math
from itertools import product

import numpy as np

INF = float("inf")


# Allocation. drop, keep: of one slot's nodes, level by level from the leaves


def children(node: int, leaves: int) -> tuple[int, int] | None:
    """Numbers of a node's children, None for a leaf."""
    if node < leaves:
        return None
    start, size = 0, leaves
    while node >= start + size:
        start, size = start + size, size // 2
    below = start - 2 * size
    left = below + 2 * (node - start)
    return left, left + 1


def antichains(node: int, leaves: int, drop, keep) -> list[tuple[float, tuple[int, ...]]]:
    """Every way to treat the entries below a node: (damage, nodes that become entries)."""
    ways = [(w, kept) for w, kept in ((drop[node], ()), (keep[node], (node,))) if w < INF]
    below = children(node, leaves)
    if below:
        for one, other in product(*(antichains(child, leaves, drop, keep) for child in below)):
            ways.append((one[0] + other[0], one[1] + other[1]))
    return ways


def curve(node: int, leaves: int, drop, keep) -> np.ndarray:
    """Least damage by the exact number of entries, inf where there is no way."""
    own = np.array([drop[node], keep[node]])
    below = children(node, leaves)
    if below is None:
        return own
    one, other = (curve(child, leaves, drop, keep) for child in below)
    out = np.full(max(2, len(one) + len(other) - 1), INF)
    out[:2] = own
    for k, damage in enumerate(one):
        out[k : k + len(other)] = np.minimum(out[k : k + len(other)], damage + other)
    return out


def envelope(damages: np.ndarray) -> list[tuple[int, float]]:
    """Corners (entries, damage) of the convex envelope of a curve, as far as it falls."""
    corners: list[tuple[int, float]] = []
    for count, damage in enumerate(damages):
        if damage == INF or (corners and damage >= corners[-1][1]):
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-2], (count, damage)):
            corners.pop()
        corners.append((count, float(damage)))
    return corners


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def greedy_over_envelopes(curves: list[np.ndarray]) -> list[tuple[int, float]]:
    """Corners (entries, damage) of all slots together: steps down the envelopes, the steepest first."""
    walks = [envelope(damages) for damages in curves]
    count = sum(walk[0][0] for walk in walks)
    damage = math.fsum(walk[0][1] for walk in walks)
    heap = [(_slope(walk[0], walk[1]), i, 0) for i, walk in enumerate(walks) if len(walk) > 1]
    heapq.heapify(heap)
    found = [(count, damage)]
    while heap:
        _, i, at = heapq.heappop(heap)
        walk = walks[i]
        count += walk[at + 1][0] - walk[at][0]
        damage += walk[at + 1][1] - walk[at][1]
        found.append((count, damage))
        if at + 2 < len(walk):
            heapq.heappush(heap, (_slope(walk[at + 1], walk[at + 2]), i, at + 1))
    return found


# Damage. view: a LayerView; lists per lane


class Lane:
    """One KV head of a view, its rows and the attention of its group's query heads."""

    def __init__(self, view, protected, head: int, rope, rows=4, shifts=8, shift_weight=0.5):
        self.length = int(view.valid[head].sum())
        self.free = [j for j in range(self.length) if not protected[head, j]]
        f = lambda x: x[head, : self.length].double().numpy()  # noqa: E731
        self.keys, self.values, self.log_mass = f(view.keys), f(view.values), f(view.log_mass)
        self.counts, self.positions = f(view.counts), f(view.positions)
        self.rope, self.num_tokens, self.width = rope, view.num_tokens, view.keys.shape[2]
        heads = range(head * view.group, (head + 1) * view.group)
        weight = view.output_weight.double().numpy()
        self.out = [weight[:, q * self.width : (q + 1) * self.width] for q in heads]
        self.queries = [view.queries[q].double().numpy() for q in heads]
        self.at = view.query_positions.tolist()
        self.pool = -(-len(self.at) // rows)
        self.order = [i * len(self.at) // (rows * self.pool) for i in range(rows * self.pool)]
        self.rows, self.shifts, self.shift_weight = rows, shifts, shift_weight
        self.scale = float(view.residual_norms.double().square().mean())
        self.plain = np.array([self._turn(k, -p) for k, p in zip(self.keys, self.positions, strict=True)])
        heads = range(view.group)
        self.attention = [[self._attention(h, r) for r in range(rows)] for h in heads]
        self.outputs = [[self._output(h, r) for r in range(rows)] for h in heads]
        self.relevance = self._relevance()

    def _turn(self, key: np.ndarray, position: float) -> np.ndarray:
        half, out = self.width // 2, key.copy()
        for i in range(half):
            angle = float(position) * float(self.rope.inv_freq[i])
            out[i] = key[i] * math.cos(angle) - key[i + half] * math.sin(angle)
            out[i + half] = key[i + half] * math.cos(angle) + key[i] * math.sin(angle)
        return out

    def _logits(self, h: int, q: int, keys: np.ndarray) -> np.ndarray:
        return keys @ self.queries[h][q] / math.sqrt(self.width)

    def _normaliser(self, h: int, q: int) -> float:
        seen = self.positions <= self.at[q]
        return float(np.logaddexp.reduce((self._logits(h, q, self.keys) + self.log_mass)[seen]))

    def _members(self, row: int) -> list[int]:
        return self.order[row * self.pool : (row + 1) * self.pool]

    def _attentions(self, h: int, row: int) -> list[np.ndarray]:
        """Of each query of a row."""
        out = []
        for q in self._members(row):
            p = np.exp(self._logits(h, q, self.keys) + self.log_mass - self._normaliser(h, q))
            out.append(np.where(self.positions <= self.at[q], p, 0.0))
        return out

    def _attention(self, h: int, row: int) -> np.ndarray:
        return np.sqrt(sum(p**2 for p in self._attentions(h, row)) / self.pool)

    def _output(self, h: int, row: int) -> np.ndarray:
        return sum(p @ self.values for p in self._attentions(h, row)) / self.pool

    def ahead(self, p: np.ndarray) -> np.ndarray:
        out = np.zeros_like(p)
        p = [p[t] if t in self.free else 0.0 for t in range(len(p))]
        for t in range(len(p)):
            out[t] = math.sqrt(sum(p[t - k] ** 2 for k in range(1, self.shifts + 1) if t - k >= 0))
        return out

    def _relevance(self) -> np.ndarray:
        """Weights of values, by the slot's mean."""
        seen = np.zeros(self.length)
        for rows in self.attention:
            for p in rows:
                seen += (p + self.shift_weight * self.ahead(p)) / self.rows / self.scale
        out = np.zeros(self.length)
        for start in range(0, self.length, 64):
            slot = [j for j in self.free if start <= j < start + 64]
            if slot:
                mean = sum(seen[slot]) / sum(self.counts[slot])
                out[slot] = seen[slot] + (0.1 * mean + 1e-20) * self.counts[slot]
        return out

    def prototype(self, node: list[int]) -> tuple[np.ndarray, np.ndarray, float]:
        """Key, value and position of several entries."""
        n, w = self.counts[node], self.relevance[node]
        position = round(float(n @ self.positions[node] / n.sum()))
        return self._turn(n @ self.plain[node] / n.sum(), position), w @ self.values[node] / w.sum(), position

    def damage(self, node: list[int]) -> tuple[float, float, float]:
        """(without the node, with its prototype, log of its mass), damages squared."""
        key, value, _ = self.prototype(node)
        mass = float(np.exp(self.log_mass[node]).sum())
        drop, terms = 0.0, []
        for h, rows in enumerate(self.attention):
            for row, p in enumerate(rows):
                o = self.outputs[h][row]
                chances = [
                    math.exp(float(self._logits(h, q, key[None])[0]) - self._normaliser(h, q))
                    for q in self._members(row)
                ]
                z = math.sqrt(sum(chance**2 for chance in chances) / self.pool)
                terms.append((h, p, o, z, 1 / self.rows / self.scale, True))
                far, n = self.ahead(p), self.counts[node]
                logs = np.log(np.maximum(far[node], 1e-30)) - self.log_mass[node]
                z = math.exp(float(n @ logs / n.sum()))
                terms.append((h, far, o, z, self.shift_weight / self.rows / self.scale, False))
        num = den = 0.0
        for h, p, o, z, weight, fitted in terms:
            c = self.out[h] @ (p[node] @ (self.values[node] - o))
            a = self.out[h] @ (value - o)
            drop += weight * c @ c
            if fitted:
                num += weight * z * a @ c
                den += weight * z * z * a @ a
        m = min(max(num / max(den, 1e-30), 1e-4 * mass), 20 * mass)
        keep = 0.0
        for h, p, o, z, weight, _ in terms:
            e = self.out[h] @ (m * z * (value - o) - p[node] @ (self.values[node] - o))
            keep += weight * e @ e
        if len(node) == 1:
            return drop, 0.0, float(self.log_mass[node[0]])
        return drop, keep, math.log(m)
