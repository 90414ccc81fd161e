"""What is wrong with a request."""

from __future__ import annotations

from tfexport.errors import InputError

# Characters of a message; what a client has sent may be spelled in it.
MAX_MESSAGE = 1000


class InvalidRequestError(InputError):
    """A request that is refused before an engine sees it."""


def bounded(message: str) -> str:
    """Return what a client is told, cut where it is too long."""
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"
