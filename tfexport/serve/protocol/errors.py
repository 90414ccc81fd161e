"""What is wrong with a request."""

from __future__ import annotations

from tfexport.errors import InputError


class InvalidRequestError(InputError):
    """A request that is refused before an engine sees it."""
