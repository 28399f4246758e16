"""What a session belongs to: a model with its tokenizer and template, and the type of its KV entries."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from minikv.calibration.profile import template_hash, tokenizer_hash
from minikv.errors import shown
from minikv.sessions.container import Unusable

if TYPE_CHECKING:
    from minikv.llm import LLM


def identity_of(llm: LLM) -> dict[str, str]:
    """All that must be the same where a session is loaded. The fingerprint covers weights and configuration,
    RoPE among it; that has a hash of its own to be named by. Hashes the whole vocabulary."""
    return {
        "fingerprint": llm.fingerprint,
        "rope": hashlib.sha256(repr(llm.config.rope).encode()).hexdigest(),
        "tokenizer_hash": tokenizer_hash(llm.tokenizer),
        "template_hash": template_hash(llm.tokenizer),
        "kv_dtype": llm.kv_dtype,
    }


def check_identity(found: Mapping[str, str], llm: LLM) -> None:
    """Unusable, naming what differs, unless a session that says `found` of itself is of this model."""
    name = shown(found.get("model", "?"))
    differs = {key for key, value in llm.session_identity.items() if found.get(key) != value}
    if "fingerprint" in differs:
        of = "with another RoPE" if "rope" in differs and found.get("model") == llm.name else "than this one"
        raise Unusable(f"was held with {name}, another model {of}; load it with that model")
    for key, what in (("tokenizer_hash", "tokenizer"), ("template_hash", "chat template")):
        if key in differs:
            raise Unusable(f"was held with another {what} of {name}; load it with that one")
    if "kv_dtype" in differs:
        dtype = shown(found.get("kv_dtype", "?")).strip("'")
        raise Unusable(
            f"holds KV entries of type {dtype}, and those of this model are {llm.kv_dtype}; "
            f"load the model with kv_dtype {dtype}"
        )
