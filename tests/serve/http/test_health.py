"""Health endpoints while engines load, hang, fail and stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.serve.http.served import Serve
from tests.serve.served import Hanging, before_steps, until
from tfexport.decode.loop import Loop
from tfexport.serve.app import build_app
from tfexport.serve.engine import Engine

LIVE, READY = ("/livez", "/v2/health/live"), ("/readyz", "/v2/health/ready", "/health")
ASKED = {"text_input": "3 May 1999"}


async def codes(client: httpx.AsyncClient, paths: tuple[str, ...]) -> set[int]:
    return {(await client.get(path)).status_code for path in paths}


async def test_a_failed_model_makes_the_process_unhealthy(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Loop) -> None:
        raise MemoryError("out of memory")

    one, two = Engine(dates_bundle, threads=1), Engine(dates_bundle, threads=1)
    transport = httpx.ASGITransport(build_app({"one": one, "two": two}))
    async with one, two, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        with monkeypatch.context() as patch:
            before_steps(patch, broken)
            assert (await client.post("/v2/models/one/generate", json=ASKED)).status_code == 500
        assert await codes(client, LIVE) == await codes(client, READY) == {503}
        answer = await client.get("/livez")
        assert answer.headers["retry-after"] == "1"
        assert "an engine has failed; see the log, and restart the process" in answer.json()["error"]
        ready = [await codes(client, (f"/v2/models/{name}/ready",)) for name in ("one", "two")]
        assert ready == [{503}, {200}]
        assert (await client.post("/v2/models/two/generate", json=ASKED)).json()["text_output"] == "1999-05-03"
        await one.replace()
        assert await codes(client, LIVE) == await codes(client, READY) == {200}


async def test_a_model_reports_its_status(serve: Serve) -> None:
    async with serve() as served:
        parameters = (await served.client.get("/v2/models/dates")).json()["parameters"]
        manifest = served.engine.model.manifest
        assert manifest is not None
        assert parameters["max_source_length"] == manifest.spec.max_source_length
        assert (parameters["status"], parameters["proof"]) == manifest.proof


async def test_a_thread_that_hangs_is_not_ready_and_after_a_time_not_alive(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(stall_s=0.2, hang_s=1.2) as served:
        hanging = Hanging(monkeypatch)
        asked = asyncio.ensure_future(served.post("generate", ASKED))
        await until(lambda: hanging.has_begun() and not served.engine.is_ready)
        assert (await codes(served.client, READY), await codes(served.client, LIVE)) == ({503}, {200})
        await until(lambda: not served.engine.is_alive)
        assert await codes(served.client, LIVE) == {503}
        hanging.end()
        assert (await asked).status_code == 200
        await until(lambda: served.engine.is_ready)
        assert (await codes(served.client, READY), await codes(served.client, LIVE)) == ({200}, {200})


async def test_an_engine_that_is_not_running_is_alive(dates_bundle: Path) -> None:
    engine = Engine(dates_bundle, threads=1)
    transport = httpx.ASGITransport(build_app({"dates": engine}))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await codes(client, LIVE), await codes(client, READY)) == ({200}, {503})
        async with engine:
            assert (await codes(client, LIVE), await codes(client, READY)) == ({200}, {200})
        assert (await codes(client, LIVE), await codes(client, READY)) == ({200}, {503})
