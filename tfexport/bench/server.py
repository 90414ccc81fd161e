"""The server scenario in one process: an engine here, or a running server, asked on a schedule."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tfexport.bench.config import MAX_REQUESTS, BenchConfig
from tfexport.bench.engine_caller import EngineCaller, Watch
from tfexport.bench.http_caller import HttpCaller, Metrics, only_model
from tfexport.bench.http_client import HttpClient
from tfexport.bench.open_loop import Ask, Source, open_loop, poisson
from tfexport.bench.samples import Samples
from tfexport.bench.search import LEAST_REQUESTS, Trial, highest_rate, judge
from tfexport.bench.sources import encoded, random_batches, shuffled
from tfexport.errors import BenchError, InputError, ParityError
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine

# Requests at once before anything counts: as many as are decoded at once, and no more than may wait.
MAX_WARM_UP = 64
# Answers of a server that are compared with those of the bundle.
NUM_COMPARED = 8

Run = Callable[[float, float, int], Awaitable[Samples]]


def measure_engine(
    bundle: Path, config: BenchConfig, texts: Sequence[str] | None, number: int
) -> tuple[dict[str, Any], Model]:
    """Serve a bundle in this process, and ask for what it can.

    Args:
        bundle: its directory.
        config: resolved; without a rate, the highest is searched.
        texts: to decode; None for random sources.
        number: of the process, from 0; each draws an arrival schedule of its own.

    Returns:
        `load_s`, `load_to_first_token_s`, and `cells` or `trials`; and the model.
    """
    # Other selectors wake up to a millisecond late.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(_measure_engine(bundle, config, texts, number))


async def _measure_engine(
    bundle: Path, config: BenchConfig, texts: Sequence[str] | None, number: int
) -> tuple[dict[str, Any], Model]:
    assert config.slots  # resolved
    (cell,), watch, began = config.cells, Watch(), time.monotonic()
    serving = ServingConfig(slots=config.slots, max_num_beams=max(ServingConfig.max_num_beams, config.num_beams))
    options = {name: getattr(config, name) for name in ("backend", "form", "threads", "device", "engine")}
    keys = config.trusted_keys or None
    engine = await Engine(bundle, serving, observer=watch, trusted_keys=keys, **options).start()
    loaded = time.monotonic()
    try:
        sources = _sources(engine.model, config, texts)
        ask = EngineCaller(engine, config.decoding(cell))
        first = await ask(sources[0])
        assert first.first_token

        async def run(rate: float, seconds: float, seed: int) -> Samples:
            watch.restart()
            samples = await open_loop(ask, sources, poisson(rate, seconds, seed))
            watch.add_to(samples, engine.slots)
            return samples

        found = await _found(ask, sources, run, config, number)
    finally:
        await engine.drain(0)
    return {"load_s": loaded - began, "load_to_first_token_s": first.first_token - began, **found}, engine.model


def measure_url(bundle: Path | None, config: BenchConfig, texts: Sequence[str] | None, number: int) -> dict[str, Any]:
    """Ask a running server for what it can.

    Args:
        bundle: that it serves, if it is here: random sources and the comparison of answers need it.
        config: resolved.
        texts: to decode; None for random sources.
        number: of the process, from 0.

    Returns:
        `cells` or `trials`, and `compared`, the number of answers that are those of the bundle.

    Raises:
        BenchError: the server cannot be asked.
        ParityError: the server says something else than the bundle.
    """
    return asyncio.run(_measure_url(bundle, config, texts, number))


async def _measure_url(
    bundle: Path | None, config: BenchConfig, texts: Sequence[str] | None, number: int
) -> dict[str, Any]:
    assert config.url
    (cell,), compared = config.cells, 0
    with closing(HttpClient(config.url, _token(config.token_file))) as client:
        name = config.model or await only_model(client)
        ask, metrics = HttpCaller(client, name, config.decoding(cell)), Metrics(client, name)
        sources: Sequence[Source] = texts or []
        if bundle:
            with load(bundle, trusted_keys=config.trusted_keys or None) as model:
                ids = _sources(model, config, texts)
                sources = shuffled(texts, config.seed) if texts else ids
                if number == 0:
                    compared = await _compare(ask, sources[:NUM_COMPARED], model, ids[:NUM_COMPARED], config)

        async def run(rate: float, seconds: float, seed: int) -> Samples:
            await metrics.look()
            samples = await open_loop(ask, sources, poisson(rate, seconds, seed))
            await metrics.add_to(samples)
            return samples

        found = await _found(ask, sources, run, config, number)
    return {"backend": "http", "model": name, "compared": compared, **found}


def _token(path: str | None) -> str | None:
    """Return the first line of a file with bearer tokens."""
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="ascii").split("\n")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a file of tokens ({error}); give another one") from error
    return lines[0].strip()


async def _compare(
    ask: HttpCaller, sources: Sequence[Source], model: Model, ids: Sequence[Sequence[int]], config: BenchConfig
) -> int:
    said = [await ask.ids(source) for source in sources]
    expected = model.generate_ids(ids, config=config.decoding(config.cells[0]))
    differing = [number for number, (one, (best, *_)) in enumerate(zip(said, expected, strict=True), 1)
                 if tuple(one) != best.token_ids]  # fmt: skip
    if differing:
        raise ParityError(
            f"{config.url}: answer {differing[0]} of {len(said)} is not that of the bundle; give the one that is served"
        )
    return len(said)


async def _found(ask: Ask, sources: Sequence[Source], run: Run, config: BenchConfig, number: int) -> dict[str, Any]:
    """Warm up, and measure at the rate, or search for it."""
    seconds = config.duration
    assert seconds
    await ask(sources[0])  # alone, so that whatever is wrong with it is told
    await open_loop(ask, sources, [0.0] * min(config.slots or MAX_WARM_UP, MAX_WARM_UP))
    if config.rate:
        samples = await run(config.rate, seconds, config.seed + number)
        if not samples.sequences:
            raise BenchError(f"bench: none of {samples.refused + samples.unserved} requests was answered; lower --rate")
        return {"cells": [samples.to_dict()]}
    bound = config.goal_p99
    assert bound

    async def attempt(rate: float) -> Trial:
        length = min(max(seconds, LEAST_REQUESTS / rate), MAX_REQUESTS / rate)
        return judge(rate, await run(rate, length, config.seed), bound)

    clock = asyncio.get_running_loop().time
    began = clock()
    await ask(sources[0])
    return {"trials": [trial.to_dict() for trial in await highest_rate(attempt, 1 / (clock() - began))]}


def _sources(model: Model, config: BenchConfig, texts: Sequence[str] | None) -> list[list[int]]:
    (cell,) = config.cells
    if texts is None:
        return [source for batch in random_batches(model.spec, cell, config.seed) for source in batch]
    return shuffled(encoded(model, texts), config.seed)
