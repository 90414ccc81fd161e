"""Serve completions, transcriptions and embeddings of the OpenAI API."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Form
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tfexport.contract import SpeechTokens
from tfexport.decode.result import FinishReason
from tfexport.generation import SAMPLING_OPTIONS
from tfexport.model.result import Result
from tfexport.serve._schemas import FILES, Completion, Embeddings, Transcription
from tfexport.serve.http import EventStream, RequestError, answers_of, event, service_of
from tfexport.serve.inference import DECODING, Submitted, arguments, submit, submit_all
from tfexport.text.tokenizer import Tokenizer

# Names of decoding options in the APIs of OpenAI and vLLM.
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "stop": "stop_strings",
}
_SAME = DECODING | {"prefix", "priority", "timeout_ms", "timeout"}
TIMESTAMP_S = 0.02  # from one id of a timestamp to the next
_REASONS: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "time": "length"}


async def completions(request: Request, data: Completion) -> Response:
    """Complete prompts, as one response or as server-sent events."""
    service = service_of(request)
    name = service.model_name(data.model)
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": name}
    prompts = [data.prompt] if isinstance(data.prompt, str) else data.prompt
    with service.count_refusals(name):
        service.check_number("prompts", len(prompts))
        options = arguments(_decoding(data), service.config.max_timeout_s)
        if data.stream and len(prompts) > 1:
            raise RequestError(400, f"the request has {len(prompts)} prompts, expected one in a stream")
    engine = service.loaded_engine(name)
    if data.stream:
        generation = submit(engine, prompts[0], options, stream=True)
        has_usage = bool(data.stream_options and data.stream_options.include_usage)
        return EventStream(generation, _events(head, generation, has_usage))
    generations = submit_all(engine, prompts, [options] * len(prompts))
    answers = [answer for each in await answers_of(request, generations) for answer in each]
    choices = [_choice(index, answer.text, answer.finish_reason) for index, answer in enumerate(answers)]
    return JSONResponse(head | {"choices": choices, "usage": _usage(generations, answers)})


async def transcriptions(request: Request, data: Annotated[Transcription, Form(media_type=FILES)]) -> Response:
    """Transcribe audio, as one response or as server-sent events."""
    service = service_of(request)
    name = service.model_name(data.model)
    engine, is_verbose = service.loaded_engine(name), data.response_format == "verbose_json"
    speech = engine.model.spec.speech
    with service.count_refusals(name):
        if is_verbose and (speech is None or speech.first_timestamp is None):
            raise RequestError(400, "response_format is verbose_json, but the model has no timestamps; use json")
        decoding = _decoding(data) | ({"return_timestamps": True} if is_verbose else {})
        options = arguments(decoding, service.config.max_timeout_s)
    generation = submit(engine, data.file, options, stream=bool(data.stream))
    if data.stream:
        return EventStream(generation, _transcript(generation))
    ((answer, *_),) = await answers_of(request, [generation])
    if data.response_format == "text":
        return PlainTextResponse(answer.text)
    body: dict[str, Any] = {"text": answer.text}
    if is_verbose and speech and engine.model.tokenizer:
        body |= {"task": data.task or "transcribe"} | _segments(answer, speech, engine.model.tokenizer)
    return JSONResponse(body)


async def embeddings(request: Request, data: Embeddings) -> Response:
    """Embed texts or token ids with an encoder-only bundle."""
    service = service_of(request)
    name = service.model_name(data.model)
    with service.count_refusals(name):
        service.check_number("inputs", len(data.sources))
    engine = service.loaded_engine(name)
    vectors, num_tokens = await engine.embed(data.sources, timeout_s=service.config.max_timeout_s)

    def response() -> Response:
        if data.encoding_format == "base64":
            encoded: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        else:
            encoded = vectors.tolist()
        items = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(encoded)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "data": items, "model": name, "usage": usage})

    # Encoding many numbers as JSON would block the event loop.
    return await asyncio.to_thread(response)


async def models(request: Request) -> Response:
    """List the models."""
    names = service_of(request).engines
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "tfexport"} for name in names]
    return JSONResponse({"object": "list", "data": data})


def _decoding(data: Completion | Transcription) -> dict[str, Any]:
    fields = data.model_dump(exclude_unset=True, exclude_none=True)
    options = {name: value for name, value in fields.items() if name in _SAME and (name, value) != ("language", "")}
    options["return_scores"] = False
    options |= {ours: fields[theirs] for theirs, ours in _NAMES.items() if fields.get(theirs) not in (None, "", [])}
    if fields.get("ignore_eos") and "max_new_tokens" in options:
        options["min_new_tokens"] = options["max_new_tokens"]
    if fields.get("temperature"):
        return {"do_sample": True, "top_k": 0} | options | ({"top_k": 0} if options.get("top_k") == -1 else {})
    return {name: value for name, value in options.items() if name not in SAMPLING_OPTIONS}


async def _events(head: dict[str, Any], generation: Submitted, has_usage: bool) -> AsyncGenerator[bytes]:
    async for piece in generation:
        yield event(head | {"choices": [_choice(0, str(piece), None)]})
    answers = [answer for answer in await generation if isinstance(answer, Result)]
    yield event(head | {"choices": [_choice(0, "", answers[0].finish_reason)]})
    if has_usage:
        yield event(head | {"choices": [], "usage": _usage([generation], answers)})
    yield b"data: [DONE]\n\n"


def _segments(answer: Result, speech: SpeechTokens, tokenizer: Tokenizer) -> dict[str, Any]:
    assert speech.first_timestamp is not None, "checked before"
    segments, ids, start = list[dict[str, Any]](), list[int](), None
    for token in (*answer.token_ids, None):  # first the prompt
        if token is not None and token < speech.first_timestamp:
            ids.append(token)
            continue
        end = None if token is None else round((token - speech.first_timestamp) * TIMESTAMP_S, 2)
        if start is not None and (text := tokenizer.decode(ids)):
            segments.append({"id": len(segments), "start": start, "end": end, "text": text, "tokens": ids})
        start, ids = end, []
    languages = dict(zip(speech.language_ids, speech.languages, strict=True))
    return {"language": next(filter(None, map(languages.get, answer.token_ids)), None), "segments": segments}


async def _transcript(generation: Submitted) -> AsyncGenerator[bytes]:
    text = ""
    async for piece in generation:
        text += str(piece)
        yield event({"type": "transcript.text.delta", "delta": piece})
    yield event({"type": "transcript.text.done", "text": text})


def _choice(index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason and _REASONS[reason]}


def _usage(generations: Sequence[Submitted], answers: Sequence[Result]) -> dict[str, int]:
    read, written = sum(one.source_length for one in generations), sum(len(one.token_ids) for one in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def add_routes(app: FastAPI, *, has_completions: bool) -> None:
    """Add the endpoints."""
    if has_completions:
        app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/audio/transcriptions", transcriptions, methods=["POST"])
    app.add_api_route("/v1/embeddings", embeddings, methods=["POST"])
    app.add_api_route("/v1/models", models)
