"""`align`: which source tokens those of a target were read from, where the bundle says it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tfexport.decode.align import Alignment, need_alignment
from tfexport.errors import ConfigError
from tfexport.model.model import Model
from tfexport.serve.http.body import read_object
from tfexport.serve.http.errors import RequestError
from tfexport.serve.http.service import VERSION, service_of
from tfexport.serve.protocol.asking import Source, ids, source_of, text

_KEYS = {"text_input", "input_ids", "target_text", "target_ids"}


async def align(request: Request) -> Response:
    """Answer a pair of source and target."""
    service = service_of(request)
    name = service.name(request)
    with service.counted(name):
        data = await read_object(request)
        source, target = _pair(data)
        engine = service.started(name)
        _check_alignment(engine.model)
    found = await engine.align(source, target, timeout_s=service.config.max_timeout_s)
    # Off the event loop: to write many weights takes its time.
    return Response(await asyncio.to_thread(_written, found, name), media_type="application/json")


def _pair(data: dict[str, Any]) -> tuple[Source, Source]:
    """Return source and target, each as a text or as token ids.

    Raises:
        RequestError: they are no pair.
    """
    if unknown := [key for key in data if key not in _KEYS]:
        raise RequestError(400, f"unknown key {unknown[0][:80]}, expected {', '.join(sorted(_KEYS))}")
    if ("target_text" in data) == ("target_ids" in data):
        raise RequestError(400, "expected one of target_text and target_ids")
    if "input_ids" in data and "target_text" in data:
        raise RequestError(400, "input_ids is given with target_text, expected with target_ids")
    source = source_of(data)
    if "target_text" in data:
        return source, text(data["target_text"], "target_text")
    return source, ids(data["target_ids"], "target_ids")


def _check_alignment(model: Model) -> None:
    """Refuse a bundle that gives no alignment."""
    try:
        need_alignment(model.session)
    except ConfigError as error:
        raise RequestError(404, str(error)) from error


def _written(found: Alignment, name: str) -> bytes:
    answer = {
        "model_name": name,
        "model_version": VERSION,
        "source_ids": found.source_ids,
        "target_ids": found.target_ids,
        "source_tokens": found.source_tokens,
        "target_tokens": found.target_tokens,
        "source_positions": found.source_positions,
        "weights": found.weights.tolist(),
    }
    return json.dumps(answer, ensure_ascii=False).encode()


ROUTES = [
    Route(f"/v2/models/{{name}}{version}/align", align, methods=["POST"]) for version in ("", "/versions/{version}")
]
