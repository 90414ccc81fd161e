"""Run `tfexport bench`: check the bundle, measure in new processes, report."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from tfexport._io.extras import extra_command
from tfexport._io.process import ProcessError, call_in_process
from tfexport._io.signature import TrustedKeys
from tfexport.bench._loops import clock, closed_loop, encoded, random_batches, text_batches, timed_call
from tfexport.bench._report import build_result
from tfexport.bench._server import measure_engine, measure_url
from tfexport.bench.config import BenchConfig, resolve
from tfexport.bench.machine import environment, peak_memory_bytes
from tfexport.bench.trace import trace_calls
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.errors import BackendError, BenchError, InputError, ParityError
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.runtime import registry
from tfexport.runtime.cpu import available_cores
from tfexport.runtime.registry import AUTO

MAX_TEXTS = 10_000
_WARM_UP_S = 0.5  # maximum time of warm-up before the first window
_MAX_S = 24 * 3600.0  # time limit of a process


def bench_bundle(
    path: Path | None,
    config: BenchConfig,
    *,
    texts: Sequence[str] | None = None,
    verify: bool = True,
    against: str | None = None,
    write_trace: Callable[[dict[str, Any]], None] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure a bundle, or a server that serves one; return the report as JSON values.

    With `verify`, raise if the bundle differs from the eager model, or the server from the bundle. `write_trace` is
    called with a Chrome trace of one batch of every cell, which is decoded once more after the measurement.
    """
    keys = TrustedKeys.read(config.trusted_keys) if config.trusted_keys else None
    bundle = None if path is None else open_bundle(path, trusted_keys=keys)
    _check(bundle, config, texts)
    if write_trace and config.url:
        raise InputError("bench: --profile decodes a bundle in this process; leave out --url")
    if config.url:
        import httpx  # noqa: F401 - if it is missing, fail before a process starts
    resolved = resolve(config, bundle.manifest.spec if bundle else None, has_texts=texts is not None)
    folder = bundle.path if bundle and (verify or texts is None or not config.url) else None
    parity: dict[str, Any] = {"passed": None, "source": "not checked"}
    if bundle and verify and not config.url:
        parity = check_parity(bundle, config, report, against)
    results = []
    for number in range(resolved.processes):
        report(f"measuring, process {number + 1} of {resolved.processes}")
        results.append(run_process(folder, resolved, texts, number))
    if compared := results[0].get("compared"):
        parity = {"passed": True, "source": f"{compared} answers equal those of the bundle"}
    about: dict[str, Any] = {"bundle": {"name": results[0].get("model"), "sha256": None, "precision": None}}
    if bundle and path:
        accuracy = bundle.manifest.accuracy
        about["bundle"] = {"name": path.resolve().name, "sha256": bundle.sha256, "precision": accuracy}
    if write_trace and bundle:
        write_trace(trace_calls(bundle, resolved, texts, report))
    digest = None if texts is None else sha256("\n".join(texts).encode()).hexdigest()
    about["input"] = None if texts is None else {"texts": len(texts), "sha256": digest}
    about["environment"] = environment(results[0].get("threads", available_cores()))
    return build_result(resolved, results, about, parity)


def _check(bundle: Bundle | None, config: BenchConfig, texts: Sequence[str] | None) -> None:
    if bundle is None and config.url is None:
        raise InputError("bench: neither a bundle nor a server; pass BUNDLE or --url")
    if bundle is None and texts is None:
        raise InputError("bench: sources are missing; set --input, or pass the served bundle for random sources")
    if bundle and not bundle.manifest.spec.has_decoder:
        raise InputError(f"{bundle.path}: is encoder-only and generates no text; bench measures generation")
    if bundle and config.url and not bundle.manifest.spec.source_vocab:
        raise InputError(f"{bundle.path}: reads features, and --url sends texts or token ids; leave out --url")
    if texts is not None and len(texts) > MAX_TEXTS:
        raise InputError(f"bench: {len(texts)} texts are above the limit of {MAX_TEXTS}; use a sample of them")


def check_parity(
    bundle: Bundle, config: BenchConfig, report: Callable[[str], None], against: str | None = None
) -> dict[str, Any]:
    """Verify a bundle unless its export did; return the report's `parity` entry."""
    summary = bundle.manifest.parity
    if summary is not None and not summary["passed"]:
        raise ParityError(f"{bundle.path}: its export failed the parity checks; export it again")
    options = registry.LoadOptions(variant=config.variant, device=config.device, engine=config.engine)
    backend = registry.choose(bundle, options) if config.backend == AUTO else registry.get(config.backend)
    exported_on, compared = registry.comparable()[0], backend in registry.comparable()
    # The verification of an export compares its backend with the eager model, so it covers both.
    if summary is not None and config.device == "cpu" and (backend == exported_on or not compared):
        return {"passed": True, "source": "checked by its export"}
    try:
        from tfexport.verify import VerifyConfig, verify_bundle

        verification = verify_bundle(
            bundle.path,
            against=against,
            config=VerifyConfig.quick(),
            backend=backend.name if compared else exported_on.name,
            device=config.device,
            engine=config.engine,
            trusted_keys=config.trusted_keys or None,
            report=report,
        )
    except ModuleNotFoundError as error:
        problem = f"was exported without verification, and verifying it needs {error.name}"
        remedy = f"{extra_command('export')}, or measure it with --no-verify"
        raise BackendError(f"{bundle.path}: {problem}; {remedy}") from error
    if not verification.passed:
        raise ParityError(f"{bundle.path}: {'; '.join(verification.problems())}; fix it before measuring")
    return {"passed": True, "source": "checked before measuring"}


def run_process(bundle: Path | None, config: BenchConfig, texts: Sequence[str] | None, number: int) -> dict[str, Any]:
    """Call `measure` in a new process; raise `BenchError` if the process dies."""
    arguments, data = (bundle and str(bundle), config.to_dict(), number, os.getpid()), json.dumps(texts).encode()
    try:
        result = call_in_process(f"{__name__}:_measure_in_process", *arguments, wall_s=_MAX_S, data=data)
    except ProcessError as error:
        problem = f"bench: process {number + 1} {error}"
        raise BenchError(f"{problem}; try a smaller --batch-size, or tfexport doctor") from error
    return dict(result)


def _measure_in_process(bundle: str | None, config: dict[str, Any], number: int, parent: int, texts: bytes) -> Any:
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    return measure(Path(bundle) if bundle else None, BenchConfig.from_dict(config), json.loads(texts), number)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def measure(bundle: Path | None, config: BenchConfig, texts: list[str] | None, number: int) -> dict[str, Any]:
    """Measure every cell of a bundle or server, in process `number`."""
    if config.url:
        return asyncio.run(measure_url(bundle, config, texts, number))
    assert bundle
    if config.scenario == "server":
        # Other selectors wake up to a millisecond late.
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
            result, model = runner.run(measure_engine(bundle, config, texts, number))
    else:
        result, model = _measure_calls(bundle, config, texts)
    threads = model.threads.decoder if model.threads else available_cores()
    about = {"backend": model.session.backend, "threads": threads, "peak_memory_bytes": peak_memory_bytes()}
    return about | result


def _measure_calls(bundle: Path, config: BenchConfig, texts: list[str] | None) -> tuple[dict[str, Any], Model]:
    load_s, model = clock(lambda: load(bundle, **config.load_options))
    sources = None if texts is None else encoded(model, texts)
    first_token_s, cells = None, []
    for cell in config.cells:
        assert config.duration  # resolved
        assert cell.batch_size
        call = partial(timed_call, model.session, config.decoding(cell))
        if sources is None:
            batches = random_batches(model.spec, cell, config.seed)
        else:
            batches = text_batches(sources, cell.batch_size, config.seed)
        first = call(batches[0])
        first_token_s = first_token_s or load_s + first.first_token - first.began
        closed_loop(call, batches, min(_WARM_UP_S, config.duration / 5))
        cells.append(closed_loop(call, batches, config.duration).to_dict())
    return {"load_s": load_s, "load_to_first_token_s": first_token_s, "cells": cells}, model
