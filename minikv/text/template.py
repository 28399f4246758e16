"""Chat templates: a conversation to the text the model was trained on.

A template is a program from the model's author, so it runs in Jinja's sandbox on plain data. The
environment is the one that templates are written for: the settings, filters and functions that
Hugging Face's renderer gives them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minikv.errors import TemplateError
from minikv.text.messages import normalise_messages, plain_data

_RESERVED = ("messages", "raise_exception", "strftime_now")
_COMPARED_WORD = re.compile(r"""[=!]=\s*["']([A-Za-z_]+)["']""")


class ChatTemplate:
    """One Jinja chat template, compiled at its first use so that a broken one harms only chat."""

    def __init__(self, source: str) -> None:
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
        /,
        **variables: Any,
    ) -> str:
        """The conversation as text, ending with the assistant's header if so asked.

        `variables` are the template's own switches and data (`tools`, `documents`,
        `enable_thinking`, ...). Raises RequestError for malformed messages and TemplateError, with
        the template's own words, when the template refuses them or fails.
        """
        for name in _RESERVED:
            if name in variables:
                raise TemplateError(f"The chat template argument {name!r} is reserved and cannot be set.")
        # A role that the template itself compares with is one it knows how to render.
        plain = normalise_messages(messages, _COMPARED_WORD.findall(self.source))
        data: dict[str, Any] = {"tools": None, "documents": None, **special_tokens}
        data.update((name, plain_data(value, name)) for name, value in variables.items())
        compiled = self._compiled
        try:
            return compiled.render(messages=plain, add_generation_prompt=bool(add_generation_prompt), **data)
        except _RefusedError as error:
            raise TemplateError(f"The chat template refused the conversation: {_sentence(error)}") from error
        except Exception as error:  # foreign code: any error is the template's, none is ours
            raise TemplateError(f"The chat template failed: {_sentence(error)}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            detail = _sentence(f"{error.message} (line {error.lineno})")
            raise TemplateError(f"The chat template has a syntax error: {detail}") from error
        except RecursionError as error:
            raise TemplateError("The chat template is nested too deeply to compile.") from error


class _RefusedError(jinja2.TemplateError):
    """Raised on behalf of a template that calls `raise_exception`."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and non-ASCII text, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _sentence(error: object) -> str:
    """One line that ends in a full stop, whatever the template's author wrote."""
    text = " ".join(str(error).split())
    if isinstance(error, Exception) and not isinstance(error, jinja2.TemplateError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."
