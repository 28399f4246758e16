"""Models by Hub id, through huggingface_hub and its cache."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from minikv.errors import ModelError

# Only what a text model is loaded from: no other weight formats, no code.
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*$")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form organisation/model."""
    return bool(_HUB_ID.match(name)) and ".." not in name and "--" not in name


def fetch_from_hub(name: str, *, revision: str | None, offline: bool, progress: bool) -> Path:
    """The local snapshot of a Hub model; downloads what is missing unless `offline`.

    Raises ModelError with the fix when the model or revision does not exist, is gated, or cannot
    be reached.
    """
    from huggingface_hub import snapshot_download

    shown = progress and sys.stderr.isatty()
    try:
        path = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(FILES),
            local_files_only=offline,
            tqdm_class=None if shown else _silent_bar(),
        )
    except Exception as error:
        # Whatever fails in there (HTTP client, proxy, disk, cache), the user's answer is one sentence.
        raise ModelError(_reason(name, revision, offline, error)) from error
    return Path(path)


def _silent_bar() -> type[Any]:
    from huggingface_hub.utils import tqdm

    class SilentBar(tqdm):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})

    return SilentBar


def _reason(name: str, revision: str | None, offline: bool, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated; accept its terms on its Hub page, then run `hf auth login` and try again."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{name} is not on the Hub or is private; check the spelling or run `hf auth login`."
    if isinstance(error, errors.RevisionNotFoundError):
        return f'{name} has no revision "{revision}" on the Hub; check the branch, tag or commit.'
    if isinstance(error, errors.LocalEntryNotFoundError):
        which = f' at revision "{revision}"' if revision else ""
        if offline:
            return f"{name}{which} is not wholly in the Hub cache; run it once without --offline to fetch it."
        return f"{name}{which} is not in the Hub cache and the Hub was not reached; check the network."
    if isinstance(error, OSError) and error.strerror:
        return f"{name} could not be stored in the Hub cache ({error.strerror}); set HF_HOME elsewhere."
    lines = str(error).splitlines() or [""]
    return f"{name} could not be fetched from the Hub ({type(error).__name__}: {lines[0].rstrip('.')[:200]})."
