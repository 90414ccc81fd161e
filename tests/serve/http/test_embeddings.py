"""`/v1/embeddings` of an encoder-only bundle returns the vectors of `Model.embed`."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.serve.http.served import serving
from tests.serve.http.test_refusals import check
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.serve.config import HttpConfig

ENCODER = ROOT / "tests" / "data" / "earlier" / "encoder"
TEXTS = ["w7 w8 w9", "w5", "w6 w7"]


@pytest.fixture(scope="module")
def encoder() -> Iterator[Model]:
    with load(ENCODER, threads=1) as model:
        yield model


async def test_every_kind_of_input_gets_the_vectors_of_the_model(encoder: Model) -> None:
    ids = encoder.source_ids(TEXTS)
    async with serving(ENCODER) as served:
        for given, sources in ((TEXTS, ids), (TEXTS[0], ids[:1]), (ids, ids), (ids[1], ids[1:2])):
            for kind in ("float", "base64"):
                data = {"model": "dates", "input": given, "encoding_format": kind, "user": "me"}
                found = (await served.client.post("/v1/embeddings", json=data)).json()
                assert (found["object"], found["model"]) == ("list", "dates")
                assert found["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, sources)))
                assert [one["index"] for one in found["data"]] == list(range(len(sources)))
                vectors = [one["embedding"] for one in found["data"]]
                if kind == "base64":
                    vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
                np.testing.assert_allclose(vectors, encoder.embed(sources), rtol=1e-5, atol=1e-6)
        assert served.metrics.measured().total("tfexport_request_seconds_count", "dates") == 8
        assert (await served.client.get("/readyz")).status_code == 200
        assert "encoder" in (await served.client.get("/page/models")).text


WRONG: tuple[tuple[Any, str], ...] = (
    ({}, "missing key input"),
    ({"input": []}, "has 0 inputs"),
    ({"input": ["w5"] * 65}, "has 65 inputs"),
    ({"input": ["w5", [5]]}, "input"),
    ({"input": [5, True]}, "input"),
    ({"input": ["w5", ""]}, "text 2 is empty"),
    ({"input": [[5], []]}, "text 2: the source is empty"),
    ({"input": [[5], [-1], [10**9]]}, "text 3: source has 1000000000"),
    ({"input": [5] * 10_000}, "the limit is"),
    ({"input": "w5", "encoding_format": "int8"}, "encoding_format is 'int8'"),
    ({"input": "w5", "model": "other"}, "model 'other' is unknown"),
)


async def test_bad_input_is_refused_and_counted() -> None:
    async with serving(ENCODER) as served:
        for data, why in WRONG:
            error = (answer := await served.client.post("/v1/embeddings", json=data)).json()["error"]
            assert (answer.status_code, error["type"]) == (400 + 4 * ("model" in data), "invalid_request_error")
            assert why in error["message"]
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == len(WRONG) - 1
        check(await served.post("generate", {"text_input": "w5"}), 400, "no decoder")
    async with serving(ENCODER.with_name("fp32")) as served:
        answer = await served.client.post("/v1/embeddings", json={"input": "w5"})
        assert (answer.status_code, "use generate" in answer.json()["error"]["message"]) == (400, True)


async def test_full_late_and_draining(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, embed = threading.Event(), Model.embed

    def slow(self: Model, *arguments: Any, **options: Any) -> Any:
        assert go_on.wait(30)
        return embed(self, *arguments, **options)

    async with serving(ENCODER, HttpConfig(max_timeout_s=0.5), max_waiting=1) as served:
        monkeypatch.setattr(Model, "embed", slow)
        asked = [served.client.post("/v1/embeddings", json={"input": "w5"}) for _ in range(3)]
        assert sorted(answer.status_code for answer in await asyncio.gather(*asked)) == [429, 504, 504]
        go_on.set()
        assert (await served.client.post("/v1/embeddings", json={"input": "w5"})).status_code == 200
        await served.engine.drain()
        assert (await served.client.post("/v1/embeddings", json={"input": "w5"})).status_code == 503
