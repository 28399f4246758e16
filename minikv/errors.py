"""Errors a user can meet. Each message is one sentence that names the fault and the fix."""


class MinikvError(Exception):
    """Base of every error that is the user's to mend; the command line prints it and exits 1."""


class ConfigError(MinikvError, ValueError):
    """An option or parameter has a value that cannot be used."""


class ModelError(MinikvError):
    """A model cannot be found, fetched, read or supported."""


class TemplateError(MinikvError):
    """A chat template refused the conversation or is itself broken."""


class RequestError(MinikvError):
    """A request cannot be served (too long, too large for the pool, malformed)."""


class SessionError(MinikvError):
    """A conversation file cannot be read or written."""
