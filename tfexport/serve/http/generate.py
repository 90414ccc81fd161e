"""`generate` and `generate_stream`, after Triton's generate extension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.decode.result import Hypothesis
from tfexport.model import Result
from tfexport.serve.http.asking import source_of, submit, while_heard
from tfexport.serve.http.body import read_object
from tfexport.serve.http.errors import RequestError
from tfexport.serve.http.options import arguments
from tfexport.serve.http.service import VERSION, service_of

_KEYS = {"id", "text_input", "input_ids", "parameters"}


async def generate(request: Request) -> Response:
    """Answer a text, or token ids."""
    service = service_of(request)
    name = service.name(request)
    data = await read_object(request)
    head = _head(name, data)
    given = arguments(data.get("parameters", {}), service.config.max_timeout_s)
    asked = submit(service.started(name), source_of(data), given)
    async with while_heard(request, asked):
        answers = await asked
    is_one = asked.job.request.config.num_return_sequences == 1
    return JSONResponse(head | answered(answers, is_one=is_one))


def _head(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer begins with."""
    if unknown := [key for key in data if key not in _KEYS]:
        raise RequestError(400, f"unknown key {unknown[0][:80]}; options go into parameters")
    number = {"id": data["id"]} if "id" in data else {}
    if not isinstance(number.get("id", ""), str):
        raise RequestError(400, "id is no text; write it as one")
    return {**number, "model_name": name, "model_version": VERSION}


def answered(answers: Sequence[Result | Hypothesis], *, is_one: bool) -> dict[str, Any]:
    """Return the outputs of answers, best first: values where one was asked for, else lists of them."""
    texts = [answer.text for answer in answers if isinstance(answer, Result)]
    outputs: dict[str, list[Any]] = {"text_output": texts} if texts else {}
    outputs["output_ids"] = [list(answer.token_ids) for answer in answers]
    outputs["scores"] = [answer.score for answer in answers]
    outputs["finish_reason"] = [answer.finish_reason for answer in answers]
    return {name: values[0] for name, values in outputs.items()} if is_one else dict(outputs)


ROUTES = [
    Route(f"/v2/models/{{name}}{version}/generate", generate, methods=["POST"])
    for version in ("", "/versions/{version}")
]
