"""The page at `/`: static files under a content policy that lets nothing else in, and what it asks only here."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.contract import QUANTIZED_WEIGHTS, WEIGHTS
from tfexport.model.model import Model
from tfexport.runtime.session import Aligns
from tfexport.serve.engine import Engine
from tfexport.serve.http.body import read_object
from tfexport.serve.http.errors import RequestError
from tfexport.serve.http.service import service_of
from tfexport.serve.protocol.asking import ids, source_of
from tfexport.text.tokenizer import Tokenizer

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
_FILES = {
    found.name: found.read_bytes() for found in files("tfexport.serve").joinpath("page").iterdir() if found.is_file()
}
# Of the files, which say nothing of models or texts: a browser asks for them without a token.
PATHS = frozenset({"/" if name == _INDEX else f"/page/{name}" for name in _FILES})
# Recorded texts that the page offers, and how long they are at most.
NUM_EXAMPLES = 5
MAX_EXAMPLE = 120


async def _file(request: Request) -> Response:
    name = request.url.path.rpartition("/")[2] or _INDEX
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(_FILES[name], headers={**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"})


async def models(request: Request) -> Response:
    """Say of each model what the page shows."""
    service = service_of(request)
    described = [
        {"name": name, "is_ready": engine.is_ready, **_described(engine)} for name, engine in service.engines.items()
    ]
    return JSONResponse({"is_leaving": service.is_leaving, "models": described})


async def tokens(request: Request) -> Response:
    """Say how the vocabularies spell the tokens of a text and of an answer to it."""
    service = service_of(request)
    engine = service.started(service.name(request))
    data = await read_object(request)
    tokenizer, source, target_ids = engine.model.tokenizer, source_of(data), ids(data.get("target_ids"), "target_ids")
    if tokenizer is None:
        raise RequestError(404, "this bundle has no tokenizer, so that its tokens have no text")
    source_ids = tokenizer.encode([source])[0] if isinstance(source, str) else source
    spec = engine.model.spec
    for name, given, vocab in (("source", source_ids, spec.source_vocab), ("target", target_ids, spec.vocab)):
        if not all(0 <= token < vocab for token in given):
            raise RequestError(400, f"a token of the {name} is none of its vocabulary of {vocab}")
    source_tokens, target_tokens = tokenizer.tokens(source_ids, target_ids)
    return JSONResponse(
        {
            "source_ids": source_ids,
            "target_ids": target_ids,
            "source_tokens": source_tokens,
            "target_tokens": target_tokens,
        }
    )


def _described(engine: Engine) -> dict[str, Any]:
    """Return what is known of an engine: of one that is still being loaded its state alone."""
    if engine.state == "starting":
        return {"state": engine.state}
    model = engine.model
    return {
        "state": engine.state,
        "facts": _facts(engine, model),
        "has_alignment": isinstance(model.session, Aligns) and model.session.has_alignment,
        "max_target_length": model.spec.max_target_length,
        "defaults": model.defaults.given(),
        "examples": _examples(model.tokenizer) if model.tokenizer else [],
    }


def _facts(engine: Engine, model: Model) -> dict[str, str]:
    spec, session, threads = model.spec, model.session, model.threads
    facts = {
        "Model": f"{spec.layers} decoder layers, width {spec.d_model}, {spec.heads} heads",
        "Weights": f"{_weights_bytes(model) / 1e6:,.1f} MB, {session.accuracy}",
        "Vocabulary": f"{spec.vocab:,}",
        "Longest source": f"{spec.max_source_length:,} tokens",
        "Longest answer": f"{spec.max_target_length:,} tokens",
        "Runs on": _BACKENDS[session.backend],
    }
    if threads:
        facts["Threads"] = f"{threads.encoder} to read, {threads.decoder} for a step"
    return facts | {"Rows at once": str(engine.slots)}


def _weights_bytes(model: Model) -> int:
    files = model.manifest.files if model.manifest else {}
    return sum(files[name].bytes for name in (WEIGHTS, QUANTIZED_WEIGHTS) if name in files)


def _examples(tokenizer: Tokenizer) -> list[str]:
    """Return recorded texts from all over the list, those that have an answer."""
    texts = [one.text for one in tokenizer.text.samples if one.target_ids and len(one.text) <= MAX_EXAMPLE]
    every = max(1, len(texts) // NUM_EXAMPLES)
    return texts[::every][:NUM_EXAMPLES]


ROUTES = [
    *(Route(path, _file) for path in sorted(PATHS)),
    Route("/page/models", models),
    Route("/page/models/{name}/tokens", tokens, methods=["POST"]),
]
