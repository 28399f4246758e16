"""`minikv pull`: fetch a model into the model cache."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from minikv.cli import console
from minikv.cli.options import SOURCE, takes


@takes(source=SOURCE)
@console.guarded
def pull(
    name: Annotated[str, typer.Argument(help="Hub id or built-in name.")], *, source: dict[str, Any]
) -> None:
    """Fetch a model, unless it is in the model cache already, and print where it lies."""
    from minikv.models.sources import resolve_model

    files = resolve_model(name, progress=console.stderr_is_terminal(), **source)
    console.write_text(f"{files.path}\n")
