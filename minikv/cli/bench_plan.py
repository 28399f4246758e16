"""What `minikv bench` is asked to measure, and what of it a loaded model leaves room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minikv.config import format_size
from minikv.errors import ConfigError, shown

if TYPE_CHECKING:
    from minikv import LLM

WARM_UP = 2  # decode steps before the timed ones
_STEPS = 16  # timed decode steps per repeat
# The last entry of each is the most that is accepted.
_LIMITS = {"contexts": (8, 1 << 24), "batch_sizes": (1, 128), "prompt_lengths": (1, 1 << 24)}
_MOST_REPEATS = 1000


@dataclass(frozen=True)
class BenchPlan:
    """contexts: tokens in the cache of each sequence when the last timed step ends.
    batch_sizes: sequences that decode together. prompt_lengths: tokens of the prompts to prefill.
    repeat: prefills per prompt length, and groups of 16 decode steps per context.
    """

    contexts: tuple[int, ...] = (128, 2048, 8192)
    batch_sizes: tuple[int, ...] = (1, 8)
    prompt_lengths: tuple[int, ...] = (512, 2048)
    repeat: int = 3

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            wrong = [value for value in getattr(self, name) if not least <= value <= most]
            if wrong:
                raise ConfigError(
                    f"{name} must be whole numbers from {least} to {most}, not {shown(wrong[0])}."
                )
        if not 1 <= self.repeat <= _MOST_REPEATS:
            raise ConfigError(
                f"repeat must be a whole number from 1 to {_MOST_REPEATS}, not {shown(self.repeat)}."
            )

    @property
    def decode_points(self) -> list[tuple[int, int]]:
        """(context, batch size) of every decode measurement, the smallest memory first."""
        return [(c, b) for b in sorted(set(self.batch_sizes)) for c in sorted(set(self.contexts))]

    def steps_at(self, context: int) -> int:
        """Timed steps that end with `context` tokens; at most half of them, so that the name fits."""
        return min(_STEPS * self.repeat, context // 2 - WARM_UP)


def obstacle(llm: LLM, tokens: int, batch_size: int = 1) -> str | None:
    """Why `batch_size` sequences of `tokens` tokens do not fit, as a clause; None if they do."""
    if tokens > llm.max_context:
        return f"the context is {llm.max_context:,} tokens"
    most = llm.engine.config.max_seqs
    if batch_size > most:
        return f"max_seqs is {most}"
    needed = batch_size * llm.full_kv_bytes(tokens)
    if needed > llm.pool_bytes:
        return f"that needs {format_size(needed)} of KV cache and the pool has {format_size(llm.pool_bytes)}"
    return None
