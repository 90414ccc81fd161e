"""`align` over HTTP gives what `Model.align` gives, one pair at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.http.served import Served, serving
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.serve._served import MAX_WAITING
from tfexport.serve.config import HttpConfig

SOURCE, TARGET = "Dienstag, 3. März 2026", "2026-03-03"


@pytest.fixture
def aligned(dates_aligned: Path) -> Callable[[Callable[[Served], Awaitable[None]]], None]:
    def run(use: Callable[[Served], Awaitable[None]]) -> None:
        async def within() -> None:
            async with asyncio.timeout(60), serving(dates_aligned) as served:
                await use(served)

        asyncio.run(within())

    return run


@pytest.fixture(scope="module")
def aligning(dates_aligned: Path) -> Model:
    return load(dates_aligned, threads=1)


def test_it_equals_the_model(aligned: Callable[..., None], aligning: Model) -> None:
    assert aligning.tokenizer
    (source_ids,) = aligning.tokenizer.encode([SOURCE])
    (result,) = aligning.generate([SOURCE])
    ids = list(result.token_ids)
    (of_text,), (of_ids,) = aligning.align([SOURCE], [TARGET]), aligning.align_ids([source_ids], [ids])

    async def use(served: Served) -> None:
        for data, expected in (
            ({"text_input": SOURCE, "target_text": TARGET}, of_text),
            ({"text_input": SOURCE, "target_ids": ids}, of_ids),
            ({"input_ids": source_ids, "target_ids": ids}, of_ids),
        ):
            found = await served.post("align", data)
            assert found.json() == {
                "model_name": "dates",
                "model_version": "1",
                "source_ids": list(expected.source_ids),
                "target_ids": list(expected.target_ids),
                "source_tokens": list(expected.source_tokens),
                "target_tokens": list(expected.target_tokens),
                "source_positions": list(expected.source_positions),
                "weights": expected.weights.tolist(),
            }

    aligned(use)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, "expected text_input or input_ids"),
        ({"text_input": SOURCE}, "expected target_text or target_ids"),
        ({"text_input": SOURCE, "target_text": TARGET, "target_ids": [5]}, "one of them"),
        ({"target_text": TARGET}, "expected text_input or input_ids"),
        ({"input_ids": [5], "target_text": TARGET}, "expected with target_ids"),
        ({"text_input": "", "target_text": TARGET}, "source is empty"),
        ({"text_input": SOURCE, "target_text": "1" * 99}, "the limit is 15"),
        ({"text_input": SOURCE, "target_ids": []}, "target"),
        ({"text_input": SOURCE, "target_ids": [388]}, "388"),
        ({"text_input": SOURCE, "target_ids": [-1]}, "-1"),
        ({"text_input": SOURCE, "target_text": 5}, "target_text is 5"),
        ({"text_input": SOURCE, "target_text": TARGET, "x": 1}, "unknown key x"),
    ],
)
def test_what_is_no_pair_is_refused(aligned: Callable[..., None], data: dict[str, Any], told: str) -> None:
    async def use(served: Served) -> None:
        found = await served.post("align", data)
        assert (found.status_code, set(found.json())) == (400, {"error"})
        assert told in found.json()["error"]

    aligned(use)


def test_a_bundle_without_alignment_says_so(serve: Callable[..., None]) -> None:
    async def use(served: Served) -> None:
        found = await served.post("align", {"text_input": SOURCE, "target_text": TARGET})
        assert found.status_code == 404
        assert "exported without alignment; export it again with --alignment" in found.json()["error"]

    serve(use)


def test_one_is_computed_few_wait_and_the_event_loop_goes_on(
    aligned: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, threads = threading.Event(), []
    compute = Model.align

    def slow(self: Model, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        assert go_on.wait(30)
        return compute(self, *arguments)

    monkeypatch.setattr(Model, "align", slow)

    async def use(served: Served) -> None:
        data = {"text_input": SOURCE, "target_text": TARGET}
        tasks = [asyncio.create_task(served.post("align", data)) for _ in range(MAX_WAITING + 3)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        refused = [one.result() for one in done]
        assert {one.status_code for one in refused} == {429}
        assert refused[0].headers["retry-after"] == "1"
        assert (await served.client.get("/livez")).status_code == 200
        while not threads:  # the first may be on its way to its thread
            await asyncio.sleep(0.01)
        assert len(threads) == 1
        assert threads[0] is not threading.current_thread()
        go_on.set()
        codes = [one.status_code for one in await asyncio.gather(*tasks)]
        assert (codes.count(200), codes.count(429)) == (MAX_WAITING + 1, 2)

    aligned(use)


def test_who_drains_aligns_nothing(aligned: Callable[..., None]) -> None:
    async def use(served: Served) -> None:
        await served.engine.drain()
        found = await served.post("align", {"text_input": SOURCE, "target_text": TARGET})
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")

    aligned(use)


def test_every_alignment_is_counted_as_what_became_of_it(
    aligned: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = {"text_input": SOURCE, "target_text": TARGET}
    go_on, compute = threading.Event(), Model.align

    def slow(self: Model, *arguments: Any) -> Any:
        assert go_on.wait(30)
        return compute(self, *arguments)

    async def use(served: Served) -> None:
        def counted(outcome: str) -> float:
            found = [
                sample.value
                for family in served.metrics.registry.collect()
                for sample in family.samples
                if sample.name == "tfexport_requests_total" and sample.labels["outcome"] == outcome
            ]
            return sum(found)

        assert (await served.post("align", pair)).status_code == 200
        assert (await served.post("align", pair | {"x": 1})).status_code == 400
        assert (await served.post("align", pair | {"text_input": ""})).status_code == 400
        with monkeypatch.context() as patch:
            patch.setattr(Model, "align", slow)
            asked = [asyncio.create_task(served.post("align", pair)) for _ in range(MAX_WAITING + 2)]
            (refused,), rest = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert refused.result().status_code == 429
            rest.pop().cancel()
            go_on.set()
            await asyncio.wait(rest)
        assert (await served.post("generate", {"text_input": SOURCE})).status_code == 200
        await served.engine.drain()
        assert (await served.post("align", pair)).status_code == 503
        expected = {"ok": MAX_WAITING + 2, "invalid": 2, "queue_full": 1, "cancelled": 1, "draining": 1}
        assert {outcome: counted(outcome) for outcome in expected} == expected
        assert served.metrics.total("tfexport_requests_total", "dates") == sum(expected.values())
        assert served.metrics.total("tfexport_align_seconds_count", "dates") == MAX_WAITING + 1
        assert served.metrics.total("tfexport_request_seconds_count", "dates") == 1
        (statistics,) = (await served.client.get("/v2/models/dates/stats")).json()["model_stats"]
        assert statistics["inference_stats"]["success"]["count"] == MAX_WAITING + 2
        assert statistics["inference_stats"]["fail"]["count"] == 5

    aligned(use)


def test_an_alignment_that_takes_too_long_is_504(dates_aligned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Model, "align", lambda *_: go_on.wait(30))

    async def use() -> None:
        async with asyncio.timeout(60), serving(dates_aligned, HttpConfig(max_timeout_s=0.1)) as served:
            found = await served.post("align", {"text_input": SOURCE, "target_text": TARGET})
            assert found.status_code == 504
            assert "the 0.1 s of the request were over before it was aligned" in found.json()["error"]
            go_on.set()

    asyncio.run(use())
