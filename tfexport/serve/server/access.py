"""Who may ask: a bearer token in front of the app."""

from __future__ import annotations

import hmac
import logging
import re
import stat
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tfexport.errors import ConfigError
from tfexport.serve.http import page

logger = logging.getLogger(__name__)
# What probes ask, which have no token, and browsers before they have one: it says nothing of models or texts.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"}) | page.PATHS
MIN_CHARACTERS = 16
# Of RFC 6750.
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_CHARACTERS},}}=*")


class BearerTokens:
    """An ASGI app that asks for one of the tokens of a file, and then another app."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        """Read the tokens.

        Args:
            app: behind it.
            path: file with one token a line.

        Raises:
            ConfigError: the file cannot be read, or has no token, or something else.
        """
        self._app, self._path = app, path
        self.reload()

    def reload(self) -> None:
        """Read the file again.

        Raises:
            ConfigError: as at first; then the tokens that were read before go on.
        """
        self._tokens = _read(self._path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse who has no token with 401."""
        if scope["type"] != "http" or _path(scope) in OPEN_PATHS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        refusal = JSONResponse(
            {"error": "a token is missing or wrong; send Authorization: Bearer TOKEN"},
            401,
            {"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await refusal(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        """Compare with every token, in a time that does not depend on what they have in common."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = [hmac.compare_digest(given.strip().encode(), token) for token in self._tokens]
        return scheme.lower() == "bearer" and any(found)


def _path(scope: Scope) -> str:
    """Return the path below the one that the app is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _read(path: Path) -> list[bytes]:
    try:
        lines = path.read_text(encoding="ascii").split()
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise ConfigError(f"token file {path}: cannot be read: {reason}") from error
    wrong = [number for number, line in enumerate(lines, 1) if not _TOKEN.fullmatch(line)]
    if wrong or not lines:
        what = f"token {wrong[0]} is not one" if wrong else "there is no token"
        raise ConfigError(
            f"token file {path}: {what}, expected {MIN_CHARACTERS} or more of letters, digits and -._~+/ on each line; "
            "make one with openssl rand -hex 32"
        )
    if stat.S_IMODE(mode) & 0o077:
        logger.warning("token file %s can be read by others (mode %o); chmod 600 %s", path, stat.S_IMODE(mode), path)
    return [line.encode() for line in lines]
