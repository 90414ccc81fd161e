"""One engine with a replica on each device spreads requests, survives the failure of one, and reloads all."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.command import refuses, run
from tests.serve.running import running
from tests.serve.served import before_steps, is_idle, serving, text_of, until
from tfexport.decode.loop import Loop
from tfexport.errors import BackendError, ConfigError, EngineFailed, InputError
from tfexport.model.model import Model
from tfexport.serve import engine as engine_module
from tfexport.serve.app import build_app
from tfexport.serve.engine import Engine
from tfexport.serve.metrics import Metrics

TWO = {"device": "cpu,cpu"}

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


async def test_every_answer_is_that_of_one_model(dates_bundle: Path, model: Model, texts: list[str]) -> None:
    kinds: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"do_sample": True, "seed": 7}]
    expected = [text_of(model.generate([text], **options)) for text in texts for options in kinds]
    async with serving(dates_bundle, options=TWO, slots=8) as engine:
        assert (engine.num_replicas, engine.num_replicas_ready, engine.slots) == (2, 2, 16)
        asked = [engine.generate(text, **options) for text in texts for options in kinds]
        assert [text_of(found) for found in await asyncio.gather(*asked)] == expected
        await until(lambda: is_idle(engine))


async def test_requests_go_to_the_replica_with_the_fewest_rows(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    before_steps(monkeypatch, lambda _: go_on.wait(60))
    async with serving(dates_bundle, options=TWO, slots=4) as engine:

        def loads() -> list[int]:
            return [served.load for served in engine._served]

        asked = [engine.submit(texts[0], num_beams=4)]
        assert loads() == [4, 0]
        asked += [engine.submit(text) for text in texts[1:4]]
        assert loads() == [4, 3], "four beams are as much as four requests"
        asked += [engine.submit(text) for text in texts[4:6]]
        assert loads() == [5, 4]
        assert (engine.num_waiting + engine.num_running, engine.num_slots_used <= 8) == (6, True)
        with pytest.raises(InputError, match="the engine has 4"):
            engine.submit(texts[0], num_beams=5)
        go_on.set()
        await asyncio.gather(*asked)
        assert loads() == [0, 0]


async def test_after_a_failure_the_other_replica_answers(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[Loop] = []

    def fail(loop: Loop) -> None:
        if not broken or loop in broken:
            broken.append(loop)
            raise MemoryError("out of memory")

    metrics = Metrics()
    engine = Engine(dates_bundle, observer=metrics.observer("dates"), threads=1, **TWO)
    transport = httpx.ASGITransport(build_app({"dates": engine}, None, metrics))
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        with monkeypatch.context() as patch:
            before_steps(patch, fail)
            with pytest.raises(EngineFailed):
                await engine.generate(texts[0])
            for text in texts[:3]:
                assert await engine.generate(text)
        assert (engine.state, engine.is_ready, engine.is_alive) == ("ready", True, False)
        codes = [(await client.get(path)).status_code for path in ("/readyz", "/livez", "/v2/models/dates/ready")]
        assert codes == [200, 503, 200]
        gauges = (await client.get("/metrics")).text.splitlines()
        assert 'tfexport_replicas{model="dates"} 2.0' in gauges
        assert 'tfexport_replicas_ready{model="dates"} 1.0' in gauges
        await engine.replace()
        assert (engine.is_alive, engine.num_replicas_ready) == (True, 2)


async def test_a_reload_replaces_all_and_answers_what_was_accepted(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    async with serving(dates_bundle, options=TWO) as engine:
        before_steps(monkeypatch, lambda _: go_on.wait(60))
        old, asked = engine._served, [engine.submit(text) for text in texts[:4]]
        monkeypatch.setattr(engine_module, "prepare", lambda model, slots: None)  # which would wait too
        replaced = asyncio.create_task(engine.replace())
        await until(lambda: len(engine._all_served) == 4, within_s=30)
        asked += [engine.submit(text) for text in texts[4:8]]
        assert [served.load for served in (*old, *engine._served)] == [2, 2, 2, 2]
        go_on.set()
        assert all(await asyncio.gather(*asked))
        await replaced
        assert len(engine._all_served) == 2
        assert all(not served.model.session._is_open for served in old)  # type: ignore[attr-defined]


async def test_nothing_is_left_if_one_device_cannot_load(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Model] = []
    close = Model.close
    monkeypatch.setattr(Model, "close", lambda model: (closed.append(model), close(model))[1])
    engine = Engine(dates_bundle, backend="ort", threads=1, device="cpu,cuda:7")
    with pytest.raises(BackendError):
        await engine.start()
    assert len(closed) == 1
    with pytest.raises(ConfigError, match="device is ''"):
        await Engine(dates_bundle, device="cpu,").start()


def test_the_server_spreads_requests(dates_bundle: Path, texts: list[str], tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, "--device", "cpu,cpu", "--threads", "1") as server:
        assert "64 slots, replicas on cpu, cpu;" in server.lines[1]
        answers = Counter(server.ask(text).status_code for text in texts[:4])
        assert answers == {200: 4}
        assert server.metric(r'tfexport_replicas_ready\{model="dates"\}') == 2
        assert server.stop() == 0


def test_devices_are_checked(dates_bundle: Path) -> None:
    refuses(run("serve", dates_bundle, "--device", "cpu,gpu"), "'gpu' is not")
    refuses(run("generate", dates_bundle, "x", "--device", "cpu,cpu"), "'cpu,cpu' is not")
