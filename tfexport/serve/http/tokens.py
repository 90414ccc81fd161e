"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.model.model import Model
from tfexport.serve.http.body import read_object
from tfexport.serve.http.errors import RequestError
from tfexport.serve.http.service import service_of
from tfexport.serve.protocol.asking import ids, text
from tfexport.text.tokenizer import Tokenizer


async def tokenize(request: Request) -> Response:
    """Return the token ids that a source text is to its model, special tokens included."""
    data, model, tokenizer = await _read(request, "prompt")
    (tokens,) = tokenizer.encode([text(data["prompt"], "prompt")])
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": model.spec.max_source_length})


async def detokenize(request: Request) -> Response:
    """Return the text that target token ids say."""
    data, model, tokenizer = await _read(request, "tokens")
    tokens = ids(data["tokens"], "tokens")
    if wrong := [token for token in tokens if not 0 <= token < model.spec.vocab]:
        raise RequestError(400, f"tokens has {wrong[0]}, expected ids 0 to {model.spec.vocab - 1}")
    return JSONResponse({"prompt": tokenizer.decode(tokens)})


async def _read(request: Request, key: str) -> tuple[dict[str, Any], Model, Tokenizer]:
    """Return a request with this key, and the model that it means, which need not be named where there is one."""
    data, service = await read_object(request), service_of(request)
    if set(data) - {"model"} != {key}:
        raise RequestError(400, f"the keys are {', '.join(data)[:200] or 'none'}; expected {key}, and perhaps model")
    model = service.started(service.chosen(data.get("model"))).model
    if model.tokenizer is None:
        raise RequestError(400, "this bundle has no tokenizer")
    return data, model, model.tokenizer


ROUTES = [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]
