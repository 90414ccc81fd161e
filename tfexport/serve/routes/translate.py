"""Serve `/translate`, as in the LibreTranslate API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tfexport.errors import shortened
from tfexport.serve._schemas import TranslateRequest
from tfexport.serve.http import RequestError, answers_of, service_of
from tfexport.serve.inference import arguments, submit_all


async def translate(request: Request, data: TranslateRequest) -> Response:
    """Translate one or more texts, with alternatives."""
    service, is_one = service_of(request), isinstance(data.q, str)
    name, texts = f"{data.source}-{data.target}", [data.q] if isinstance(data.q, str) else data.q
    if len(service.engines) == 1:
        name = service.model_name(None)
    elif name not in service.engines:
        raise RequestError(400, f"model {shortened(name)} does not exist; /v2 lists the models")
    with service.count_refusals(name):
        service.check_number("texts", len(texts))
        beams: dict[str, Any] = {"num_beams": data.alternatives + 1, "num_return_sequences": data.alternatives + 1}
        decoding = (beams if data.alternatives else {}) | {"return_scores": False}
        options = arguments(decoding, service.config.max_timeout_s)
    generations = submit_all(service.loaded_engine(name), texts, [options] * len(texts))
    answers = [[answer.text for answer in each] for each in await answers_of(request, generations)]
    best, others = [each[0] for each in answers], [each[1:] for each in answers]
    body: dict[str, Any] = {"translatedText": best[0] if is_one else best}
    if data.alternatives:
        body["alternatives"] = others[0] if is_one else others
    return JSONResponse(body)


def add_routes(app: FastAPI) -> None:
    """Add the endpoint."""
    app.add_api_route("/translate", translate, methods=["POST"])
