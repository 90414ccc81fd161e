"""`align` over HTTP returns the results of `Model.align`."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.serve.http.served import Serve
from tests.serve.served import until
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.serve._served import MAX_WAITING
from tfexport.serve.config import HttpConfig

SOURCE, TARGET = "Dienstag, 3. März 2026", "2026-03-03"


@pytest.fixture(scope="module")
def aligning(dates_aligned: Path) -> Model:
    return load(dates_aligned, threads=1)


async def test_alignments_equal_those_of_the_model(serve: Serve, dates_aligned: Path, aligning: Model) -> None:
    assert aligning.tokenizer
    (source_ids,) = aligning.tokenizer.encode([SOURCE])
    (result,) = aligning.generate([SOURCE])
    ids = list(result.token_ids)
    (of_text,), (of_ids,) = aligning.align([SOURCE], [TARGET]), aligning.align_ids([source_ids], [ids])
    async with serve(bundle=dates_aligned) as served:
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


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "expected either text_input or input_ids"),
    ({"text_input": SOURCE}, "expected either target_text or target_ids"),
    ({"text_input": SOURCE, "target_text": TARGET, "target_ids": [5]}, "expected either"),
    ({"input_ids": [5], "target_text": TARGET}, "expected with target_ids"),
    ({"text_input": "", "target_text": TARGET}, "source is empty"),
    ({"text_input": SOURCE, "target_text": "1" * 99}, "the limit is 15"),
    ({"text_input": SOURCE, "target_ids": []}, "target"),
    ({"text_input": SOURCE, "target_ids": [388]}, "388"),
)


async def test_invalid_pairs_are_refused(serve: Serve, dates_aligned: Path) -> None:
    async with serve(bundle=dates_aligned) as served:
        for data, problem in WRONG:
            found = await served.post("align", data)
            assert (found.status_code, set(found.json())) == (400, {"error"})
            assert problem in found.json()["error"]


async def test_a_bundle_without_alignment_is_refused(serve: Serve) -> None:
    async with serve() as served:
        found = await served.post("align", {"text_input": SOURCE, "target_text": TARGET})
        assert found.status_code == 404
        assert "exported without alignment; export it again with --alignment" in found.json()["error"]


async def test_every_alignment_is_counted_by_its_outcome(
    serve: Serve, dates_aligned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = {"text_input": SOURCE, "target_text": TARGET}
    go_on, threads, compute = threading.Event(), list[threading.Thread](), Model.align

    def slow(self: Model, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        assert go_on.wait(30)
        return compute(self, *arguments)

    async with serve(bundle=dates_aligned) as served:

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
            assert (refused.result().status_code, refused.result().headers["retry-after"]) == (429, "1")
            assert (await served.client.get("/livez")).status_code == 200  # the event loop goes on
            await until(lambda: bool(threads))
            assert len(threads) == 1
            rest.pop().cancel()
            go_on.set()
            await asyncio.wait(rest)
        assert (await served.post("generate", {"text_input": SOURCE})).status_code == 200
        await served.engine.drain()
        drained = await served.post("align", pair)
        assert (drained.status_code, drained.headers["retry-after"]) == (503, "1")
        expected = {"ok": MAX_WAITING + 2, "invalid": 2, "queue_full": 1, "cancelled": 1, "draining": 1}
        assert {outcome: counted(outcome) for outcome in expected} == expected
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == sum(expected.values())
        assert served.metrics.measured().total("tfexport_align_seconds_count", "dates") == MAX_WAITING + 1
        assert served.metrics.measured().total("tfexport_request_seconds_count", "dates") == 1
        (statistics,) = (await served.client.get("/v2/models/dates/stats")).json()["model_stats"]
        assert statistics["inference_stats"]["success"]["count"] == MAX_WAITING + 2
        assert statistics["inference_stats"]["fail"]["count"] == 5


async def test_an_alignment_that_takes_too_long_is_504(
    serve: Serve, dates_aligned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Model, "align", lambda *_: go_on.wait(30))
    async with serve(HttpConfig(max_timeout_s=0.1), bundle=dates_aligned) as served:
        found = await served.post("align", {"text_input": SOURCE, "target_text": TARGET})
        assert found.status_code == 504
        assert "the time limit of 0.1 s was exceeded before the alignment" in found.json()["error"]
        go_on.set()
