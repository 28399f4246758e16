"""Text to token ids and back, with the model's special tokens, BOS rule and chat template.

Wraps a `tokenizers.Tokenizer`; knows nothing of models, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import tokenizers

from minikv.errors import RequestError, TemplateError
from minikv.text.directory import read_tokenizer_directory
from minikv.text.template import ChatTemplate

_ID_LIMIT = 2**32  # the backend takes unsigned 32-bit ids and overflows on others


class Tokenizer:
    """A model's tokenizer. Immutable after construction and safe to share between requests.

    `eos_token_ids` is the union of every id that ends a turn, first mention first. `chat_template`
    is one Jinja source, or several by name, of which `default` (`tool_use` when tools are given)
    is rendered. `special_tokens` are texts by role (`bos_token`, `eos_token`, ...) for templates.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        add_bos: bool = False,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        # A tokenizer.json may carry the truncation and padding of its training run.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._add_bos = add_bos and bos_token_id is not None
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        sources = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        self._templates = {name: ChatTemplate(source) for name, source in sources.items()}

    @classmethod
    def from_directory(cls, path: str | PathLike[str], extra_eos: Sequence[int] = ()) -> Tokenizer:
        """Read `tokenizer.json` and the files beside it as the Hugging Face layout has them.

        `extra_eos` are ids from config.json and generation_config.json, joined with the
        tokenizer's own. Raises ModelError when a file is missing or cannot be read.
        """
        parts = read_tokenizer_directory(path)
        own_eos = () if parts.eos_token_id is None else (parts.eos_token_id,)
        return cls(
            parts.backend,
            bos_token_id=parts.bos_token_id,
            eos_token_ids=(*own_eos, *extra_eos),
            add_bos=parts.add_bos,
            chat_template=parts.chat_templates,
            special_tokens=parts.special_tokens,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be used."""
        return bool(self._templates)

    @property
    def chat_template_sources(self) -> dict[str, str]:
        """The Jinja source of every chat template by name."""
        return {name: template.source for name, template in self._templates.items()}

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt. BOS comes first if the model wants one, and never twice."""
        ids = self.encode_rendered(text)
        if self._add_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat template: special tokens are parsed and none is added."""
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            # The backend takes only text that is valid Unicode; JSON input may hold half a pair.
            raise RequestError(_unencodable(text)) from error

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`. Ids outside the vocabulary give nothing; invalid UTF-8 gives U+FFFD."""
        known = [token_id for token_id in ids if 0 <= token_id < _ID_LIMIT]
        return self.backend.decode(known, skip_special_tokens=skip_special)

    def vocabulary_entry(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (in its byte or space notation), None if unknown."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < _ID_LIMIT else None

    def token_text(self, token_id: int) -> str:
        """The text of one token as it reads in the middle of a line; "" for an unknown id."""
        if token_id in self._special_ids:
            return self.vocabulary_entry(token_id) or ""
        # Decoders drop the leading space of the first token, so put another one before it.
        pair = self.decode([token_id, token_id], skip_special=False)
        alone = self.decode([token_id], skip_special=False)
        spaced = " " + alone
        return spaced if pair == alone + spaced else alone

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which decoding leaves out."""
        return token_id in self._special_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render a conversation with the model's template; encode it with `encode_rendered`.

        `template_kwargs` reach the template (`enable_thinking`, `tools`, `documents`, ...).
        Raises RequestError for malformed messages, and TemplateError when there is no template or
        it refuses the conversation.
        """
        template = self._select_template(template_kwargs.get("tools") is not None)
        return template.render(messages, add_generation_prompt, self.special_tokens, **template_kwargs)

    def _select_template(self, with_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise TemplateError(
                "This model has no chat template, so give it a raw prompt instead of messages."
            )
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        names = ", ".join(sorted(self._templates))
        raise TemplateError(f'This model has several chat templates ({names}) but none is named "default".')


def _unencodable(text: object) -> str:
    if not isinstance(text, str):
        return f"A prompt must be text, not {type(text).__name__}."
    bad = next((c for c in text if 0xD800 <= ord(c) <= 0xDFFF), "")
    code = f" (U+{ord(bad):04X})" if bad else ""
    return f"The text cannot be encoded because it contains half of a surrogate pair{code}."
