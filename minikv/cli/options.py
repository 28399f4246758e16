"""Command-line options that several commands share, declared once under the names of the API.

A value not given on the command line is not passed on: defaults live in `SamplingParams`,
`CacheConfig`, `TierConfig` and `LLM` alone. The `default` texts here are for `--help` only, which
must not import torch to print them.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from minikv.cli.compression import cache_config
from minikv.errors import ConfigError, shown

if TYPE_CHECKING:
    from minikv import LLM

Kind = Literal["int", "int_or_none", "float", "text", "flag", "switch", "texts", "ints", "bias", "json_args"]
_METAVARS: dict[str, str] = {
    "int": "N",
    "int_or_none": "N|none",
    "float": "X",
    "text": "TEXT",
    "texts": "TEXT",
    "ints": "ID",
    "bias": "ID=BIAS",
    "json_args": "KEY=VALUE",
}
# What a template gets from the conversation itself.
RESERVED_ARGS = ("self", "messages", "system")
_REPEATED = ("texts", "ints", "bias", "json_args")
_TIERS = ("hot", "warm", "cold", "error", "prefixes", "async_copies")


@dataclass(frozen=True)
class Option:
    """One option, `--name-with-dashes` unless `flag` says otherwise. A `flag` is on when given; a `switch`
    is on, or off with `--no-` before its name, or left as it is."""

    name: str
    kind: Kind
    help: str
    default: str | None = None
    flag: str | None = None
    metavar: str | None = None

    @property
    def spelling(self) -> str:
        """As it is typed on the command line."""
        return self.flag or "--" + self.name.replace("_", "-")


SAMPLING = (
    Option("max_tokens", "int_or_none", "Most tokens to generate; none: to the end of the context.", "256"),
    Option("temperature", "float", "Randomness; 0 always takes the likeliest token.", "0.0"),
    Option("top_k", "int", "Sample from the K likeliest tokens only; 0: off.", "0"),
    Option("top_p", "float", "Sample from the likeliest tokens that make up this probability.", "1.0"),
    Option("min_p", "float", "Drop tokens less likely than this share of the likeliest.", "0.0"),
    Option("repetition_penalty", "float", "Divide the score of tokens seen before; 1: off.", "1.0"),
    Option("presence_penalty", "float", "Subtract from the score of tokens in the output.", "0.0"),
    Option("frequency_penalty", "float", "Subtract per occurrence in the output.", "0.0"),
    Option("logit_bias", "bias", "Add BIAS to a token's score; repeatable."),
    Option("seed", "int_or_none", "Seed for sampling; none: a new one each time.", "none"),
    Option("logprobs", "int_or_none", "Report log probabilities, with the N likeliest beside.", "none"),
    Option("n", "int", "Completions per prompt.", "1", flag="--n"),
    Option("stop", "texts", "End before this text; repeatable."),
    Option("stop_token_ids", "ints", "End at this token; repeatable.", flag="--stop-token-id"),
    Option("ignore_eos", "flag", "Go on past the model's own end tokens."),
)
# A chat turn has one reply and shows text alone.
CHAT_SAMPLING = tuple(option for option in SAMPLING if option.name not in ("n", "logprobs"))

SOURCE = (
    Option("revision", "text", "Branch, tag or commit of a Hub model.", metavar="REV"),
    Option("offline", "flag", "Use what is in the model cache; fetch nothing."),
)
ENGINE = (
    Option(
        "kv_dtype", "text", "KV entries: auto, float32, float16, bfloat16 or int8.", "auto", metavar="TYPE"
    ),
    Option("kv_hot", "text", "Ceiling of the KV cache in memory, such as 64MiB.", metavar="SIZE"),
    Option(
        "kv_warm",
        "text",
        "Memory for what leaves the KV cache, and for beginnings of prompts.",
        metavar="SIZE",
    ),
    Option("kv_cold", "text", "A file for what warm has no room for.", metavar="PATH:SIZE"),
    Option("kv_error", "float", "Relative error that demoted entries may have; 0: exact.", "0.0"),
    Option(
        "kv_prefixes",
        "switch",
        "Keep beginnings of prompts in warm and cold, for others that begin alike.",
        "on",
        flag="--prefix-store",
    ),
    Option(
        "kv_async_copies",
        "switch",
        "On cuda, copy between the KV cache and the warm tier beside the computation.",
        "on",
        flag="--async-copies",
    ),
    Option("max_context", "int", "Tokens a sequence may reach; at most the model's own limit."),
    Option("device", "text", "auto, cpu or cuda.", "auto", metavar="NAME"),
    Option(
        "backend",
        "text",
        "Kernels: auto, cpu, torch, reference, triton or flashinfer.",
        "auto",
        metavar="NAME",
    ),
    Option("weights", "text", "Weights in memory: auto, q4, q8, bf16 or f32.", "auto", metavar="TYPE"),
    Option(
        "dtype",
        "text",
        "Weights and activations on a CUDA device: auto, bf16, fp16 or fp32.",
        "auto",
        metavar="TYPE",
    ),
    Option("threads", "int", "CPU threads."),
    Option(
        "cuda_graphs",
        "switch",
        "On cuda, replay decode steps from graphs of them.",
        "on",
        flag="--cuda-graphs",
    ),
    Option("max_seqs", "int", "Sequences that hold KV at once.", "16"),
    Option("prefill_chunk", "int", "Most prompt tokens of one sequence per step.", "512"),
    Option("max_batch_tokens", "int", "Most tokens per step, all sequences together."),
    *SOURCE,
)
# Names are those of CacheConfig with `kv_` before them; `kv_slack` is `decode_slack`.
COMPRESSION = (
    Option(
        "kv_policy",
        "text",
        "What chooses the KV entries that stay: full, window, snapkv, adakv, expected, compresskv, or "
        "adakv:SCORING; or merges them: gracekv; or brings back what is asked for: sekv.",
        "full",
        metavar="NAME",
    ),
    Option(
        "kv_budget",
        "text",
        "What stays: a fraction of the tokens such as 0.1, entries per lane such as 256, or a size such as "
        "64MiB.",
        metavar="BUDGET",
    ),
    Option("kv_sinks", "int", "First entries that always stay.", "4"),
    Option("kv_recent", "int", "Last entries that always stay.", "16"),
    Option("kv_window", "int", "Last tokens of the prompt whose queries are read.", "16"),
    Option(
        "kv_prefill",
        "text",
        "exact: compress at the end of a prompt; streaming: while it is read, in less memory.",
        "exact",
        metavar="MODE",
    ),
    Option(
        "kv_evicted",
        "text",
        "drop: forget what does not stay; demote: keep it in the warm or cold tier and choose again at the "
        "next turn of a conversation.",
        "drop",
        metavar="MODE",
    ),
    Option("kv_slack", "int", "Entries per lane above the budget at which a reply is compressed too."),
    Option(
        "kv_profile",
        "text",
        "Calibration profile for compresskv; router for sekv, or `none`.",
        metavar="FILE",
    ),
    Option("kv_refit", "switch", "Correct what stays so that it answers as all did before.", flag="--refit"),
)
TEMPLATE = (
    Option(
        "template_args", "json_args", "Argument for the chat template; repeatable.", flag="--template-arg"
    ),
)


def _parameter(option: Option, panel: str) -> inspect.Parameter:
    types: dict[str, Any] = {"int": int | None, "float": float | None, "flag": bool, "switch": bool | None}
    kind: Any = list[str] | None if option.kind in _REPEATED else types.get(option.kind, str | None)
    spelled = option.spelling
    info = typer.Option(
        f"{spelled}/--no-{spelled.removeprefix('--')}" if option.kind == "switch" else spelled,
        help=option.help + (f" Default: {option.default}." if option.default else ""),
        metavar=option.metavar or _METAVARS.get(option.kind),
        show_default=False,
        rich_help_panel=panel,
    )
    default = False if option.kind == "flag" else None
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _collect(options: Sequence[Option], values: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for option in options:
        value = values.pop(option.name)
        if value is None or value == [] or (value is False and option.kind == "flag"):
            continue
        try:
            given[option.name] = _convert(option, value)
        except ConfigError as error:
            raise typer.BadParameter(str(error), param_hint=option.spelling) from None
    return given


def _convert(option: Option, value: Any) -> Any:
    if option.kind == "texts":
        return tuple(value)
    if option.kind in _REPEATED:
        merged: list[Any] = [parse_value(option, item) for item in value]
        return tuple(i for ids in merged for i in ids) if option.kind == "ints" else _merge(merged)
    return parse_value(option, value) if isinstance(value, str) else value


def _merge(mappings: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    return {key: value for mapping in mappings for key, value in mapping.items()}


def takes(**groups: Sequence[Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add groups of options to a command. It gets, per group, a dict of the values that were given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kept = [p.replace(kind=p.KEYWORD_ONLY) for name, p in own.parameters.items() if name not in groups]
        added = [_parameter(o, f"{group} options".capitalize()) for group in groups for o in groups[group]]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {group: _collect(options, values) for group, options in groups.items()}
            command(**values, **given)

        run.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*kept, *added)}
        return run

    return decorate


def parse_value(option: Option, text: str) -> Any:
    """The typed value of an option written as text. Raises ConfigError with one sentence."""
    text = text.strip() if option.kind != "texts" else text
    try:
        return _PARSERS[option.kind](text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{option.name} must be {_EXPECTED[option.kind]}, not {shown(text)}.") from None


def _int_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _flag(text: str) -> bool:
    words = {"on": True, "true": True, "yes": True, "1": True}
    words |= {"off": False, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def _texts(text: str) -> tuple[str, ...]:
    if text.strip().lower() == "none":
        return ()
    if text.lstrip()[:1] not in ("[", '"'):
        return (text,)
    parsed = json.loads(text)
    strings = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(item, str) for item in strings):
        raise ValueError
    return tuple(strings)


def _ints(text: str) -> tuple[int, ...]:
    return () if text.lower() == "none" else tuple(int(part) for part in text.replace(",", " ").split())


def _bias(text: str) -> dict[int, float]:
    pairs = [] if text.lower() == "none" else [part.split("=", 1) for part in text.replace(",", " ").split()]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError
    return {int(token): float(bias) for token, bias in pairs}


def _json_args(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not key.isidentifier() or not equals or key in RESERVED_ARGS:
        raise ValueError
    try:
        return {key: json.loads(value)}
    except ValueError:
        return {key: value}


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "int_or_none": _int_or_none,
    "float": float,
    "text": str,
    "flag": _flag,
    "switch": _flag,
    "texts": _texts,
    "ints": _ints,
    "bias": _bias,
    "json_args": _json_args,
}
_EXPECTED: dict[str, str] = {
    "int": "a whole number",
    "int_or_none": "a whole number or none",
    "float": "a number",
    "flag": "on or off",
    "switch": "on or off",
    "texts": 'text, a JSON string such as "\\n" or a JSON list of strings',
    "ints": "whole numbers separated by commas or blanks",
    "bias": "ID=BIAS pairs separated by blanks",
    "json_args": f"KEY=VALUE with a KEY other than {', '.join(RESERVED_ARGS)}",
}


def load_llm(
    model: str,
    engine: Mapping[str, Any],
    compression: Mapping[str, Any] | None = None,
    *,
    progress: bool = False,
) -> LLM:
    """An LLM with the engine and compression options that were given. Raises the errors of `LLM`."""
    from minikv import LLM, TierConfig

    rest = {name: value for name, value in engine.items() if name != "kv_dtype"}
    tiers = TierConfig(**{name: rest.pop(f"kv_{name}") for name in _TIERS if f"kv_{name}" in rest})
    cache = cache_config(engine, compression or {})
    return LLM(model, cache=cache, tiers=tiers, progress=progress, **rest)
