"""`infer` of the Open Inference Protocol: tensors in, tensors out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.errors import shortened
from tfexport.serve.http.body import check_kind, parse_object, read_body
from tfexport.serve.http.errors import RequestError
from tfexport.serve.http.leaving import while_heard
from tfexport.serve.http.service import VERSION, service_of
from tfexport.serve.http.tensors import read_tensors, write_tensor
from tfexport.serve.protocol.asking import Answer, submit_all, text
from tfexport.serve.protocol.outputs import OUTPUTS, outputs_of
from tfexport.serve.protocol.sources import asked_for
from tfexport.serve.protocol.tensors import Tensor

# The header that says how much of a body is JSON, where tensors follow it as bytes.
JSON_LENGTH = "Inference-Header-Content-Length"
_KEYS = {"id", "inputs", "outputs", "parameters"}


async def infer(request: Request) -> Response:
    """Answer texts, or token ids."""
    service = service_of(request)
    name = service.name(request)
    with service.counted(name):
        data, tensors = await _read(request)
        parameters = dict(_object(data.get("parameters", {}), "parameters"))
        is_binary = _switch(parameters.pop("binary_data_output", False), "binary_data_output")
        sources, given = asked_for(tensors, parameters, service.config)
        wanted = _wanted(data.get("outputs", []), isinstance(sources[0], str), is_binary)
        engine = service.started(name)
        asked = submit_all(engine, sources, given)
    async with while_heard(request.receive, *asked):
        found: list[Sequence[Answer]] = [await one for one in asked]
    outputs = outputs_of(found, engine.model.spec.tokens.pad)
    head = {"id": data["id"]} if "id" in data else {}
    return _response(
        {**head, "model_name": name, "model_version": VERSION},
        [(outputs[output], as_bytes) for output, as_bytes in wanted.items()],
    )


async def _read(request: Request) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON object of a request, and its inputs."""
    check_kind(request, "application/json", "application/octet-stream", "")
    body = await read_body(request)
    said = request.headers.get(JSON_LENGTH, str(len(body)))
    if not (said.isascii() and said.isdigit()) or len(said) > 12 or int(said) > len(body):
        raise RequestError(400, f"{JSON_LENGTH} is {shortened(said)}, expected a number up to {len(body)}")
    data = parse_object(body[: int(said)])
    if unknown := [key for key in data if key not in _KEYS]:
        raise RequestError(400, f"unknown key {unknown[0][:80]}, expected {', '.join(sorted(_KEYS))}")
    text(data.get("id", ""), "id")
    return data, read_tensors(data.get("inputs"), body[int(said) :])


def _wanted(outputs: object, has_texts: bool, is_binary: bool) -> dict[str, bool]:
    """Return which outputs are asked for, and whether as bytes; all that there are where none is."""
    there = [name for name in OUTPUTS if has_texts or name != "text_output"]
    if not isinstance(outputs, list):
        raise RequestError(400, f"outputs is {shortened(outputs)}, expected a list")
    wanted = {}
    for output in outputs:
        name, parameters = _object(output, "an output").get("name"), _object(output.get("parameters", {}), "parameters")
        if name not in there:
            raise RequestError(400, f"output {shortened(name)} does not exist here, expected {', '.join(there)}")
        if unknown := set(parameters) - {"binary_data"}:
            raise RequestError(400, f"output {name}: unknown parameter {min(unknown)[:80]}")
        wanted[name] = _switch(parameters.get("binary_data", is_binary), "binary_data")
    return wanted or dict.fromkeys(there, is_binary)


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(400, f"{name} is {shortened(value)}, expected an object")
    return value


def _switch(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(400, f"{name} is {shortened(value)}, expected true or false")
    return value


def _response(head: dict[str, Any], outputs: Sequence[tuple[Tensor, bool]]) -> Response:
    """Write outputs, those as bytes behind the JSON."""
    written = [write_tensor(tensor, is_binary=is_binary) for tensor, is_binary in outputs]
    data = head | {"outputs": [one for one, _ in written]}
    if not any(is_binary for _, is_binary in outputs):
        return JSONResponse(data)
    raw = json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    return Response(
        raw + b"".join(binary for _, binary in written),
        headers={JSON_LENGTH: str(len(raw)), "Content-Type": "application/octet-stream"},
    )


ROUTES = [
    Route(f"/v2/models/{{name}}{version}/infer", infer, methods=["POST"]) for version in ("", "/versions/{version}")
]
