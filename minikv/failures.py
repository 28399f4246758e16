"""What is said of requests that cannot run, or that fail in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minikv.errors import MinikvError
from minikv.kernels.backend import CPU
from minikv.memory import is_shortage, shortage

NO_ROOM_BELOW = (
    "The tiers below the KV pool have no room for a prompt that the pool cannot hold; raise --kv-warm or "
    "--kv-cold."
)
LESS_MEMORY = "lower kv_hot, max_seqs or prefill_chunk"


def fault_of(token_ids: Sequence[int], vocab: int, max_context: int) -> str | None:
    """Why a prompt can never run, or None."""
    count = len(token_ids)
    if not count:
        return "The prompt is empty; give it at least one token."
    bad = next((t for t in token_ids if not 0 <= t < vocab), None)
    if bad is not None:
        return f"Token id {bad} is outside the model's vocabulary of {vocab}."
    if count > max_context:
        return (
            f"The prompt has {count} tokens and the context is {max_context}; "
            "shorten the prompt or raise max_context if the model allows."
        )
    return None


def describe(error: BaseException, device: torch.device) -> str:
    """What went wrong in a step on a device, in a sentence."""
    if isinstance(error, MinikvError):
        return str(error)
    if is_shortage(error):
        of_host = device.type == "cpu" or isinstance(error, MemoryError)
        where = CPU if of_host else device
        owner = "machine" if of_host else "device"
        return f"The {owner} ran out of memory in a step{shortage(error, where)}; {LESS_MEMORY}."
    detail = (str(error).splitlines() or ["no message"])[0]
    return f"The step failed: {type(error).__name__}: {detail}"
