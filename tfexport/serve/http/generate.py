"""`generate` and `generate_stream`, after Triton's generate extension."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.decode.result import Hypothesis
from tfexport.model.result import Result
from tfexport.serve.http.body import read_object
from tfexport.serve.http.errors import RequestError
from tfexport.serve.http.event_stream import EventStream, event
from tfexport.serve.http.leaving import while_heard
from tfexport.serve.http.service import VERSION, service_of
from tfexport.serve.protocol.asking import Asked, source_of, submit, text
from tfexport.serve.protocol.options import arguments

_KEYS = {"id", "text_input", "input_ids", "parameters"}


async def generate(request: Request) -> Response:
    """Answer a text, or token ids."""
    head, asked = await _submit(request, stream=False)
    async with while_heard(request.receive, asked):
        answers = await asked
    is_one = asked.job.request.config.num_return_sequences == 1
    return JSONResponse(head | answered(answers, is_one=is_one))


async def generate_stream(request: Request) -> Response:
    """Answer in events: pieces as they come, then what `generate` answers with no text left."""
    head, asked = await _submit(request, stream=True)
    return EventStream(asked, _events(head, asked), service_of(request).config.max_send_s)


async def _submit(request: Request, *, stream: bool) -> tuple[dict[str, Any], Asked]:
    """Return what answers begin with, and what the engine was asked for."""
    service = service_of(request)
    name = service.name(request)
    with service.counted(name):
        data = await read_object(request)
        if unknown := [key for key in data if key not in _KEYS]:
            raise RequestError(400, f"unknown key {unknown[0][:80]}; options go into parameters")
        head = {"id": text(data["id"], "id")} if "id" in data else {}
        given = arguments(data.get("parameters", {}), service.config.max_timeout_s)
        asked = submit(service.started(name), source_of(data), given, stream=stream)
    return {**head, "model_name": name, "model_version": VERSION}, asked


async def _events(head: dict[str, Any], asked: Asked) -> AsyncGenerator[bytes]:
    async for piece in asked:
        yield event(head | ({"text_output": piece} if isinstance(piece, str) else {"output_ids": [piece]}))
    last = answered(await asked, is_one=True)
    yield event(head | (last | {"text_output": ""} if "text_output" in last else last))


def answered(answers: Sequence[Result | Hypothesis], *, is_one: bool) -> dict[str, Any]:
    """Return the outputs of answers, best first: values where one was asked for, else lists of them."""
    texts = [answer.text for answer in answers if isinstance(answer, Result)]
    outputs: dict[str, list[Any]] = {"text_output": texts} if texts else {}
    outputs["output_ids"] = [list(answer.token_ids) for answer in answers]
    outputs["scores"] = [answer.score for answer in answers]
    outputs["finish_reason"] = [answer.finish_reason for answer in answers]
    return {name: values[0] for name, values in outputs.items()} if is_one else dict(outputs)


ROUTES = [
    Route(f"/v2/models/{{name}}{version}/{endpoint.__name__}", endpoint, methods=["POST"])
    for version in ("", "/versions/{version}")
    for endpoint in (generate, generate_stream)
]
