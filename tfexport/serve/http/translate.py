"""`/translate`, as LibreTranslate has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.errors import shortened
from tfexport.model.result import Result
from tfexport.serve.http.body import check_kind, kind_of, read_body, read_object
from tfexport.serve.http.errors import RequestError
from tfexport.serve.http.leaving import while_heard
from tfexport.serve.http.service import Service, service_of
from tfexport.serve.protocol.asking import submit_all, text
from tfexport.serve.protocol.options import arguments

FORM = "application/x-www-form-urlencoded"
_KEYS = {"q", "source", "target", "format", "alternatives", "api_key"}


async def translate(request: Request) -> Response:
    """Translate a text, or several, with as many alternatives as are asked for."""
    service = service_of(request)
    data = await _read(request)
    name = _model(service, data)
    with service.counted(name):
        texts, options = _asked_for(data, service)
        asked = submit_all(service.started(name), texts, [options] * len(texts))
    async with while_heard(request.receive, *asked):
        found = [[answer.text for answer in await one if isinstance(answer, Result)] for one in asked]
    best, others = [one[0] for one in found], [one[1:] for one in found]
    has_one = isinstance(data["q"], str)
    answer: dict[str, Any] = {"translatedText": best[0] if has_one else best}
    if data.get("alternatives"):
        answer["alternatives"] = others[0] if has_one else others
    return JSONResponse(answer)


async def _read(request: Request) -> dict[str, Any]:
    """Return the fields of a request, in JSON or as a form, as LibreTranslate's own client sends them."""
    check_kind(request, "application/json", FORM)
    if kind_of(request) != FORM:
        return await read_object(request)
    try:
        pairs = parse_qsl((await read_body(request)).decode(), True, True, errors="strict", max_num_fields=len(_KEYS))
    except ValueError as error:
        raise RequestError(400, f"the body is no form: {error}") from error
    data: dict[str, Any] = dict(pairs)
    if len(data) < len(pairs):
        raise RequestError(400, "a field is given twice, expected once")
    number = data.get("alternatives", "")
    return data | ({"alternatives": int(number)} if number.isdecimal() and len(number) < 10 else {})


def _model(service: Service, data: Mapping[str, Any]) -> str:
    """Return the model of the name source-target, or the only one, whose languages we do not know."""
    source, target = (text(data.get(name), name) for name in ("source", "target"))
    name = f"{source}-{target}"
    if name not in service.engines and len(service.engines) > 1:
        raise RequestError(400, f"no model {shortened(name)}; serve the bundle under this name")
    return service.chosen(name if name in service.engines else None)


def _asked_for(data: Mapping[str, Any], service: Service) -> tuple[list[str], dict[str, Any]]:
    """Return the texts, and what `submit` is given with each."""
    if unknown := [key for key in data if key not in _KEYS]:
        raise RequestError(400, f"unknown key {unknown[0][:80]}")
    if data.get("format", "text") != "text":
        raise RequestError(400, f"format is {shortened(data['format'])}, expected text")
    given, number = data.get("q"), data.get("alternatives", 0)
    texts = [text(one, "q") for one in (given if isinstance(given, list) else [given])]
    if not 1 <= len(texts) <= service.config.max_texts:
        raise RequestError(400, f"{len(texts)} texts are given, expected 1 to {service.config.max_texts}")
    if type(number) is not int or number < 0:
        raise RequestError(400, f"alternatives is {shortened(number)}, expected 0 or more")
    options = {"num_beams": number + 1, "num_return_sequences": number + 1} if number else {}
    return texts, arguments(options, service.config.max_timeout_s)


ROUTES = [Route("/translate", translate, methods=["POST"])]
