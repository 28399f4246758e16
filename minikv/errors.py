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


def shown(value: object) -> str:
    """`repr` cut to what a sentence can hold, for messages that quote a user's value."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with too many digits, a structure too deep
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= 100 else f"{text[:80]}..."
