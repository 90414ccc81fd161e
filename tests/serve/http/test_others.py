"""The protocols of OpenAI and LibreTranslate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.serve.http.served import OFFERS, Serve
from tests.serve.http.test_refusals import check
from tfexport.model.model import Model
from tfexport.serve.app import build_app
from tfexport.serve.config import HttpConfig
from tfexport.serve.engine import Engine
from tfexport.serve.metrics import Metrics


async def test_compatible_routes_are_off_by_default(serve: Serve) -> None:
    async with serve(HttpConfig()) as served:
        for path in ("/v1/completions", "/translate"):
            assert (await served.client.post(path, json={})).status_code == 404


async def test_completions(serve: Serve, model: Model, texts: list[str]) -> None:
    asked: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({}, {}),
        ({"temperature": 0, "top_p": 0.5, "top_k": -1, "max_tokens": 4}, {"max_new_tokens": 4}),
        (
            {"temperature": 1.2, "top_p": 0.9, "seed": 4, "n": 2, "logprobs": None, "echo": False},
            {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "top_k": 0, "seed": 4, "num_return_sequences": 2},
        ),
        ({"stop": "-0", "user": "me", "presence_penalty": 0.0}, {"stop_strings": "-0"}),
        ({"ignore_eos": True, "max_tokens": 12}, {"min_new_tokens": 12, "max_new_tokens": 12}),
        ({"num_beams": 3}, {"num_beams": 3}),
    )
    async with serve(OFFERS) as served:
        for data, options in asked:
            answer = await served.client.post("/v1/completions", json={"prompt": texts[:2], "model": "dates"} | data)
            expected = [one for text in texts[:2] for one in model.generate([text], **options)]
            assert [one["text"] for one in answer.json()["choices"]] == [one.text for one in expected], data
            assert [one["index"] for one in answer.json()["choices"]] == list(range(len(expected)))
            usage = answer.json()["usage"]
            assert usage["completion_tokens"] == sum(len(one.token_ids) for one in expected)
            reason = answer.json()["choices"][0]["finish_reason"]
            assert reason == {"eos": "stop", "stop": "stop", "length": "length"}[expected[0].finish_reason]
        assert (await served.client.get("/v1/models")).json()["data"][0]["id"] == "dates"


async def test_completions_in_events(serve: Serve, model: Model, texts: list[str]) -> None:
    async with serve(OFFERS) as served:
        data = {"prompt": texts[0], "stream": True, "stream_options": {"include_usage": True}}
        answer = await served.client.post("/v1/completions", json=data)
        *parts, done = answer.text.split("\n\n")[:-1]
        assert done == "data: [DONE]"
        *chunks, last, usage = [json.loads(part.removeprefix("data: ")) for part in parts]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == model.generate(texts[:1])[0].text
        assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
        assert last["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(chunks) + 1


WRONG_COMPLETIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt": []}, "has 0 prompts, expected 1 to 64"),
    ({"prompt": ["a"] * 65}, "has 65 prompts"),
    ({"prompt": [[5, 6]]}, "prompt is [[5, 6]]"),
    ({"prompt": ["a", "b"], "stream": True}, "has 2 prompts, expected one in a stream"),
    ({"prompt": "a", "stream": "yes"}, "stream is 'yes'"),
    ({"prompt": "a", "stream": True, "stream_options": 5}, "stream_options is 5"),
    ({"prompt": "a", "logprobs": 5}, "logprobs is 5"),
    ({"prompt": "a", "temperature": -1}, "temperature is -1"),
    ({"prompt": "a", "max_tokens": 0}, "max_new_tokens is 0"),
)


async def test_invalid_completions_are_refused(serve: Serve) -> None:
    async with serve(OFFERS) as served:
        for data, why in WRONG_COMPLETIONS:
            answer = await served.client.post("/v1/completions", json=data)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
            assert why in error["message"]
            assert len(answer.content) < 2000
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == len(WRONG_COMPLETIONS)


async def test_translate(serve: Serve, model: Model, texts: list[str]) -> None:
    languages = {"source": "en", "target": "de"}
    best, *others = model.generate(texts[:1], num_beams=3, num_return_sequences=3)
    async with serve(OFFERS) as served:

        async def ask(**data: Any) -> Any:
            return (await served.client.post("/translate", json=languages | data)).json()

        assert await ask(q=texts[0]) == {"translatedText": model.generate(texts[:1])[0].text}
        several = await ask(q=texts[:3], format="text", api_key="")
        assert several == {"translatedText": [model.generate([text])[0].text for text in texts[:3]]}
        assert await ask(q=texts[0], alternatives=2) == {
            "translatedText": best.text,
            "alternatives": [one.text for one in others],
        }
        for data, why in (
            ({}, "missing key q"),
            ({"q": []}, "has 0 texts"),
            ({"q": "a", "format": "html"}, "format is 'html'"),
            ({"q": "a", "alternatives": -1}, "alternatives is -1"),
            ({"q": "a", "alternatives": 10**9}, "num_beams is 1000000001"),
        ):
            check(await served.client.post("/translate", json=languages | data), 400, why)


async def test_translate_takes_forms(serve: Serve, model: Model, texts: list[str]) -> None:
    best, other = model.generate(texts[:1], num_beams=2, num_return_sequences=2)
    async with serve(OFFERS) as served:
        form = {"q": texts[0], "source": "en", "target": "de", "alternatives": "1"}
        answer = await served.client.post("/translate", data=form)
        assert answer.json() == {"translatedText": best.text, "alternatives": [other.text]}
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        for body, why in (
            (b"q=a&q=b&source=en&target=de", "given twice"),
            (b"q=%ff&source=en&target=de", "not a form"),
            (b"q=\xff&source=en&target=de", "not a form"),
            (b"&".join([b"q=a"] * 100_000), "not a form"),
            (b"q=a", "missing key source; missing key target"),
            (b"", "missing key q"),
            (b"q=a&source=en&target=de&alternatives=many", "alternatives is 'many'"),
            (b"q=&source=en&target=de", "empty"),
        ):
            check(await served.client.post("/translate", content=body, headers=headers), 400, why)


async def test_with_several_models_languages_choose_one(dates_bundle: Path) -> None:
    engine = Engine(dates_bundle, threads=1)
    app = build_app({"en-de": engine, "de-en": engine}, OFFERS, Metrics())
    transport = httpx.ASGITransport(app)
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        data = {"q": "3 May 1999", "source": "de", "target": "en"}
        assert (await client.post("/translate", json=data)).status_code == 200
        check(await client.post("/translate", json=data | {"target": "fr"}), 400, "model 'de-fr' does not exist")
        check(await client.post("/tokenize", json={"prompt": "a"}), 404, "model None is unknown")
        assert (await client.get("/v2")).json()["models"] == ["en-de", "de-en"]
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
