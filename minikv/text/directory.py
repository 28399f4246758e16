"""Read a tokenizer from a Hugging Face model directory.

The vocabulary is in `tokenizer.json`; roles of special tokens, the BOS rule and the chat template
are spread over up to four other files, of which older and newer models use different ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from minikv.errors import ModelError

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerParts:
    """What a directory says about its tokenizer; `chat_templates` maps names to Jinja sources."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    add_bos: bool
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


def read_tokenizer_directory(path: str | PathLike[str]) -> TokenizerParts:
    """Read everything the tokenizer needs. Raises ModelError naming the file at fault."""
    folder = Path(path)
    backend = _read_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        _add_listed_tokens(backend, listed, folder / "tokenizer_config.json")
    # The separate map is the older place: what tokenizer_config.json says wins.
    sources = _read_json(folder / "special_tokens_map.json") | config
    special = {role: text for role in _ROLES if (text := _token_text(sources.get(role))) is not None}
    _mark_special(backend, special)
    bos = _token_id(backend, special.get("bos_token"))
    return TokenizerParts(
        backend=backend,
        bos_token_id=bos,
        eos_token_id=_token_id(backend, special.get("eos_token")),
        add_bos=bos is not None and _adds_bos(backend, bos),
        special_tokens=special,
        chat_templates=_read_templates(folder, config.get("chat_template")),
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}.") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in an optional file; an absent file is an empty one."""
    if not file.exists():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(value).__name__}.")
    return value


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(f"{folder} has no tokenizer.json, which minikv needs to turn text into tokens.")
    text = _read_text(file)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ModelError(f"{file} is not a usable tokenizer: {' '.join(str(error).split())}.") from error


def _token_text(value: Any) -> str | None:
    """A special token is stored as its text, or as an object that holds it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _token_id(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _add_listed_tokens(backend: tokenizers.Tokenizer, listed: Mapping[str, Any], file: Path) -> None:
    """Add tokens that tokenizer_config.json lists but tokenizer.json lacks, at the ids it gives."""
    known = backend.get_added_tokens_decoder()
    try:
        entries = sorted((int(token_id), dict(entry)) for token_id, entry in listed.items())
    except (TypeError, ValueError) as error:
        raise ModelError(f"{file} has an added_tokens_decoder that is not a map of ids to tokens.") from error
    for token_id, entry in entries:
        text = _token_text(entry)
        if text is None or token_id in known:
            continue
        flags = {
            key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry
        }
        token = tokenizers.AddedToken(text, special=bool(entry.get("special")), **flags)
        add = backend.add_special_tokens if token.special else backend.add_tokens
        add([token])
        if backend.token_to_id(text) != token_id:
            raise ModelError(
                f"{file} gives the token {text!r} the id {token_id}, which does not follow the vocabulary "
                f"of tokenizer.json."
            )


def _mark_special(backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> None:
    """Make tokens with a role control tokens, so that decoding leaves them out."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in dict.fromkeys(special.values()):
        # A role whose token is not in the vocabulary would get a new id that no embedding row has.
        if text not in marked and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _adds_bos(backend: tokenizers.Tokenizer, bos: int) -> bool:
    """What the post-processor of tokenizer.json does. It is the rule even where `add_bos_token` of
    tokenizer_config.json says otherwise: that entry was for tokenizers without such a file."""
    return backend.encode("", add_special_tokens=True).ids[:1] == [bos]


def _read_templates(folder: Path, configured: Any) -> dict[str, str]:
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        for entry in configured:
            if not (isinstance(entry, Mapping) and {"name", "template"} <= entry.keys()):
                raise ModelError(
                    f"{folder / 'tokenizer_config.json'} has a chat_template entry without a name."
                )
            templates[str(entry["name"])] = str(entry["template"])
    elif isinstance(configured, Mapping):
        templates.update((str(name), str(source)) for name, source in configured.items())
    # Newer models keep templates in files of their own, which take precedence.
    own = folder / "chat_template.jinja"
    if own.exists():
        templates["default"] = _read_text(own)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates
