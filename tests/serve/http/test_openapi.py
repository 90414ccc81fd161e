"""The document says what the app does: each route, each option, each status."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.routing import Route

from tests.serve.http.served import Served
from tfexport.serve.http.app import build_app
from tfexport.serve.http.config import HttpConfig
from tfexport.serve.http.openapi import document
from tfexport.serve.metrics import Metrics
from tfexport.serve.protocol.options import DECODING
from tfexport.serve.protocol.outputs import OUTPUTS
from tfexport.serve.protocol.sources import INPUTS

METHODS = {"get", "post", "put", "delete", "patch"}


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        part = list(part.values())
    if isinstance(part, list):
        for one in part:
            yield from references(one)


def test_paths_and_methods_are_those_of_the_app() -> None:
    app = build_app({}, HttpConfig(completions=True, translate=True, ui=False), Metrics())
    routes = {
        (route.path, method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    }
    paths = json.loads(document())["paths"]
    assert {(path, method) for path, item in paths.items() for method in item if method in METHODS} == routes
    names = [item[method]["operationId"] for item in paths.values() for method in item if method in METHODS]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere() -> None:
    data = json.loads(document())
    for reference in set(references(data)):
        part = data
        for key in reference.removeprefix("#/").split("/"):
            part = part[key]
        assert part


def test_every_option_input_and_output_is_described() -> None:
    schemas = json.loads(document())["components"]["schemas"]
    options = set(schemas["Parameters"]["properties"])
    assert options == {*DECODING, "prefix", "priority", "timeout_ms", "timeout"}
    assert all(name in schemas["InferRequest"]["description"] for name in INPUTS)
    assert all(name in schemas["InferResponse"]["description"] for name in OUTPUTS)


def test_it_is_served_as_it_lies_there(serve: Callable[..., None]) -> None:
    async def use(served: Served) -> None:
        answer = await served.client.get("/openapi.json")
        assert (answer.content, answer.headers["content-type"]) == (document(), "application/json")

    serve(use)
