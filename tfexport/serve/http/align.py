"""`align`: which source tokens those of a target were read from, where the bundle says it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tfexport.decode.align import Alignment, need_alignment
from tfexport.errors import ConfigError, QueueFull
from tfexport.model import Model
from tfexport.serve.http.asking import ids, source_of, text
from tfexport.serve.http.body import read_object
from tfexport.serve.http.errors import RequestError, unavailable
from tfexport.serve.http.service import VERSION, service_of

_KEYS = {"text_input", "input_ids", "target_text", "target_ids"}
# Alignments that wait for the one that is computed; each is a pass through the model beside the running batches.
MAX_WAITING = 8


class Aligner:
    """Aligns one pair after the other, off the event loop."""

    def __init__(self) -> None:
        """Begin with nothing to do."""
        self._turn, self._num_open = asyncio.Semaphore(1), 0

    async def align(self, request: Request) -> Response:
        """Answer a pair of source and target."""
        service = service_of(request)
        name = service.name(request)
        engine = service.started(name)
        data = await read_object(request)
        if engine.state != "ready":
            raise unavailable(f"model {name} is {engine.state} and aligns nothing")
        _check(engine.model, data)
        if self._num_open > MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} alignments wait, which is the limit; come again later", retry_after_s=1)
        self._num_open += 1
        try:
            async with self._turn:
                body = await asyncio.to_thread(_aligned, engine.model, data, name)
        finally:
            self._num_open -= 1
        return Response(body, media_type="application/json")


def _check(model: Model, data: Mapping[str, Any]) -> None:
    """Refuse what is no pair, and a bundle that gives no alignment."""
    if unknown := [key for key in data if key not in _KEYS]:
        raise RequestError(400, f"unknown key {unknown[0][:80]}, expected {', '.join(sorted(_KEYS))}")
    if ("target_text" in data) == ("target_ids" in data):
        raise RequestError(400, "expected one of target_text and target_ids")
    if "input_ids" in data and "target_text" in data:
        raise RequestError(400, "input_ids is given with target_text, expected with target_ids")
    try:
        need_alignment(model.session)
    except ConfigError as error:
        raise RequestError(404, str(error)) from error


def _aligned(model: Model, data: Mapping[str, Any], name: str) -> bytes:
    """Return the answer; called off the event loop, for writing many weights takes its time too."""
    source = source_of(data)
    if isinstance(source, str) and "target_text" in data:
        (found,) = model.align([source], [text(data["target_text"], "target_text")])
    else:
        if isinstance(source, str) and model.tokenizer is None:
            raise RequestError(400, "this bundle has no tokenizer; send input_ids and target_ids")
        source_ids = model.tokenizer.encode([source])[0] if isinstance(source, str) and model.tokenizer else source
        assert not isinstance(source_ids, str)
        (found,) = model.align_ids([source_ids], [ids(data["target_ids"], "target_ids")])
    return json.dumps({"model_name": name, "model_version": VERSION, **_plain(found)}, ensure_ascii=False).encode()


def _plain(found: Alignment) -> dict[str, Any]:
    return {
        "source_ids": found.source_ids,
        "target_ids": found.target_ids,
        "source_tokens": found.source_tokens,
        "target_tokens": found.target_tokens,
        "source_positions": found.source_positions,
        "weights": found.weights.tolist(),
    }


def routes() -> list[Route]:
    """Return the routes of an app, which aligns one pair at a time."""
    aligner = Aligner()
    return [
        Route(f"/v2/models/{{name}}{version}/align", aligner.align, methods=["POST"])
        for version in ("", "/versions/{version}")
    ]
