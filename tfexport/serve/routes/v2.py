"""Serve the Open Inference Protocol, health, metrics, and tokenizers."""

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
from tfexport.serve import http, inference
from tfexport.serve.http import VERSION, EventStream, RequestError, answers_of, event, service_of, unavailable
from tfexport.serve.inference import OUTPUTS, Submitted, Tensor, arguments, scores_of, submit, submit_all
from tfexport.serve.metrics import Measured, added
from tfexport.text.tokenizer import Tokenizer


async def live(request: Request) -> Response:
    """Return 200, or 503 if an engine has failed and the process must be restarted."""
    if not all(process.is_alive for process in await service_of(request).everywhere("health")):
        raise unavailable("an engine has failed; see the log, and restart the process")
    return JSONResponse({"live": True})


async def ready(request: Request) -> Response:
    """Return 200 if every model accepts requests, otherwise 503."""
    found = await service_of(request).everywhere("health")
    if not all(not process.is_leaving and all(process.ready.values()) for process in found):
        raise unavailable("not ready")
    return JSONResponse({"ready": True})


async def server(request: Request) -> Response:
    """Return the server's name, version, extensions and models."""
    extensions, models = ["binary_tensor_data", "generate", "statistics"], list(service_of(request).engines)
    about = {"name": "tfexport", "version": version("tfexport"), "extensions": extensions, "models": models}
    return JSONResponse(about)


async def model(request: Request, name: str) -> Response:
    """Return a model's inputs, outputs, limits and status; -1 is a variable dimension."""
    model = service_of(request).loaded_engine(name).model
    outputs = {one: (datatype, [-1] * rank) for one, (datatype, rank) in OUTPUTS.items()}
    if not model.spec.has_decoder:
        outputs = {}
    elif not model.tokenizer:
        del outputs["text_output"]
    limits = ("max_source_length", "max_target_length")
    proof = model.manifest.proof.to_dict() if model.manifest else {}
    labels: dict[str, Any] = {"labels": model.spec.labels} if model.spec.labels else {}
    return JSONResponse(
        {
            "name": name,
            "versions": [VERSION],
            "platform": "tfexport",
            "inputs": _tensors(_inputs(model)),
            "outputs": _tensors(outputs),
            "parameters": {limit: getattr(model.spec, limit) for limit in limits} | proof | labels,
        }
    )


def _inputs(model: Model) -> dict[str, tuple[str, list[int]]]:
    if model.reads == "text":
        inputs = {"text_input": ("BYTES", [-1])} if model.tokenizer else {}
        return inputs | {"input_ids": ("INT64", [-1, -1]), "input_lengths": ("INT64", [-1])}
    array, (_, (_, *shape)) = next(iter(model.spec.source.inputs.items()))
    inputs = {inference.FILE: ("BYTES", [-1])} if model.processor else {}
    return inputs | {array: ("FP32", [size if isinstance(size, int) else -1 for size in shape])}


def _tensors(kinds: dict[str, tuple[str, list[int]]]) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": datatype, "shape": shape} for name, (datatype, shape) in kinds.items()]


async def model_ready(request: Request, name: str) -> Response:
    """Return 200 if the model accepts requests, otherwise 503."""
    found = await service_of(request).everywhere("health")
    if not all(not process.is_leaving and process.ready[name] for process in found):
        raise unavailable(f"model {name} is not ready")
    return JSONResponse({"name": name, "ready": True})


async def generate(request: Request, name: str, data: schemas.GenerateRequest) -> Response:
    """Generate from a text, from token ids, or from a file in a form."""
    generation = _submit(request, name, data, stream=False)
    (answers,) = await answers_of(request, [generation])
    is_one = generation.request.config.num_return_sequences == 1
    return JSONResponse(_head(name, data.id) | _generated(answers, is_one=is_one))


async def generate_stream(request: Request, name: str, data: schemas.GenerateRequest) -> Response:
    """Generate as server-sent events.

    Pieces of text are sent as they are generated. The last event is the answer of `generate`, without the text.
    """
    generation = _submit(request, name, data, stream=True)
    return EventStream(generation, _events(_head(name, data.id), generation))


def _submit(request: Request, name: str, data: schemas.GenerateRequest, *, stream: bool) -> Submitted:
    service = service_of(request)
    options = arguments(data.parameters.model_dump(exclude_unset=True), service.config.max_timeout_s)  # type: ignore[attr-defined]
    return submit(service.loaded_engine(name), data.source, options, stream=stream)


def _head(name: str, request_id: str | None) -> dict[str, Any]:
    head = {"id": request_id} if request_id is not None else {}
    return {**head, "model_name": name, "model_version": VERSION}


async def _events(head: dict[str, Any], generation: Submitted) -> AsyncGenerator[bytes]:
    async for piece in generation:
        yield event(head | ({"text_output": piece} if isinstance(piece, str) else {"output_ids": [piece]}))
    last = _generated(await generation, is_one=True)
    yield event(head | (last | {"text_output": ""} if "text_output" in last else last))


def _generated(answers: Sequence[Result | Hypothesis], *, is_one: bool) -> dict[str, Any]:
    texts = [answer.text for answer in answers if isinstance(answer, Result)]
    outputs: dict[str, list[Any]] = {"text_output": texts} if texts else {}
    outputs["output_ids"] = [list(answer.token_ids) for answer in answers]
    if (scores := scores_of(answers)) is not None:
        outputs["scores"] = scores
    outputs["finish_reason"] = [answer.finish_reason for answer in answers]
    return {name: values[0] for name, values in outputs.items()} if is_one else dict(outputs)


async def infer(request: Request, name: str, data: schemas.InferRequest) -> Response:
    """Generate from texts, token ids, audio or images in tensors."""
    service, parameters = service_of(request), data.parameters.model_dump(exclude_unset=True)
    is_binary = parameters.pop("binary_data_output", False)
    engine = service.loaded_engine(name)
    with service.count_refusals(name):
        sources, options = inference.parse_inputs(data.tensors, parameters, service.config)
        has_text = engine.model.tokenizer is not None and not isinstance(sources[0], list)
        has_scores = options[0].get("return_scores", engine.model.decoding().return_scores)
        exists = {"text_output": has_text, "scores": has_scores}
        existing = [output for output in OUTPUTS if exists.get(output, True)]
        requested = {
            output.name: is_binary if output.parameters.binary_data is None else output.parameters.binary_data
            for output in data.outputs
        } or dict.fromkeys(existing, is_binary)
        if wrong := [output for output in requested if output not in existing]:
            raise RequestError(400, f"output {wrong[0]!r} does not exist, expected {', '.join(existing)}")
        for each in options:
            each.setdefault("return_scores", "scores" in requested)
    answers = await answers_of(request, submit_all(engine, sources, options))
    outputs = inference.outputs_of(answers, engine.model.spec.tokens.pad)
    written = [_written(outputs[output], is_binary=as_bytes) for output, as_bytes in requested.items()]
    body = _head(name, data.id) | {"outputs": [head for head, _ in written]}
    if not any(requested.values()):
        return JSONResponse(body)
    raw = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    headers = {http.JSON_LENGTH: str(len(raw)), "Content-Type": schemas.BYTES}
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


async def classify(request: Request, name: str, data: schemas.Sourced) -> Response:
    """Label a source, or each of its tokens, with the head of an encoder-only bundle."""
    service = service_of(request)
    sources: list[Any] = [data.source]
    (one,) = await service.loaded_engine(name).classify(sources, timeout_s=service.config.max_timeout_s)
    found = {"label": one.label, "logits": one.logits.tolist(), "token_ids": one.token_ids}
    return await asyncio.to_thread(JSONResponse, _head(name, None) | found)


async def align(request: Request, name: str, data: schemas.AlignRequest) -> Response:
    """Return the alignment of a source and a target; 404 if the bundle has none."""
    service = service_of(request)
    engine = service.loaded_engine(name)
    try:
        need_alignment(engine.model.session)
    except ConfigError as error:
        with service.count_refusals(name):
            raise RequestError(404, str(error)) from error
    alignment = await engine.align(data.source, data.target, timeout_s=service.config.max_timeout_s)
    # Encoding many weights as JSON would block the event loop.
    return Response(await asyncio.to_thread(_encoded, alignment, name), media_type="application/json")


def _encoded(alignment: Alignment, name: str) -> bytes:
    body = _head(name, None) | vars(alignment) | {"weights": alignment.weights.tolist()}
    return json.dumps(body, ensure_ascii=False).encode()


async def tokenize(request: Request, data: schemas.TokenizeRequest) -> Response:
    """Return the token ids of a source text, including special tokens."""
    model, tokenizer = _model_of(request, data.model)
    if not model.spec.source_vocab:
        raise RequestError(400, f"this model reads {model.reads}, not text")
    (tokens,) = tokenizer.encode([data.prompt])
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": model.spec.max_source_length})


async def detokenize(request: Request, data: schemas.DetokenizeRequest) -> Response:
    """Return the text of target token ids."""
    model, tokenizer = _model_of(request, data.model)
    if wrong := [token for token in data.tokens if not 0 <= token < model.spec.vocab]:
        raise RequestError(400, f"tokens has {wrong[0]}, expected ids 0 to {model.spec.vocab - 1}")
    return JSONResponse({"prompt": tokenizer.decode(data.tokens)})


def _model_of(request: Request, name: str | None) -> tuple[Model, Tokenizer]:
    service = service_of(request)
    model = service.loaded_engine(service.model_name(name)).model
    if model.tokenizer is None:
        raise RequestError(400, "this bundle has no tokenizer")
    return model, model.tokenizer


async def metrics(request: Request) -> Response:
    """Return all metrics in the Prometheus text format."""
    body, kind = (await _measured(request)).expose(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": kind})


async def statistics(request: Request, name: str) -> Response:
    """Return a model's statistics, as in Triton."""
    return JSONResponse({"model_stats": [_statistics(await _measured(request), name)]})


async def all_statistics(request: Request) -> Response:
    """Return the statistics of all models, as in Triton."""
    measured = await _measured(request)
    return JSONResponse({"model_stats": [_statistics(measured, name) for name in service_of(request).engines]})


async def _measured(request: Request) -> Measured:
    return added(await service_of(request).everywhere("measured"))


def _statistics(measured: Measured, name: str) -> dict[str, Any]:
    def count(metric: str) -> int:
        return int(measured.total(f"tfexport_{metric}", name))

    def timed(*names: str) -> dict[str, int]:
        seconds = sum(measured.total(f"tfexport_{metric}_seconds_sum", name) for metric in names)
        return {"count": sum(count(f"{metric}_seconds_count") for metric in names), "ns": int(seconds * 1e9)}

    success, failed_s = timed("request", "align"), measured.failed_s[name]
    failed = {"count": count("requests_total") - success["count"], "ns": int(failed_s * 1e9)}
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
    form = {"requestBody": {"content": {schemas.FILES: {"schema": schemas.FORM_SCHEMA}}}}
    posts: dict[Any, Any] = {
        infer: schemas.Inferred,
        generate: schemas.Generated,
        generate_stream: None,
        align: schemas.Aligned,
        classify: schemas.Classified,
    }
    for prefix, is_shown in (("/v2/models/{name}", True), ("/v2/models/{name}/versions/{version}", False)):
        app.add_api_route(prefix, model, include_in_schema=is_shown)
        app.add_api_route(f"{prefix}/ready", model_ready, include_in_schema=is_shown)
        if has_statistics:
            app.add_api_route(f"{prefix}/stats", statistics, include_in_schema=is_shown)
        for endpoint, answer in posts.items():
            path = f"{prefix}/{endpoint.__name__}"
            options: dict[str, Any] = {"response_model": answer, "include_in_schema": is_shown}
            if endpoint in (generate, generate_stream):
                options["openapi_extra"] = form
            app.add_api_route(path, endpoint, methods=["POST"], **options)
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
