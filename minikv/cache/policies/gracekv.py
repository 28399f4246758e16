"""GraceKV: prototype trees under one budget for all layers and heads (arXiv 2608.07001)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.policies.base import Evidence, LayerView, Rows
from minikv.cache.policies.trees.frontier import Forest, choose, nodes_of
from minikv.cache.policies.trees.gains import projection_roots
from minikv.cache.policies.trees.measure import Damage, damage_of
from minikv.cache.policies.trees.probes import observe
from minikv.cache.policies.trees.prototypes import identity, merged, places_of
from minikv.cache.policies.trees.slots import LEVELS, level_slice

if TYPE_CHECKING:
    from minikv.cache.references import Seen
    from minikv.models.rope import Rope


@dataclass(frozen=True)
class Measured:
    """What `assign` and `merge` need of a layer: eight numbers an entry.

    valid, protected: [kv_heads, n] bool. seen: what recorded queries see of the others, if
    that was found out.
    """

    damage: Damage
    valid: Tensor
    protected: Tensor
    seen: Seen | None = None


class GraceKV:
    """Merges neighbouring entries into prototypes, coarsely where it does little to the output.

    Implements the published formulation as reported: 64 neighbouring entries of a lane are the leaves of a
    balanced binary tree; a node stands for its entries by a weighted mean key (before rotation), a
    weighted mean value and a mass; budget goes where it takes away most damage, over all layers,
    heads and slots at once. Where this differs: damage is the exact error of the layer's output, not
    that of relative sums (`trees.gains`); masses are fitted to it; a price for an entry is found
    instead of taking greedy steps (`trees.frontier`); rows that look a few entries ahead keep what is
    copied after what is found (`trees.probes`).

    rows: the window's queries are taken together to so many. shifts, shift_weight: how far they look
    ahead, and what that counts. future, future_weight: queries to come, and their share.
    smallest_drop: fewest neighbouring places that may be left out of a slot; 64: a slot is covered or
    left out whole, 1: any antichain. additive: damages add as norms, a bound for errors that agree;
    else as squares, exact for errors that know nothing of each other.

    Costs a few matrix products of width head_dim per entry and query head, and some 8 floats an entry
    between the calls.
    """

    name = "gracekv"
    refit_from = 16.0  # below, it does not help

    def __init__(
        self,
        window: int,
        rope: Rope,
        *,
        rows: int = 4,
        shifts: int = 8,
        shift_weight: float = 0.5,
        future: int = 64,
        future_weight: float = 0.75,
        smallest_drop: int = 1,
        additive: bool = False,
    ) -> None:
        self.evidence = Evidence(window=window, future=future, residual_norms=True, output_gram=True)
        self.rope = rope
        self.rows, self.shifts, self.shift_weight = rows, shifts, shift_weight
        self.future_weight = future_weight if future else 0.0
        self.smallest_drop, self.additive = smallest_drop, additive
        self._roots: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.inference_mode()
    def measure(self, view: LayerView, protected: Tensor) -> Measured:
        """Damages of all nodes; needs the queries of all heads."""
        rows = observe(view, protected, self.rows, self.shifts, self.shift_weight, self.future_weight)
        protected = protected & view.valid
        damage = damage_of(view, rows, protected, self.rope, self._roots_of(view))
        return Measured(damage, view.valid, protected, rows.seen)

    @torch.inference_mode()
    def assign(self, measured: list[Measured], total: int) -> list[Tensor]:
        """Per layer [kv_heads, n] int64 places, of the nodes that are best for `total` entries."""
        lengths = torch.cat([layer.valid.sum(dim=1) for layer in measured])
        protected = torch.cat([layer.protected.sum(dim=1) for layer in measured])
        if total >= int(lengths.sum()):
            return [identity(layer.valid) for layer in measured]
        floors = ((protected == 0) & (lengths > 0)).long()
        total = max(total - int(protected.sum()), int(floors.sum()))
        nodes = nodes_of(choose(self._forest(measured, floors), total))
        parts = nodes.split([layer.damage.drop.shape[:2].numel() for layer in measured])
        return [
            places_of(part.view(len(layer.valid), -1), layer.protected, layer.valid)
            for part, layer in zip(parts, measured, strict=True)
        ]

    @torch.inference_mode()
    def merge(self, view: LayerView, measured: Measured, assignment: Tensor, protected: Tensor) -> Rows:
        """The prototypes of the nodes that `assignment` is made of."""
        return merged(view, assignment, measured.damage, protected, self.rope)

    def _roots_of(self, view: LayerView) -> Tensor:
        """`projection_roots` of a layer, made once for the grams that they are of."""
        grams = view.output_gram
        assert grams is not None
        known, roots = self._roots.get(view.layer, (None, grams))
        if known is not grams:
            roots = projection_roots(grams)
            self._roots[view.layer] = grams, roots
        return roots

    def _forest(self, measured: list[Measured], floors: Tensor) -> Forest:
        """The slots of all lanes, with the damages of this variant."""
        shapes = [layer.damage.drop.shape for layer in measured]
        slots = torch.tensor([slots for kv_heads, slots, _ in shapes for _ in range(kv_heads)])
        drop, keep = [], []
        for level in range(LEVELS + 1):
            part = level_slice(level)
            drop.append(torch.cat([layer.damage.drop[..., part].flatten(0, 1) for layer in measured]))
            keep.append(torch.cat([layer.damage.keep[..., part].flatten(0, 1) for layer in measured]))
            if self.additive:
                drop[-1].sqrt_()
                keep[-1].sqrt_()
            if 1 << level < self.smallest_drop:
                drop[-1].masked_fill_(drop[-1] > 0, torch.inf)
        return Forest(drop, keep, torch.arange(len(slots)).repeat_interleave(slots), floors)
