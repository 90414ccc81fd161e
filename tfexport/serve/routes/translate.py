"""Serve `/translate`, as in the LibreTranslate API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tfexport.errors import shortened
from tfexport.serve._schemas import TranslateRequest
from tfexport.serve.http import RequestError, Service, answered, service_of
from tfexport.serve.inference import arguments, submit_all


async def translate(request: Request, data: TranslateRequest) -> Response:
    """Translate one or more texts, with alternatives."""
    service, is_one = service_of(request), isinstance(data.q, str)
    name, texts = _model(service, data), [data.q] if isinstance(data.q, str) else data.q
    with service.counted(name):
        service.check_number("texts", len(texts))
        several = {"num_beams": data.alternatives + 1, "num_return_sequences": data.alternatives + 1}
        given = arguments(several if data.alternatives else {}, service.config.max_timeout_s)
    asked = submit_all(service.started(name), texts, [given] * len(texts))
    found = [[answer.text for answer in each] for each in await answered(request, asked)]
    best, others = [one[0] for one in found], [one[1:] for one in found]
    answer: dict[str, Any] = {"translatedText": best[0] if is_one else best}
    if data.alternatives:
        answer["alternatives"] = others[0] if is_one else others
    return JSONResponse(answer)


def _model(service: Service, data: TranslateRequest) -> str:
    name = f"{data.source}-{data.target}"
    if name in service.engines or len(service.engines) == 1:
        return name if name in service.engines else next(iter(service.engines))
    raise RequestError(400, f"there is no model {shortened(name)}; /v2 lists the models")


def add_routes(app: FastAPI) -> None:
    """Add the endpoint."""
    app.add_api_route("/translate", translate, methods=["POST"])
