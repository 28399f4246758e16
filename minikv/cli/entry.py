"""Entry point of the `minikv` command: as little as possible before Ctrl-C is handled."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; an interrupt while modules load ends it like any other."""
    try:
        from minikv.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
