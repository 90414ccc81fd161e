"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Callable

from tests.serve.http.served import Served
from tests.serve.http.test_refusals import check
from tfexport.model.model import Model


def test_tokens_are_those_of_the_model(serve: Callable[..., None], model: Model, texts: list[str]) -> None:
    assert model.tokenizer
    (source,) = model.tokenizer.encode(texts[:1])
    (answer,) = model.generate(texts[:1])

    async def use(served: Served) -> None:
        found = await served.client.post("/tokenize", json={"prompt": texts[0]})
        assert found.json() == {"tokens": source, "count": len(source), "max_model_len": 64}
        found = await served.client.post("/detokenize", json={"model": "dates", "tokens": list(answer.token_ids)})
        assert found.json() == {"prompt": answer.text}

    serve(use)


def test_what_is_refused(serve: Callable[..., None]) -> None:
    async def use(served: Served) -> None:
        for path, data, status, why in (
            ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model 'other' is unknown"),
            ("/tokenize", {"prompt": "a", "model": 5}, 400, "model is 5"),
            ("/tokenize", {}, 400, "missing key prompt"),
            ("/tokenize", {"tokens": []}, 400, "unknown key tokens"),
            ("/tokenize", {"prompt": 5}, 400, "prompt is 5"),
            ("/tokenize", {"prompt": "a" * 100_000}, 400, "the text has 100000 characters"),
            ("/detokenize", {"tokens": "a"}, 400, "tokens is 'a'"),
            ("/detokenize", {"tokens": [-1]}, 400, "tokens has -1"),
            ("/detokenize", {"tokens": [10**6]}, 400, "tokens has 1000000"),
        ):
            check(await served.client.post(path, json=data), status, why)

    serve(use)
