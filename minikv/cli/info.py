"""`minikv info`: what a model is and what its KV cache costs, without reading its weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minikv.cli import console
from minikv.cli.options import SOURCE, takes
from minikv.config import KV_DTYPES, format_size

if TYPE_CHECKING:
    from minikv.models.config import RopeConfig
    from minikv.models.sources import ModelFiles, OpenModel


@takes(source=SOURCE)
@console.guarded
def info(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, Hub id or built-in name.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    source: dict[str, Any],
) -> None:
    """Describe a model: architecture, size, context, KV bytes, template."""
    from minikv.models.sources import open_model, resolve_model

    files = resolve_model(model, progress=console.stderr_is_terminal(), **source)
    opened = open_model(files)
    try:
        facts = _facts(files, opened)
    finally:
        opened.weights.close()
    if as_json:
        console.write_text(json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
    else:
        console.write_text(_table(facts, opened.config.rope))


def _facts(files: ModelFiles, opened: OpenModel) -> dict[str, Any]:
    import torch

    from minikv.kernels.backend import BACKENDS

    config, tokenizer = opened.config, opened.tokenizer
    per_token = {
        "float32": config.kv_bytes_per_token(torch.float32),
        "16_bit": config.kv_bytes_per_token(torch.float16),
    }
    return {
        "name": opened.name,
        "file": str(files.path),
        "kind": files.kind,
        "architecture": config.architecture,
        "parameters": config.num_parameters(),
        "weights": config.dtype,
        "tied_embeddings": config.tied_embeddings,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "query_heads": config.num_query_heads,
        "kv_heads": config.num_kv_heads,
        "group_size": config.group_size,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_context": config.max_context,
        "rope": {"kind": config.rope.kind, "theta": config.rope.theta, "factor": config.rope.factor},
        "kv_bytes_per_token": per_token,
        "kv_bytes_full_context": {name: size * config.max_context for name, size in per_token.items()},
        "chat_template": tokenizer.has_chat_template,
        "backends": list(BACKENDS),
        "kv_dtypes": [name for name in KV_DTYPES if name != "auto"],
        "eos_tokens": [{"id": i, "text": tokenizer.token_text(i)} for i in tokenizer.eos_token_ids],
    }


def _table(facts: dict[str, Any], rope: RopeConfig) -> str:
    per_token, full = facts["kv_bytes_per_token"], facts["kv_bytes_full_context"]
    tied = ", embeddings tied" if facts["tied_embeddings"] else ""
    scaling = f", {rope.kind}" + (f" x {rope.factor:g}" if rope.factor != 1 else "")
    rows = {
        "model": facts["name"],
        "file": f"{facts['file']} ({facts['kind']})",
        "architecture": facts["architecture"],
        "parameters": f"{facts['parameters'] / 1e6:,.1f} M, {facts['weights']}{tied}",
        "layers": f"{facts['layers']}, hidden size {facts['hidden_size']:,}",
        "heads": f"{facts['query_heads']} query, {facts['kv_heads']} KV (groups of {facts['group_size']}), "
        f"{facts['head_dim']} wide",
        "vocabulary": f"{facts['vocab_size']:,} tokens",
        "context": f"{facts['max_context']:,} tokens",
        "RoPE": f"theta {rope.theta:,.0f}{scaling}",
        "KV per token": f"{format_size(per_token['float32'])} in float32, "
        f"{format_size(per_token['16_bit'])} in 16 bit",
        "KV in full": f"{format_size(full['float32'])} in float32, {format_size(full['16_bit'])} in 16 bit",
        "chat template": "yes" if facts["chat_template"] else "no",
        "end tokens": ", ".join(f"{token['text']} ({token['id']})" for token in facts["eos_tokens"]),
        "runs with": f"backend {' or '.join(facts['backends'])}; KV cache in {', '.join(facts['kv_dtypes'])}",
    }
    return "".join(f"{name:15}{value}\n" for name, value in rows.items())
