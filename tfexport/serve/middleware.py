"""Require bearer tokens with ASGI middleware."""

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
from tfexport.serve.routes import ui

logger = logging.getLogger(__name__)
# Probes and the files of the page need no token; these paths reveal nothing about models or texts.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"}) | ui.PATHS
MIN_CHARACTERS = 16
# The syntax of RFC 6750.
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_CHARACTERS},}}=*")


class BearerTokens:
    """Require one of the bearer tokens of a file, which has one per line."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app, self._path = app, path
        self.reload()

    def reload(self) -> None:
        """Read the file again; if that raises `ConfigError`, keep the old tokens."""
        path = self._path
        try:
            lines = path.read_text(encoding="ascii").split()
            mode = stat.S_IMODE(path.stat().st_mode)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigError(f"token file {path}: cannot be read: {reason}") from error
        wrong = [number for number, line in enumerate(lines, 1) if not _TOKEN.fullmatch(line)]
        if wrong or not lines:
            problem = f"token {wrong[0]} is not valid" if wrong else "it has no token"
            expected = f"{MIN_CHARACTERS} or more letters, digits and -._~+/ on each line"
            raise ConfigError(f"token file {path}: {problem}, expected {expected}; make one with openssl rand -hex 32")
        if mode & 0o077:
            logger.warning("token file %s can be read by others (mode %o); chmod 600 %s", path, mode, path)
        self._tokens = [line.encode() for line in lines]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, or answer 401 if the token is missing or unknown."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in OPEN_PATHS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "the bearer token is missing or unknown; send Authorization: Bearer TOKEN"
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        await JSONResponse({"error": message}, 401, headers)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        # A list, so that the time does not depend on which token matches.
        matches = [hmac.compare_digest(sent.strip().encode(), token) for token in self._tokens]
        return scheme.lower() == "bearer" and any(matches)
