"""RoPE settings of config.json, in any of the shapes that checkpoints carry, as a RopeConfig.

Old: `rope_theta` and `rope_scaling` with `type` or `rope_type`. New: `rope_parameters`, flat or
one entry per layer type. Where both exist, `rope_scaling` wins, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from minikv.errors import ModelError
from minikv.models.config import RopeConfig, RopeKind
from minikv.models.fields import Fields, shorten

_KINDS: dict[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
}
_SUPPORTED = ", ".join(_KINDS)
_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_from_config(fields: Fields, max_positions: int) -> RopeConfig:
    """The RopeConfig of a config.json whose `max_position_embeddings` is `max_positions`.

    Raises ModelError for a RoPE type or parameter that is not supported.
    """
    source, values = _rope_values(fields)
    scaling = Fields(values, f"{fields.origin}, {source}," if source else fields.origin)
    kind = _kind(scaling)
    for settings in (scaling, fields):
        partial = settings.get("partial_rotary_factor")
        if partial is not None and partial != 1:
            settings.refuse("partial_rotary_factor", "but only full rotary embeddings (1.0) are supported")
    theta = scaling.optional_number("rope_theta", above=1.0) or fields.number(
        "rope_theta", 10000.0, above=1.0
    )
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=_factor(scaling))
    if kind == "dynamic":
        return RopeConfig("dynamic", theta, factor=_factor(scaling), original_context=max_positions)
    holder = fields if fields.get("original_max_position_embeddings") is not None else scaling
    original = holder.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return _llama3(scaling, theta, original)
    return _yarn(scaling, theta, original, max_positions)


def _rope_values(fields: Fields) -> tuple[str, Mapping[str, Any]]:
    """The settings in force, and the key of config.json that they stand under."""
    for source in ("rope_scaling", "rope_parameters"):
        values = fields.get(source)
        if values is None or values == {}:
            continue
        if not isinstance(values, Mapping):
            fields.refuse(source, "which must be an object")
        if any(key in values for key in _LAYER_TYPES):
            return source, _merge_layer_types(fields, source, values)
        return source, values
    return "", {}


def _merge_layer_types(fields: Fields, source: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one RoPE of a per-layer-type object: all layers must share it."""
    entries = [entry for key, entry in values.items() if key in _LAYER_TYPES and entry is not None]
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        fields.refuse(source, "which must hold an object for each layer type")
    if any(entry != entries[0] for entry in entries):
        fields.refuse(source, "but a different RoPE per layer type is not supported")
    return entries[0]


def _kind(scaling: Fields) -> RopeKind:
    if scaling.get("mrope_section") is not None:
        scaling.refuse("mrope_section", "but multimodal RoPE (mrope) is not supported")
    named = {key: scaling.get(key) for key in ("rope_type", "type") if scaling.get(key) is not None}
    for key, value in named.items():
        if not isinstance(value, str) or value not in _KINDS:
            scaling.refuse(key, f"which is not a supported RoPE type ({_SUPPORTED})")
    if len(set(named.values())) > 1:
        scaling.refuse("rope_type", f"which contradicts type = {shorten(scaling.get('type'))}")
    return _KINDS[next(iter(named.values()), "default")]


def _factor(scaling: Fields) -> float:
    factor = scaling.number("factor")
    if factor < 1.0:
        scaling.refuse("factor", "which must be at least 1")
    return factor


def _llama3(scaling: Fields, theta: float, original: int) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        scaling.refuse("high_freq_factor", f"which must be above low_freq_factor = {low:g}")
    return RopeConfig(
        "llama3",
        theta,
        factor=_factor(scaling),
        original_context=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    # A null factor means the ratio of the two context lengths.
    has_factor = scaling.get("factor") is not None
    factor = _factor(scaling) if has_factor else max(1.0, max_positions / original)
    beta_fast, beta_slow = _or_default(scaling, "beta_fast", 32.0), _or_default(scaling, "beta_slow", 1.0)
    if beta_fast < beta_slow:
        _contradiction(scaling, beta_fast, beta_slow)
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_context=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=scaling.optional_number("attention_factor"),
        mscale=_or_default(scaling, "mscale", 0.0) or None,
        mscale_all_dim=_or_default(scaling, "mscale_all_dim", 0.0) or None,
        truncate=scaling.flag("truncate", True),
    )


def _or_default(scaling: Fields, key: str, default: float) -> float:
    """A positive number; zero means unset, as it does in transformers."""
    return default if scaling.get(key) == 0 else scaling.number(key, default)


def _contradiction(scaling: Fields, beta_fast: float, beta_slow: float) -> NoReturn:
    raise ModelError(
        f"{scaling.origin} has beta_fast = {beta_fast:g}, which must not be below beta_slow = {beta_slow:g}."
    )
