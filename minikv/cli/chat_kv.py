"""`/kv` of the chat: what the conversation's KV cache holds, from where, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minikv.cli import console
from minikv.cli.cache_picture import map_lines, policy_line, sizes_line
from minikv.cli.chat_state import ChatState
from minikv.cli.tier_lines import tier_lines
from minikv.config import format_size
from minikv.errors import ConfigError, shown

if TYPE_CHECKING:
    from torch import Tensor

    from minikv import ChatSession

_MOST_HEADS_LISTED = 4


def describe(state: ChatState, layer: str) -> None:
    """Bytes now against the full cache, those demoted, policy and entries; with a policy, a map of what is
    held.

    `layer` "" shows a row for every layer, else one for every KV head of that layer. Raises ConfigError
    unless it is a layer.
    """
    session = state.session
    for line in tier_lines(state.llm):
        state.say(line)
    lengths: list[list[int]] = session.kv_entries.tolist()
    chosen = _layer(layer, len(lengths)) if layer else None
    if session.num_tokens == 0:
        state.say("The KV cache of this conversation is empty.")
        return
    wholly_below = not session.kv_bytes
    if not wholly_below:
        state.say(sizes_line(state.llm, session.num_tokens, session.kv_bytes))
    if session.demoted_bytes:
        state.say(_demoted_line(session, wholly_below))
    compresses = session.cache.policy != "full"
    if compresses:
        state.say(policy_line(session.cache))
    if wholly_below:
        return
    if chosen is not None:
        _show_map(
            f"layer {chosen}, KV head and entries",
            [f"{head:>4}  {count:,}" for head, count in enumerate(lengths[chosen])],
            session.kv_map()[chosen][:, None],
        )
    elif compresses:
        _show_map(
            "layer and entries of its heads",
            [f"{index:>5}  {_counts(row)}" for index, row in enumerate(lengths)],
            session.kv_map(),
        )
    else:
        for line in _equal_layers(lengths):
            state.say(line)


def _demoted_line(session: ChatSession, wholly: bool) -> str:
    size = format_size(session.demoted_bytes)
    if wholly:
        return f"All {session.num_tokens:,} tokens are demoted: {size} in the tiers below the KV pool."
    return f"Demoted: {size} in the tiers below the KV pool."


def _layer(text: str, count: int) -> int:
    if text not in map(str, range(count)):
        raise ConfigError(f"/kv takes the number of a layer from 0 to {count - 1}, not {shown(text)}.")
    return int(text)


def _counts(lengths: Sequence[int]) -> str:
    if len(lengths) <= _MOST_HEADS_LISTED:
        return " ".join(f"{count:,}" for count in lengths)
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _equal_layers(lengths: list[list[int]]) -> list[str]:
    """A line for every run of layers whose lanes are alike."""
    lines = []
    first = 0
    for layer in range(1, len(lengths) + 1):
        if layer == len(lengths) or lengths[layer] != lengths[first]:
            lines.append(_layer_line(first, layer - 1, lengths[first]))
            first = layer
    return lines


def _layer_line(first: int, last: int, lengths: Sequence[int]) -> str:
    layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    if len(set(lengths)) == 1:
        return f"{layers}: {lengths[0]:,} entries in each of {len(lengths)} lanes"
    return f"{layers}: {', '.join(f'{n:,}' for n in lengths)} entries in {len(lengths)} lanes"


def _show_map(title: str, labels: list[str], held: Tensor) -> None:
    screen = console.error_console()
    for line in map_lines(screen, title, labels, held):
        screen.print(line)
