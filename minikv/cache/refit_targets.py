"""What a refit aims at: the attention and output of full lanes on reference queries."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from minikv.cache.policies.base import LayerView, Rows
from minikv.cache.references import UNSEEN, Part, References, Seen, logits_of, part_of, see


@dataclass(frozen=True)
class Targets:
    """Per lane and reference query, in units in which no power and no `mass` is above 1.

    powers: [kv_heads, r, c], of the entries that may change, their own masses counted, 0 for queries and
    entries that are not there. mass: [kv_heads, r], what these should sum to: the sum over all entries of
    the full lane but the protected ones. fixed_mass [kv_heads, r], fixed_sum [kv_heads, r, head_dim]: sum
    over the protected entries, of powers and of powers times values. output: [kv_heads, r, head_dim] of the
    full lane. real: [kv_heads, r] bool; judging: [r] bool.
    """

    powers: Tensor
    mass: Tensor
    fixed_mass: Tensor
    fixed_sum: Tensor
    output: Tensor
    real: Tensor
    judging: Tensor

    @property
    def total(self) -> Tensor:
        """Sum of all powers of the full lane: [kv_heads, r]; infinite for queries that are not there."""
        total = self.mass + self.fixed_mass
        return total.masked_fill(~self.real | (total <= 0), torch.inf)

    def split(self) -> tuple[Targets, Targets]:
        """Those to fit to, and those that judge."""
        return self._at(~self.judging), self._at(self.judging)

    def _at(self, wanted: Tensor) -> Targets:
        rows = wanted.nonzero().squeeze(1)
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        judging = parts.pop("judging")[rows]
        return Targets(**{name: part.index_select(1, rows) for name, part in parts.items()}, judging=judging)


def compressible(view: LayerView, rows: Rows) -> Tensor:
    """Which entries of the full lanes are not protected: [kv_heads, n] bool."""
    nowhere = view.num_tokens
    fixed = torch.where(rows.fixed & (rows.positions >= 0), rows.positions, nowhere)
    held = torch.zeros(len(fixed), nowhere + 1, dtype=torch.bool).scatter_(1, fixed, True)
    return view.valid & ~held.gather(1, view.positions.clamp(min=0))


def targets_of(
    view: LayerView, rows: Rows, references: References, free: Part, seen: Seen | None = None
) -> Targets:
    """Targets for the entries of the rows that may change. seen: what somebody has seen of the full lanes."""
    wanted = compressible(view, rows)
    if seen is None or not seen.is_of(references, wanted):
        seen = see(view, wanted, references)
    fixed = part_of(rows, rows.fixed & (rows.positions >= 0))
    powers, held = logits_of(references, free), logits_of(references, fixed)
    least = torch.cat((powers.amax(dim=2, keepdim=True), held), dim=2).amax(dim=2)
    top, mass, weighted = _sums(seen, least)
    powers.sub_(top[..., None]).exp_()
    held.sub_(top[..., None]).exp_()
    if not references.real.all():
        powers.mul_(references.real[..., None])
    fixed_mass, fixed_sum = held.sum(dim=2), held @ fixed.values
    total = (mass + fixed_mass).clamp(min=torch.finfo(mass.dtype).tiny)[..., None]
    return Targets(
        powers=powers,
        mass=mass,
        fixed_mass=fixed_mass,
        fixed_sum=fixed_sum,
        output=(weighted + fixed_sum) / total,
        real=references.real,
        judging=references.judging,
    )


def _sums(seen: Seen, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Over what was seen of the full lanes: the sum of powers [kv_heads, r], and of powers times
    values [kv_heads, r, head_dim]; and before them the logits [kv_heads, r] whose power is the unit, that of
    the sum but at least `least`."""
    tops = torch.maximum(least, seen.log_sums).clamp(min=UNSEEN / 2)
    sums = (seen.log_sums - tops).exp_()
    return tops, sums, seen.means * sums[..., None]
