"""`/v1/completions` as OpenAI has it, so that load generators for language models run; the prompt is the source."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.decode.result import FinishReason
from tfexport.errors import shortened
from tfexport.model.result import Result
from tfexport.serve.http.body import read_object
from tfexport.serve.http.errors import RequestError
from tfexport.serve.http.event_stream import EventStream, event
from tfexport.serve.http.leaving import while_heard
from tfexport.serve.http.service import Service, service_of
from tfexport.serve.protocol.asking import Asked, submit, submit_all, text
from tfexport.serve.protocol.options import DECODING, arguments

# What OpenAI and vLLM call options of decoding.
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "n": "num_return_sequences"}
_OWN = {"model", "prompt", "stream", "stream_options", "temperature", "stop", "ignore_eos", "user", "timeout_ms"}
# What we do not have, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}
_REASONS: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "time": "length"}


async def completions(request: Request) -> Response:
    """Answer prompts, at once or in events."""
    service = service_of(request)
    data = await read_object(request)
    name = service.chosen(data.get("model"))
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": name}
    with service.counted(name):
        prompts, given = _asked_for(data, service)
        has_usage = bool(_options(data.get("stream_options")).get("include_usage"))
        engine = service.started(name)
        if data.get("stream"):
            if len(prompts) > 1:
                raise RequestError(400, f"a stream takes one prompt, {len(prompts)} are given; ask for each alone")
            one = submit(engine, prompts[0], given, stream=True)
            return EventStream(one, _events(head, one, has_usage), service.config.max_send_s)
        asked = submit_all(engine, prompts, [given] * len(prompts))
    async with while_heard(request.receive, *asked):
        answers = [answer for one in asked for answer in await one if isinstance(answer, Result)]
    choices = [_choice(index, answer.text, answer.finish_reason) for index, answer in enumerate(answers)]
    return JSONResponse(head | {"choices": choices, "usage": _usage(asked, answers)})


async def models(request: Request) -> Response:
    """List the models, as OpenAI does."""
    names = service_of(request).engines
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "tfexport"} for name in names]
    return JSONResponse({"object": "list", "data": data})


def _asked_for(data: Mapping[str, Any], service: Service) -> tuple[list[str], dict[str, Any]]:
    """Return the prompts, and what `submit` is given with each."""
    for name in data:
        if name in _NEUTRAL and data[name] not in _NEUTRAL[name]:
            raise RequestError(400, f"{name} is {shortened(data[name])}, which does not exist here; leave it out")
        if name not in DECODING and not any(name in names for names in (_NAMES, _OWN, _NEUTRAL)):
            raise RequestError(400, f"unknown key {shortened(name)}")
    if data.get("stream") not in (None, True, False):
        raise RequestError(400, f"stream is {shortened(data['stream'])}, expected true or false")
    prompt = data.get("prompt")
    prompts = [text(one, "prompt") for one in (prompt if isinstance(prompt, list) else [prompt])]
    if not 1 <= len(prompts) <= service.config.max_texts:
        raise RequestError(400, f"{len(prompts)} prompts are given, expected 1 to {service.config.max_texts}")
    return prompts, arguments(_decoding(data), service.config.max_timeout_s)


def _decoding(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under our names: a temperature above 0 samples, without one nothing is sampled."""
    given = {name: value for name, value in data.items() if value is not None}
    options = {name: value for name, value in given.items() if name in DECODING or name == "timeout_ms"}
    options |= {ours: given[theirs] for theirs, ours in _NAMES.items() if theirs in given}
    if given.get("stop"):
        options["stop_strings"] = given["stop"]
    if given.get("ignore_eos") and "max_new_tokens" in options:
        options["min_new_tokens"] = options["max_new_tokens"]
    if given.get("temperature"):
        return {"do_sample": True, "top_k": 0} | options | ({"top_k": 0} if options.get("top_k") == -1 else {})
    return {name: value for name, value in options.items() if name not in ("temperature", "top_k", "top_p")}


async def _events(head: dict[str, Any], asked: Asked, has_usage: bool) -> AsyncGenerator[bytes]:
    async for piece in asked:
        yield event(head | {"choices": [_choice(0, str(piece), None)]})
    answers = [answer for answer in await asked if isinstance(answer, Result)]
    yield event(head | {"choices": [_choice(0, "", answers[0].finish_reason)]})
    if has_usage:
        yield event(head | {"choices": [], "usage": _usage([asked], answers)})
    yield b"data: [DONE]\n\n"


def _choice(index: int, said: str, reason: FinishReason | None) -> dict[str, Any]:
    return {"index": index, "text": said, "logprobs": None, "finish_reason": reason and _REASONS[reason]}


def _usage(asked: Sequence[Asked], answers: Sequence[Result]) -> dict[str, int]:
    prompts, answered = sum(one.job.source_length for one in asked), sum(len(one.token_ids) for one in answers)
    return {"prompt_tokens": prompts, "completion_tokens": answered, "total_tokens": prompts + answered}


def _options(value: object) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise RequestError(400, f"stream_options is {shortened(value)}, expected an object")
    return value or {}


ROUTES = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models)]
