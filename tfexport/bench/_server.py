"""Send requests on a schedule to an engine in this process, or to a server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tfexport.bench import _loops
from tfexport.bench._loops import Answer, Ask, Samples, Source
from tfexport.bench.config import BenchConfig
from tfexport.errors import BenchError, InputError, ParityError, ServingError, printable
from tfexport.generation import DecodeConfig
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.runtime.sources import read_source
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.observer import Observer

if TYPE_CHECKING:
    import httpx

MAX_WARM_UP = 64  # concurrent requests
NUM_COMPARED = 8  # answers of a server that are compared with the bundle
# Statuses that refuse a single request: too many requests, not ready, deadline exceeded.
BUSY = {429, 503, 504}


class Watch(Observer):
    """Record the work of an engine's thread since `restart`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._samples, self._num_steps, self._num_rows = Samples(), 0, 0

    def joined(self, waited_s: float, source_tokens: int) -> None:
        self._samples.queue_s.append(waited_s)

    def encoded(self, took_s: float) -> None:
        self._samples.encode_s.append(took_s)

    def stepped(self, took_s: float, num_steps: int, num_rows: int) -> None:
        self._samples.stepping_s += took_s
        self._num_steps += num_steps
        self._num_rows += num_steps * num_rows
        if len(self._samples.step_s) + num_steps <= _loops.MAX_STEPS:
            self._samples.step_s.extend([took_s / num_steps] * num_steps)

    def add_to(self, samples: Samples, slots: int) -> None:
        for name in ("queue_s", "encode_s", "step_s", "stepping_s"):
            setattr(samples, name, getattr(self._samples, name))
        samples.busy_s = samples.elapsed_s
        if self._num_steps:
            samples.slot_occupancy = self._num_rows / (self._num_steps * slots)


async def _ask_engine(engine: Engine, decoding: DecodeConfig, source: Source) -> Answer:
    """Send token ids to an engine in this process; greedy answers are streamed."""
    assert not isinstance(source, str)
    now, first, streams = asyncio.get_running_loop().time, None, decoding.num_beams == 1
    generation = engine.submit_ids(source, stream=streams, config=decoding)
    if streams:
        async for _ in generation:
            first = first or now()
    (best,) = await generation
    ended = now()
    _, length, _ = read_source(engine.model.spec.source, source)
    return Answer(first or min(generation.began, ended), ended, length, len(best.token_ids))


def http_client(url: str, token: str | None = None) -> httpx.AsyncClient:
    import httpx

    headers = {"Authorization": f"Bearer {token}"} if token else None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # The open loop limits the time.
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits, trust_env=False)  # noqa: S113


class HttpCaller:
    """Send requests to a server's generate endpoint; greedy answers are streamed."""

    def __init__(self, client: httpx.AsyncClient, model: str, decoding: DecodeConfig) -> None:
        self._client = client
        options = ("num_beams", "max_new_tokens", "min_new_tokens")
        self._parameters = {name: value for name in options if (value := getattr(decoding, name))}
        self._streams = decoding.num_beams == 1
        self._path = f"v2/models/{quote(model, safe='')}/generate" + ("_stream" if self._streams else "")

    async def __call__(self, source: Source) -> Answer:
        now, received = asyncio.get_running_loop().time, list[float]()
        ids = await self.ids(source, lambda: received.append(now()))
        length = 0 if isinstance(source, str) else len(source)
        return Answer(received[0] if self._streams else None, now(), length, len(ids))

    async def ids(self, source: Source, on_data: Callable[[], None] = lambda: None) -> list[int]:
        key = "text_input" if isinstance(source, str) else "input_ids"
        data = {key: source, "parameters": self._parameters}
        status, body = await exchange(self._client, "POST", self._path, data, on_data)
        if status in BUSY:
            raise ServingError(f"the server returns {status}: {_excerpt(body)}")
        if status != 200:
            raise BenchError(f"bench: the server returns {status}: {_excerpt(body)}")
        last = _json(body.rstrip().rpartition(b"data: ")[2] if self._streams else body)
        if "error" in last:
            raise ServingError(str(last["error"]))
        if not isinstance(last.get("output_ids"), list):
            raise BenchError("bench: the response has no output_ids, expected a response of tfexport serve")
        return list(last["output_ids"])


async def exchange(
    client: httpx.AsyncClient, method: str, path: str, data: Any = None, on_data: Callable[[], None] = lambda: None
) -> tuple[int, bytes]:
    """Send JSON; return status and body, and call `on_data` for each received part."""
    import httpx

    try:
        async with client.stream(method, path, json=data) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                on_data()
            return response.status_code, bytes(body)
    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
        reason = str(error) or "connection closed"
        raise ServingError(f"{client.base_url}: the response is incomplete ({reason})") from error
    except httpx.HTTPError as error:
        raise BenchError(f"{client.base_url}: cannot be reached ({error}); check the address and the server") from error


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise BenchError(f"bench: the response is not JSON: {_excerpt(body)}") from error


def _excerpt(body: bytes) -> str:
    return printable(body[:300].decode(errors="replace").strip())


async def _only_model(client: httpx.AsyncClient) -> str:
    status, body = await exchange(client, "GET", "v2")
    if status != 200:
        raise BenchError(f"bench: the server returns {status} for /v2: {_excerpt(body)}; set --model")
    models = _json(body).get("models", [])
    if len(models) != 1:
        raise BenchError(f"bench: the server has the models {', '.join(models)}; choose one with --model")
    return str(models[0])


async def measure_engine(
    bundle: Path, config: BenchConfig, texts: Sequence[str] | None, number: int
) -> tuple[dict[str, Any], Model]:
    assert config.slots  # resolved
    (cell,), watch, began = config.cells, Watch(), time.monotonic()
    serving = ServingConfig(slots=config.slots, max_num_beams=max(ServingConfig.max_num_beams, config.num_beams))
    engine = await Engine(bundle, serving, observer=watch, **config.load_options).start()
    loaded = time.monotonic()
    try:
        sources = _sources(engine.model, config, texts)
        ask = partial(_ask_engine, engine, config.decoding(cell))
        first = await ask(sources[0])
        assert first.first_token
        samples = await _measured(ask, sources, config, number, watch.restart)
        watch.add_to(samples, engine.slots)
    finally:
        await engine.drain(0)
    times = {"load_s": loaded - began, "load_to_first_token_s": first.first_token - began}
    return {**times, "cells": [samples.to_dict()]}, engine.model


async def measure_url(
    bundle: Path | None, config: BenchConfig, texts: Sequence[str] | None, number: int
) -> dict[str, Any]:
    """Measure a running server; compare its first answers with a bundle, if given."""
    assert config.url
    (cell,), compared = config.cells, 0
    async with http_client(config.url, _token(config.token_file)) as client:
        name = config.model or await _only_model(client)
        ask = HttpCaller(client, name, config.decoding(cell))
        sources: Sequence[Source] = texts or []
        if bundle:
            with load(bundle, trusted_keys=config.trusted_keys or None) as model:
                ids = _sources(model, config, texts)
                sources = _loops.shuffled(texts, config.seed) if texts else ids
                if number == 0:
                    compared = await _compare(ask, sources[:NUM_COMPARED], model, ids[:NUM_COMPARED], config)
        samples = await _measured(ask, sources, config, number)
    return {"backend": "http", "model": name, "compared": compared, "cells": [samples.to_dict()]}


def _token(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="ascii").split("\n")[0].strip()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a token file ({error}); pass another one") from error


async def _compare(
    ask: HttpCaller, sources: Sequence[Source], model: Model, ids: Sequence[Sequence[int]], config: BenchConfig
) -> int:
    expected = model.generate_ids(ids, config=config.decoding(config.cells[0]))
    for number, (source, (best, *_)) in enumerate(zip(sources, expected, strict=True), 1):
        if tuple(await ask.ids(source)) != best.token_ids:
            problem = f"answer {number} of {len(ids)} differs from the bundle's"
            raise ParityError(f"{config.url}: {problem}; pass the bundle that the server has loaded")
    return len(ids)


async def _measured(
    ask: Ask, sources: Sequence[Source], config: BenchConfig, number: int, restart: Callable[[], None] = lambda: None
) -> Samples:
    assert config.rate
    assert config.duration
    await ask(sources[0])  # a separate call, so that its error is raised
    await _loops.open_loop(ask, sources, [0.0] * min(config.slots or MAX_WARM_UP, MAX_WARM_UP))
    restart()
    samples = await _loops.open_loop(ask, sources, _loops.poisson(config.rate, config.duration, config.seed + number))
    if not samples.sequences:
        raise BenchError(f"bench: 0 of {samples.refused + samples.unserved} requests were answered; lower --rate")
    return samples


def _sources(model: Model, config: BenchConfig, texts: Sequence[str] | None) -> list[list[int]]:
    (cell,) = config.cells
    if texts is None:
        return [source for batch in _loops.random_batches(model.spec, cell, config.seed) for source in batch]
    return _loops.shuffled(_loops.encoded(model, texts), config.seed)
