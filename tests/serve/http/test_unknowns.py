"""`replace_unknowns` over HTTP: each endpoint that answers texts takes it, and says where it cannot be had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.meetings import SAID, TEXTS
from tests.serve.http.served import Served, serving
from tfexport.serve.config import HttpConfig

COPY = {"replace_unknowns": True}


def test_each_endpoint_takes_it(meetings: Path) -> None:
    async def use() -> None:
        async with asyncio.timeout(60), serving(meetings, HttpConfig(completions=True)) as served:
            for text, said in zip(TEXTS, SAID, strict=True):
                answer = await served.post("generate", {"text_input": text, "parameters": COPY})
                assert answer.json()["text_output"] == said
            inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}]
            answer = await served.post("infer", {"inputs": inputs, "parameters": COPY})
            outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
            assert outputs["text_output"] == SAID
            answer = await served.client.post("/v1/completions", json={"prompt": TEXTS} | COPY)
            assert [choice["text"] for choice in answer.json()["choices"]] == SAID

    asyncio.run(use())


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("generate", "replace_unknowns: this bundle was exported without alignment; export it again with --alignment"),
        ("generate_stream", "stream: replace_unknowns is true, but the alignment is known when the text is whole"),
    ],
)
def test_where_it_cannot_be_had(serve: Callable[..., None], path: str, why: str) -> None:
    async def use(served: Served) -> None:
        answer = await served.post(path, {"text_input": TEXTS[0], "parameters": COPY})
        assert answer.status_code == 400
        assert why in answer.json()["error"]

    serve(use)
