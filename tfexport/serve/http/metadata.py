"""What the server and its models are, after the Open Inference Protocol."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.model.model import Model
from tfexport.serve.http.errors import unavailable
from tfexport.serve.http.service import VERSION, service_of
from tfexport.serve.protocol.outputs import OUTPUTS


async def server(request: Request) -> Response:
    """Say what the server is, and which models it has."""
    return JSONResponse(
        {
            "name": "tfexport",
            "version": version("tfexport"),
            "extensions": ["binary_tensor_data", "generate", "statistics"],
            "models": list(service_of(request).engines),
        }
    )


async def model(request: Request) -> Response:
    """Say what a model takes and gives; -1 is a size that the request decides."""
    service = service_of(request)
    name = service.name(request)
    served = service.started(name).model
    return JSONResponse(
        {
            "name": name,
            "versions": [VERSION],
            "platform": "tfexport",
            "inputs": _inputs(served),
            "outputs": _outputs(served),
            "parameters": {
                "max_source_length": served.spec.max_source_length,
                "max_target_length": served.spec.max_target_length,
            },
        }
    )


async def ready(request: Request) -> Response:
    """Say whether a model takes requests."""
    service = service_of(request)
    name = service.name(request)
    if service.is_leaving or not service.engines[name].is_ready:
        raise unavailable(f"model {name} is not ready")
    return JSONResponse({"name": name, "ready": True})


def _inputs(model: Model) -> list[dict[str, Any]]:
    text = [_tensor("text_input", "BYTES", 1)] if model.tokenizer else []
    return [*text, _tensor("input_ids", "INT64", 2), _tensor("input_lengths", "INT64", 1)]


def _outputs(model: Model) -> list[dict[str, Any]]:
    there = {name: kind for name, kind in OUTPUTS.items() if model.tokenizer or name != "text_output"}
    return [_tensor(name, datatype, rank) for name, (datatype, rank) in there.items()]


def _tensor(name: str, datatype: str, rank: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [-1] * rank}


ROUTES = [
    Route("/v2", server),
    *(
        Route(f"/v2/models/{{name}}{version}{path}", endpoint)
        for version in ("", "/versions/{version}")
        for path, endpoint in (("", model), ("/ready", ready))
    ),
]
