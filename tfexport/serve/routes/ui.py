"""Serve the page at `/`: its static files and its own endpoints."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tfexport.contract import QUANTIZED_WEIGHTS, WEIGHTS
from tfexport.runtime.session import Aligns
from tfexport.serve._schemas import TokensRequest
from tfexport.serve.engine import Engine
from tfexport.serve.http import RequestError, service_of

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_INDEX = "index.html"
_BACKENDS = {"ort": "ONNX Runtime", "eager": "PyTorch", "trt": "TensorRT"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FILES = {file.name: file.read_bytes() for file in files("tfexport.serve").joinpath("page").iterdir() if file.is_file()}
# Browsers request these without a token.
PATHS = frozenset({"/" if name == _INDEX else f"/page/{name}" for name in _FILES})
# Number of recorded texts on the page, and their maximum length in characters.
NUM_EXAMPLES = 5
MAX_EXAMPLE = 120


async def static(request: Request) -> Response:
    """Return a file of the page."""
    name = request.url.path.rpartition("/")[2] or _INDEX
    media_type = _TYPES[name.rpartition(".")[2]]
    return Response(_FILES[name], headers={**_HEADERS, "Content-Type": f"{media_type}; charset=utf-8"})


async def models(request: Request) -> Response:
    """Return the facts about each model that the page shows."""
    service, models = service_of(request), []
    found = await service.everywhere("health")
    for name, engine in service.engines.items():
        is_ready = all(process.ready[name] for process in found)
        models.append({"name": name, "is_ready": is_ready, **_about(engine, len(found))})
    return JSONResponse({"is_leaving": any(process.is_leaving for process in found), "models": models})


async def tokens(request: Request, name: str, data: TokensRequest) -> Response:
    """Return the tokens of a source and its answer."""
    model = service_of(request).loaded_engine(name).model
    tokenizer, source, target_ids = model.tokenizer, data.source, data.target_ids
    if tokenizer is None:
        raise RequestError(404, "this bundle has no tokenizer, so its tokens have no text")
    source_ids = tokenizer.encode([source])[0] if isinstance(source, str) else source
    sides = (("source", source_ids, model.spec.source_vocab), ("target", target_ids, model.spec.vocab))
    for side, token_ids, vocab in sides:
        if wrong := [token for token in token_ids if not 0 <= token < vocab]:
            raise RequestError(400, f"{side} has {wrong[0]}, expected ids 0 to {vocab - 1}")
    source_tokens, target_tokens = tokenizer.tokens(source_ids, target_ids)
    ids = {"source_ids": source_ids, "target_ids": target_ids}
    return JSONResponse(ids | {"source_tokens": source_tokens, "target_tokens": target_tokens})


def _about(engine: Engine, num_processes: int) -> dict[str, Any]:
    if engine.state == "starting":
        return {"state": engine.state}
    model = engine.model
    samples = model.tokenizer.text.samples if model.tokenizer else ()
    texts = [one.text for one in samples if model.reads == "text" and one.target_ids and len(one.text) <= MAX_EXAMPLE]
    return {
        "state": engine.state,
        "reads": model.reads,
        "facts": _facts(engine, num_processes),
        "has_alignment": isinstance(model.session, Aligns) and model.session.has_alignment,
        "max_target_length": model.spec.max_target_length,
        "defaults": model.defaults.given(),
        "examples": texts[:: max(1, len(texts) // NUM_EXAMPLES)][:NUM_EXAMPLES],
    }


def _facts(engine: Engine, num_processes: int) -> dict[str, str]:
    model, spec, session, threads = engine.model, engine.model.spec, engine.model.session, engine.model.threads
    contents = model.manifest.files if model.manifest else {}
    weights = sum(contents[name].bytes for name in (WEIGHTS, QUANTIZED_WEIGHTS) if name in contents)
    facts = {
        "Model": f"{spec.layers} decoder layers, width {spec.d_model}, {spec.heads} heads"
        if spec.has_decoder
        else f"encoder-only, width {spec.d_model}",
        "Weights": f"{weights / 1e6:,.1f} MB, {session.accuracy}",
        "Vocabulary": f"{spec.vocab:,}",
        "Maximum source": f"{spec.max_source_length:,} {spec.source.unit}",
        "Maximum output": f"{spec.max_target_length:,} tokens",
        "Runtime": _BACKENDS[session.backend],
    }
    if threads:
        facts["Threads"] = f"{threads.encoder} encoder, {threads.decoder} decoder"
    each = f" in each of {num_processes} processes" if num_processes > 1 else ""
    return facts | {"Slots": f"{engine.slots}{each}"}


def add_routes(app: FastAPI) -> None:
    """Add the files and endpoints, which are not part of the documented API."""
    for path in sorted(PATHS):
        app.add_api_route(path, static, include_in_schema=False)
    app.add_api_route("/page/models", models, include_in_schema=False)
    app.add_api_route("/page/models/{name}/tokens", tokens, methods=["POST"], include_in_schema=False)
