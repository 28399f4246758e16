"""What a user asks for: prompts, conversations, and jobs of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minikv.config import CacheConfig
from minikv.sampling import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One unit of work for `LLM.run`: a raw prompt or a conversation, how to sample, and which KV entries
    to keep (None: as the LLM was told).

    `key` is the caller's own and comes back with the result.
    """

    key: Any
    prompt: Prompt | None = None
    messages: Sequence[Message] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache: CacheConfig | None = None
