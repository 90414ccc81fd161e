"""`generate` and `generate_stream` return the results of `Model.generate`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.meetings import SAID, TEXTS
from tests.serve.http.served import OFFERS, Serve
from tests.serve.http.test_refusals import check
from tests.serve.served import before_steps
from tfexport.decode.loop import Loop
from tfexport.errors import BackendError
from tfexport.model.model import Model

COPY = {"replace_unknowns": True}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"max_new_tokens": 4},
    {"do_sample": True, "temperature": 1.3, "seed": 5, "num_return_sequences": 2},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 4, "length_penalty": 0.3, "early_stopping": "never"},
    {"repetition_penalty": 1.4, "suppress_tokens": [20], "bad_words_ids": [[8, 11]]},
    {"sequence_bias": [[[13, 11], -2.5], [[8], 3]], "exponential_decay_length_penalty": [4, 1.5]},
    {"return_alternatives": True, "num_return_sequences": 3},
    {"stop_strings": ["-0"]},
)


def events(body: str) -> list[dict[str, Any]]:
    assert body.endswith("\n\n")
    lines = body[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_answers_are_those_of_generate(serve: Serve, model: Model, texts: list[str]) -> None:
    async with serve() as served:

        async def ask(text: str, options: dict[str, Any]) -> None:
            answer = await served.post("generate", {"text_input": text, "parameters": options})
            assert answer.status_code == 200, answer.text
            expected = model.generate([text], **options)
            outputs = {
                "text_output": [one.text for one in expected],
                "output_ids": [list(one.token_ids) for one in expected],
                "scores": [pytest.approx(one.score, abs=1e-5) for one in expected],
                "finish_reason": [one.finish_reason for one in expected],
            }
            is_one = options.get("num_return_sequences", 1) == 1
            fields = {name: values[0] if is_one else values for name, values in outputs.items()}
            assert answer.json() == {"model_name": "dates", "model_version": "1"} | fields

        await asyncio.gather(*(ask(text, KINDS[index % len(KINDS)]) for index, text in enumerate(texts[:40])))


async def test_scores_can_be_left_out(serve: Serve, model: Model, texts: list[str]) -> None:
    async with serve() as served:
        for kind in ({}, {"num_beams": 3, "num_return_sequences": 2}):
            data = {"text_input": texts[0], "parameters": {**kind, "return_scores": False}}
            answer, streamed = await served.post("generate", data), await served.post("generate_stream", data)
            expected = [one.text for one in model.generate(texts[:1], **kind)]  # type: ignore[arg-type]
            assert answer.json()["text_output"] == (expected if kind else expected[0])
            assert "scores" not in answer.json()
            assert kind or "scores" not in events(streamed.text)[-1]


async def test_ids_prefix_id_and_version(serve: Serve, model: Model, texts: list[str]) -> None:
    assert model.tokenizer
    (source,) = model.tokenizer.encode(texts[:1])
    (expected,) = model.generate_ids([source], prefixes=[[13, 11]])[0]
    async with serve() as served:
        answer = await served.post("generate", {"input_ids": source, "parameters": {"prefix": [13, 11]}, "id": "a"})
        assert answer.json()["output_ids"] == list(expected.token_ids)
        assert answer.json()["id"] == "a"
        assert "text_output" not in answer.json()
        data = {"text_input": texts[0], "parameters": {"prefix": "20", "priority": 3, "timeout_ms": 10_000.5}}
        answer = await served.post("versions/1/generate", data)
        assert answer.json()["text_output"] == model.generate(texts[:1], prefixes=["20"])[0].text


@pytest.mark.parametrize("options", [{}, {"prefix": "20"}, {"do_sample": True, "seed": 7}, {"stop_strings": "-0"}])
async def test_pieces_of_a_stream_are_the_text(
    serve: Serve, model: Model, texts: list[str], options: dict[str, Any]
) -> None:
    given = {name: value for name, value in options.items() if name != "prefix"}
    expected = [model.generate([text], prefixes=[options.get("prefix", "")], **given)[0] for text in texts[:8]]
    async with serve() as served:
        asked = (served.post("generate_stream", {"text_input": text, "parameters": options}) for text in texts[:8])
        for answer, one in zip(await asyncio.gather(*asked), expected, strict=True):
            assert answer.headers["content-type"].startswith("text/event-stream")
            pieces = events(answer.text)
            assert "".join(piece["text_output"] for piece in pieces) == one.text
            assert all("finish_reason" not in piece for piece in pieces[:-1])
            assert pieces[-1]["finish_reason"] == one.finish_reason
            assert pieces[-1]["output_ids"] == list(one.token_ids)
            assert pieces[-1]["scores"] == pytest.approx(one.score, abs=1e-5)


async def test_ids_are_streamed_one_by_one(serve: Serve, model: Model, texts: list[str]) -> None:
    assert model.tokenizer
    (source,) = model.tokenizer.encode(texts[:1])
    async with serve() as served:
        *ids, last = events((await served.post("generate_stream", {"input_ids": source})).text)
        assert [one["output_ids"] for one in ids] == [[token] for token in last["output_ids"]]
        assert tuple(last["output_ids"]) == model.generate_ids([source])[0][0].token_ids


async def test_after_the_first_event_errors_are_events(
    serve: Serve, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def fail_late(loop: Loop) -> None:
        steps.append(loop)
        if len(steps) > 3:
            raise BackendError("the backend has failed")

    async with serve() as served:
        before_steps(monkeypatch, fail_late)
        answer = await served.post("generate_stream", {"text_input": texts[0]})
        assert answer.status_code == 200
        *pieces, last = answer.text.split("\n\n")[:-1]
        assert all("text_output" in piece for piece in pieces)
        assert len(pieces) == 3
        assert last == 'event: error\ndata: {"error": "the engine has failed: the backend has failed; restart it"}'
        answer = await served.post("generate", {"text_input": texts[0]})
        assert (answer.status_code, "has failed" in answer.json()["error"]) == (500, True)
        assert (await served.client.get("/v2/models/dates/ready")).status_code == 503


async def test_tokens_are_those_of_the_model(serve: Serve, model: Model, texts: list[str]) -> None:
    assert model.tokenizer
    (source,) = model.tokenizer.encode(texts[:1])
    (answer,) = model.generate(texts[:1])
    async with serve() as served:
        found = await served.client.post("/tokenize", json={"prompt": texts[0]})
        assert found.json() == {"tokens": source, "count": len(source), "max_model_len": 64}
        found = await served.client.post("/detokenize", json={"model": "dates", "tokens": list(answer.token_ids)})
        assert found.json() == {"prompt": answer.text}


async def test_text_that_cannot_be_tokenized_is_refused(serve: Serve) -> None:
    async with serve() as served:
        for path, data, status, why in (
            ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model 'other' is unknown"),
            ("/tokenize", {"prompt": "a", "model": 5}, 400, "model is 5"),
            ("/tokenize", {"prompt": 5}, 400, "prompt is 5"),
            ("/tokenize", {"prompt": "a" * 100_000}, 400, "the text has 100000 characters"),
            ("/detokenize", {"tokens": "a"}, 400, "tokens is 'a'"),
            ("/detokenize", {"tokens": [-1]}, 400, "tokens has -1"),
            ("/detokenize", {"tokens": [10**6]}, 400, "tokens has 1000000"),
        ):
            check(await served.client.post(path, json=data), status, why)


async def test_each_endpoint_replaces_unknowns(serve: Serve, meetings: Path) -> None:
    async with serve(OFFERS, bundle=meetings) as served:
        for text, expected in zip(TEXTS, SAID, strict=True):
            answer = await served.post("generate", {"text_input": text, "parameters": COPY})
            assert answer.json()["text_output"] == expected
        inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}]
        answer = await served.post("infer", {"inputs": inputs, "parameters": COPY})
        outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
        assert outputs["text_output"] == SAID
        answer = await served.client.post("/v1/completions", json={"prompt": TEXTS} | COPY)
        assert [choice["text"] for choice in answer.json()["choices"]] == SAID
