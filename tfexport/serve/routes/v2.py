"""Serve the Open Inference Protocol with Triton's extensions.

Health, metrics, and vLLM's tokenize and detokenize endpoints are also here.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tfexport.decode.align import Alignment, need_alignment
from tfexport.decode.result import Hypothesis
from tfexport.errors import ConfigError
from tfexport.model.model import Model
from tfexport.model.result import Result
from tfexport.serve import _schemas as schemas
from tfexport.serve import inference
from tfexport.serve.http import (
    JSON_LENGTH,
    VERSION,
    EventStream,
    RequestError,
    answered,
    event,
    service_of,
    unavailable,
)
from tfexport.serve.inference import OUTPUTS, Asked, Tensor, arguments, submit, submit_all
from tfexport.serve.metrics import Metrics
from tfexport.text.tokenizer import Tokenizer

# ---- health and metadata


async def live(request: Request) -> Response:
    """Return 200, or 503 if an engine has failed and the process must be restarted."""
    if not all(engine.is_alive for engine in service_of(request).engines.values()):
        raise unavailable("an engine has failed, and the log says why; restart the process")
    return JSONResponse({"live": True})


async def ready(request: Request) -> Response:
    """Return 200 if every model accepts requests, otherwise 503."""
    service = service_of(request)
    if service.is_leaving or not all(engine.is_ready for engine in service.engines.values()):
        raise unavailable("not ready")
    return JSONResponse({"ready": True})


async def server(request: Request) -> Response:
    """Return the server's name, version, extensions and models."""
    return JSONResponse(
        {
            "name": "tfexport",
            "version": version("tfexport"),
            "extensions": ["binary_tensor_data", "generate", "statistics"],
            "models": list(service_of(request).engines),
        }
    )


async def model(request: Request, name: str) -> Response:
    """Return a model's inputs, outputs and limits; -1 is a variable dimension."""
    served = service_of(request).started(name).model
    inputs = {"text_input": ("BYTES", 1)} if served.tokenizer else {}
    inputs |= {"input_ids": ("INT64", 2), "input_lengths": ("INT64", 1)}
    outputs = {name: kind for name, kind in OUTPUTS.items() if served.tokenizer or name != "text_output"}
    return JSONResponse(
        {
            "name": name,
            "versions": [VERSION],
            "platform": "tfexport",
            "inputs": _described(inputs),
            "outputs": _described(outputs),
            "parameters": {
                "max_source_length": served.spec.max_source_length,
                "max_target_length": served.spec.max_target_length,
            },
        }
    )


def _described(tensors: dict[str, tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": datatype, "shape": [-1] * rank} for name, (datatype, rank) in tensors.items()]


async def model_ready(request: Request, name: str) -> Response:
    """Return 200 if the model accepts requests, otherwise 503."""
    service = service_of(request)
    if service.is_leaving or not service.engines[name].is_ready:
        raise unavailable(f"model {name} is not ready")
    return JSONResponse({"name": name, "ready": True})


# ---- generation


async def generate(request: Request, name: str, data: schemas.GenerateRequest) -> Response:
    """Generate from a text or from token ids."""
    head, asked = _submit(request, name, data, stream=False)
    (answers,) = await answered(request, [asked])
    return JSONResponse(head | _generated(answers, is_one=asked.request.config.num_return_sequences == 1))


async def generate_stream(request: Request, name: str, data: schemas.GenerateRequest) -> Response:
    """Generate as server-sent events.

    Pieces of text are sent as they are generated. The last event is the answer of `generate`, without the text.
    """
    head, asked = _submit(request, name, data, stream=True)
    return EventStream(asked, _events(head, asked))


def _submit(
    request: Request, name: str, data: schemas.GenerateRequest, *, stream: bool
) -> tuple[dict[str, Any], Asked]:
    service = service_of(request)
    given = arguments(data.parameters.given(), service.config.max_timeout_s)  # type: ignore[attr-defined]
    asked = submit(service.started(name), data.source, given, stream=stream)
    return _head(name, data.id), asked


def _head(name: str, request_id: str | None) -> dict[str, Any]:
    head = {"id": request_id} if request_id is not None else {}
    return {**head, "model_name": name, "model_version": VERSION}


async def _events(head: dict[str, Any], asked: Asked) -> AsyncGenerator[bytes]:
    async for piece in asked:
        yield event(head | ({"text_output": piece} if isinstance(piece, str) else {"output_ids": [piece]}))
    last = _generated(await asked, is_one=True)
    yield event(head | (last | {"text_output": ""} if "text_output" in last else last))


def _generated(answers: Sequence[Result | Hypothesis], *, is_one: bool) -> dict[str, Any]:
    texts = [answer.text for answer in answers if isinstance(answer, Result)]
    outputs: dict[str, list[Any]] = {"text_output": texts} if texts else {}
    outputs["output_ids"] = [list(answer.token_ids) for answer in answers]
    outputs["scores"] = [answer.score for answer in answers]
    outputs["finish_reason"] = [answer.finish_reason for answer in answers]
    return {name: values[0] for name, values in outputs.items()} if is_one else dict(outputs)


async def infer(request: Request, name: str, data: schemas.InferRequest) -> Response:
    """Generate from texts or token ids in tensors."""
    service, parameters = service_of(request), data.parameters.given()  # type: ignore[attr-defined]
    is_binary = parameters.pop("binary_data_output", False)
    with service.counted(name):
        sources, given = inference.asked_for(data.tensors, parameters, service.config)
        there = [output for output in OUTPUTS if isinstance(sources[0], str) or output != "text_output"]
        wanted = {
            one.name: is_binary if one.parameters.binary_data is None else one.parameters.binary_data
            for one in data.outputs
        } or dict.fromkeys(there, is_binary)
        if wrong := [output for output in wanted if output not in there]:
            raise RequestError(400, f"output {wrong[0]!r} does not exist here, expected {', '.join(there)}")
    engine = service.started(name)
    asked = submit_all(engine, sources, given)
    outputs = inference.outputs_of(await answered(request, asked), engine.model.spec.tokens.pad)
    written = [_written(outputs[output], is_binary=as_bytes) for output, as_bytes in wanted.items()]
    answer = _head(name, data.id) | {"outputs": [one for one, _ in written]}
    if not any(wanted.values()):
        return JSONResponse(answer)
    raw = json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()
    headers = {JSON_LENGTH: str(len(raw)), "Content-Type": schemas.BYTES}
    return Response(raw + b"".join(binary for _, binary in written), headers=headers)


def _written(tensor: Tensor, *, is_binary: bool) -> tuple[dict[str, Any], bytes]:
    head = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    if not is_binary:
        return head | {"data": list(tensor.values)}, b""
    if tensor.datatype == "BYTES":
        raws = [value.encode() for value in tensor.values]
        data = b"".join(struct.pack("<I", len(raw)) + raw for raw in raws)
    else:
        data = struct.pack(f"<{len(tensor.values)}{schemas.FORMATS[tensor.datatype]}", *tensor.values)
    return head | {"parameters": {"binary_data_size": len(data)}}, data


# ---- alignment and tokens


async def align(request: Request, name: str, data: schemas.AlignRequest) -> Response:
    """Return the alignment of a source and a target; 404 if the bundle has none."""
    service = service_of(request)
    engine = service.started(name)
    try:
        need_alignment(engine.model.session)
    except ConfigError as error:
        with service.counted(name):
            raise RequestError(404, str(error)) from error
    found = await engine.align(data.source, data.target, timeout_s=service.config.max_timeout_s)
    # Encoding many weights as JSON would block the event loop.
    return Response(await asyncio.to_thread(_aligned, found, name), media_type="application/json")


def _aligned(found: Alignment, name: str) -> bytes:
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


async def tokenize(request: Request, data: schemas.TokenizeRequest) -> Response:
    """Return the token ids of a source text, including special tokens."""
    served, tokenizer = _tokenizing(request, data.model)
    (tokens,) = tokenizer.encode([data.prompt])
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": served.spec.max_source_length})


async def detokenize(request: Request, data: schemas.DetokenizeRequest) -> Response:
    """Return the text of target token ids."""
    served, tokenizer = _tokenizing(request, data.model)
    if wrong := [token for token in data.tokens if not 0 <= token < served.spec.vocab]:
        raise RequestError(400, f"tokens has {wrong[0]}, expected ids 0 to {served.spec.vocab - 1}")
    return JSONResponse({"prompt": tokenizer.decode(data.tokens)})


def _tokenizing(request: Request, name: str | None) -> tuple[Model, Tokenizer]:
    service = service_of(request)
    served = service.started(service.chosen(name)).model
    if served.tokenizer is None:
        raise RequestError(400, "this bundle has no tokenizer")
    return served, served.tokenizer


# ---- metrics


async def metrics(request: Request) -> Response:
    """Return all metrics in the Prometheus text format."""
    body, kind = _metrics(request).expose(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": kind})


async def statistics(request: Request, name: str) -> Response:
    """Return a model's statistics, as in Triton."""
    return JSONResponse({"model_stats": [_statistics(_metrics(request), name)]})


async def all_statistics(request: Request) -> Response:
    """Return the statistics of all models, as in Triton."""
    found = [_statistics(_metrics(request), name) for name in service_of(request).engines]
    return JSONResponse({"model_stats": found})


def _metrics(request: Request) -> Metrics:
    found = service_of(request).metrics
    assert found, "without metrics there are no such routes"
    return found


def _statistics(metrics: Metrics, name: str) -> dict[str, Any]:
    def count(metric: str) -> int:
        return int(metrics.total(f"tfexport_{metric}", name))

    def timed(*names: str) -> dict[str, int]:
        seconds = sum(metrics.total(f"tfexport_{one}_seconds_sum", name) for one in names)
        return {"count": sum(count(f"{one}_seconds_count") for one in names), "ns": int(seconds * 1e9)}

    success = timed("request", "align")
    failed = {
        "count": count("requests_total") - success["count"],
        "ns": int(metrics.observer(name).failed_s * 1e9),
    }
    return {
        "name": name,
        "version": VERSION,
        "inference_count": success["count"],
        "execution_count": count("decode_step_seconds_count"),
        "inference_stats": {
            "success": success,
            "fail": failed,
            "queue": timed("queue"),
            "compute_infer": timed("encode", "decode_step"),
        },
        "batch_stats": [],
    }


def add_routes(app: FastAPI, *, has_statistics: bool, has_metrics: bool) -> None:
    """Add the endpoints; fixed paths come before paths with parameters."""
    for path in ("/v2/health/live", "/livez"):
        app.add_api_route(path, live)
    for path in ("/v2/health/ready", "/readyz", "/health"):
        app.add_api_route(path, ready)
    if has_statistics:
        app.add_api_route("/v2/models/stats", all_statistics)
    if has_metrics:
        app.add_api_route("/metrics", metrics)
    app.add_api_route("/v2", server)
    for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        is_shown = "version" not in prefix
        app.add_api_route(prefix, model, include_in_schema=is_shown)
        app.add_api_route(f"{prefix}/ready", model_ready, include_in_schema=is_shown)
        if has_statistics:
            app.add_api_route(f"{prefix}/stats", statistics, include_in_schema=is_shown)
        posts: dict[Any, Any] = {
            infer: schemas.Inferred,
            generate: schemas.Generated,
            generate_stream: None,
            align: schemas.Aligned,
        }
        for endpoint, answer in posts.items():
            path = f"{prefix}/{endpoint.__name__}"
            app.add_api_route(path, endpoint, methods=["POST"], response_model=answer, include_in_schema=is_shown)
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
