"""kvpress on transformers, as one side of `bench_policies.py`.

Its presses prune while a prompt is computed, layer by layer, behind full attention. `Collector` calls the
compress methods of all presses on the same inputs, so that one prompt serves them all; `check` proves
that this gives what each press gives by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from kvpress import (  # pyright: ignore[reportMissingImports]
    AdaKVPress,
    BasePress,
    ExpectedAttentionPress,
    SnapKVPress,
)
from torch import Tensor
from transformers import DynamicCache

from common import Clocks, timed
from peer import load_peer
from policy_sides import Answer, Setting

if TYPE_CHECKING:
    from minikv.models.sources import OpenModel

# As their authors recommend: no epsilon alone, 1e-2 where heads compete.
PRESSES: dict[str, Callable[[float, int], BasePress]] = {
    "snapkv": lambda ratio, window: SnapKVPress(ratio, window_size=window, kernel_size=5),
    "adakv": lambda ratio, window: AdaKVPress(SnapKVPress(ratio, window_size=window, kernel_size=5)),
    "expected": lambda ratio, window: ExpectedAttentionPress(ratio),
    "adakv:expected": lambda ratio, window: AdaKVPress(ExpectedAttentionPress(ratio, epsilon=1e-2)),
}


class _Kept:
    """What one press left of each layer: keys, values, and the places that it only masks."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor, Any]] = []
        self.spent = Clocks(0.0, 0.0)


class Collector(BasePress):
    """Leaves the cache as it is and keeps aside what each press would have made of it."""

    def __init__(self, presses: dict[Setting, BasePress]) -> None:
        self.presses = presses
        self.kept = {setting: _Kept() for setting in presses}

    def post_init_from_model(self, model: Any) -> None:
        """See kvpress."""
        for press in self.presses.values():
            press.post_init_from_model(model)

    def compress(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: dict
    ) -> tuple[Tensor, Tensor]:
        """See kvpress."""
        for setting, press in self.presses.items():
            module.masked_key_indices = None
            inputs = (module, hidden_states, keys, values, attentions, kwargs)
            spent, (kept_keys, kept_values) = timed(partial(press.compress, *inputs))
            kept = self.kept[setting]
            kept.spent = Clocks(kept.spent.wall + spent.wall, kept.spent.cpu + spent.cpu)
            kept.layers.append((kept_keys, kept_values, module.masked_key_indices))
        module.masked_key_indices = None
        return keys, values


class KVPress:
    """See `policy_sides.Side`."""

    name = "kvpress"

    def __init__(self, opened: OpenModel, window: int) -> None:
        self._model = load_peer(opened)
        self._window = window
        self._length = 0
        self._full = DynamicCache()
        self._kept: dict[Setting, _Kept] = {}

    @torch.inference_mode()
    def read(self, context: Sequence[int], settings: Sequence[Setting]) -> None:
        """See `policy_sides.Side`."""
        collector = Collector({s: PRESSES[s.method](1 - s.budget, self._window) for s in settings})
        self._full = self._compute(context, collector)
        self._kept, self._length = collector.kept, len(context)

    @torch.inference_mode()
    def answer(self, setting: Setting | None, ids: Sequence[int]) -> Answer:
        """See `policy_sides.Side`. Masked places are looked up for every query, which kvpress can do for
        a few queries at a time only: such a cache gets one token after the other."""
        cache, spent, masks = self._copy(setting)
        held = sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in _tensors(layer))
        self._mask(masks)
        step = 1 if any(mask is not None for mask in masks) else len(ids)
        logits = []
        for start in range(0, len(ids), step):
            part = torch.tensor([list(ids[start : start + step])])
            positions = torch.arange(part.shape[1])[None] + self._length + start
            logits.append(self._model(part, past_key_values=cache, position_ids=positions).logits[0])
        self._mask([None] * len(masks))
        return Answer(torch.cat(logits), held, spent)

    @torch.inference_mode()
    def check(self, context: Sequence[int], settings: Sequence[Setting]) -> None:
        """AssertionError unless each press alone leaves the same keys as it does in the collector."""
        self.read(context, settings)
        for setting in settings:
            alone = self._compute(context, PRESSES[setting.method](1 - setting.budget, self._window))
            pairs = zip(alone.layers, self._attentions, self._kept[setting].layers, strict=True)
            for layer, module, (keys, _, mask) in pairs:
                own = getattr(module, "masked_key_indices", None)
                assert torch.equal(_tensors(layer)[0], keys)
                assert (mask is None) == (own is None)
                assert mask is None or all(map(torch.equal, mask, own or ()))

    @property
    def _attentions(self) -> list[Any]:
        return [layer.self_attn for layer in self._model.model.layers]

    def _compute(self, context: Sequence[int], press: BasePress) -> DynamicCache:
        cache = DynamicCache()
        self._mask([None] * len(self._attentions))
        with press(self._model):
            self._model(torch.tensor([list(context)]), past_key_values=cache, logits_to_keep=1)
        return cache

    def _copy(self, setting: Setting | None) -> tuple[DynamicCache, Clocks, list[Any]]:
        """A cache of its own for one setting, the time its press took, and its masks."""
        if setting is None:
            layers, spent = [(*_tensors(layer), None) for layer in self._full.layers], Clocks(0.0, 0.0)
        else:
            layers, spent = self._kept[setting].layers, self._kept[setting].spent
        cache = DynamicCache()
        for index, (keys, values, _) in enumerate(layers):
            cache.update(keys, values, index)
        return cache, spent, [mask for _, _, mask in layers]

    def _mask(self, masks: Sequence[Any]) -> None:
        for module, mask in zip(self._attentions, masks, strict=True):
            module.masked_key_indices = mask


def _tensors(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values
