"""Log lines that are said once."""

from __future__ import annotations

import logging


class Once:
    """Logs each message the first time it is given. An engine has one of its own."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, logger: logging.Logger, level: int, message: str, *args: object) -> None:
        """Log a message, whose `args` do not count, unless it was logged before."""
        if message not in self._said:
            self._said.add(message)
            logger.log(level, message, *args)
