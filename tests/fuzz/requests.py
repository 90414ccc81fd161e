"""HTTP requests with damaged bodies, headers, query strings and paths, to the app in this process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from starlette.applications import Starlette

from tests.fuzz.mutations import mutated, mutated_json
from tfexport.errors import InputError
from tfexport.serve.app import build_app
from tfexport.serve.config import HttpConfig, ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.metrics import Metrics

TEXTS = ["3 May 1999", "29 Ekim 1923"]
MAX_ERROR_BYTES, TIMEOUT_S = 6000, 30
_JSON = [["content-type", "application/json"]]
# A valid request to each endpoint that takes a body.
_BODIES: dict[str, Any] = {
    "/v2/models/m/generate": {
        "id": "1",
        "text_input": TEXTS[0],
        "parameters": {"num_beams": 2, "max_new_tokens": 3, "timeout_ms": 9000, "priority": 1, "prefix": "1"},
    },
    "/v2/models/m/versions/1/generate": {
        "input_ids": [5, 6, 7],
        "parameters": {"do_sample": True, "seed": 3, "top_k": 4},
    },
    "/v2/models/m/generate_stream": {
        "text_input": TEXTS[1],
        "parameters": {"stop_strings": ["-"], "max_new_tokens": 3},
    },
    "/v2/models/m/infer": {
        "id": "2",
        "inputs": [
            {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": TEXTS},
            {"name": "max_new_tokens", "shape": [1], "datatype": "INT64", "data": [3]},
        ],
        "outputs": [{"name": "text_output", "parameters": {"binary_data": False}}],
        "parameters": {"binary_data_output": True},
    },
    "/v2/models/m/align": {"text_input": TEXTS[0], "target_text": "19"},
    "/tokenize": {"prompt": TEXTS[0], "model": "m"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/completions": {"model": "m", "prompt": [TEXTS[0]], "max_tokens": 3, "stream": False, "n": 1, "stop": ["-"]},
    "/translate": {"q": TEXTS, "source": "x", "target": "y", "format": "text", "alternatives": 1},
}  # fmt: skip
_FORMS = ["/v2/models/m/generate", "/v1/audio/transcriptions"]
_PART = "--x\r\nContent-Disposition: form-data; name="
_FIELDS = ['"file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\nRIFF', '"model"\r\n\r\nm', '"seed"\r\n\r\n5']
_FORM = "".join([*(f"{_PART}{field}\r\n" for field in _FIELDS), "--x--\r\n"]).encode()
_PATHS = [
    *_BODIES,
    *_FORMS,
    *("/", "/v2", "/v2/models/m", "/v2/models/m/stats", "/metrics", "/livez", "/readyz", "/openapi.json", "/v1/models"),
]
_BYTES = st.characters(min_codepoint=0, max_codepoint=255)
_HEADER_NAMES = (
    "content-type content-length content-encoding transfer-encoding host accept authorization "
    "inference-header-content-length x-request-id expect connection cookie"
)
_HEADER_VALUES = ["", "0", "5", "-1", "+2", "9" * 30, "application/json", "text/plain", "gzip", "chunked"]
_HEADERS = st.lists(
    st.tuples(
        st.sampled_from(_HEADER_NAMES.split()), st.sampled_from(_HEADER_VALUES) | st.text(_BYTES, max_size=12)
    ).map(list),
    max_size=3,
)


def requests() -> st.SearchStrategy[bytes]:
    """Draw requests, written as JSON."""
    jsons = {path: mutated_json(body) | mutated(json.dumps(body).encode()) for path, body in _BODIES.items()}
    return st.one_of(
        *(_requests(path, body, _JSON) for path, body in jsons.items()),
        *(_requests(path, mutated(_FORM), [["content-type", "multipart/form-data; boundary=x"]]) for path in _FORMS),
    )


def _requests(path: str, body: st.SearchStrategy[bytes], content_type: list[list[str]]) -> st.SearchStrategy[bytes]:
    def rarely(share: int, usual: Any, other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.integers(1, 16).flatmap(lambda number: other if number <= share else st.just(usual))

    odd = st.text(st.characters(min_codepoint=1, max_codepoint=255), max_size=6) | st.sampled_from(
        "..,%2e,/,//".split(",")
    )
    odd_path = st.builds(lambda at, text: path[:at] + text + path[at:], st.integers(1, len(path)), odd)
    parts = st.fixed_dictionaries(
        {
            "method": rarely(2, "POST", st.sampled_from("GET PUT HEAD OPTIONS X".split())),
            "path": rarely(2, path, st.sampled_from(_PATHS) | odd_path),
            "query": rarely(4, "", st.text(_BYTES, max_size=20)),
            "headers": rarely(6, [], _HEADERS).map(lambda headers: [*content_type, *headers]),
            "body": body.map(lambda raw: raw.decode("latin-1")),
            "chunks": st.integers(1, 4),
        }
    )
    return parts.map(lambda request: json.dumps(request).encode())


class App:
    """An app and its engine; requests run on one event loop."""

    def __init__(self, bundle: Path) -> None:
        self._runner = asyncio.Runner()
        self._app: Starlette = self._runner.run(self._start(bundle))

    def use(self, raw: bytes) -> int:
        """Send a request; raise InputError if it is refused."""
        status, body = self._runner.run(asyncio.wait_for(self._ask(json.loads(raw)), TIMEOUT_S))
        assert 200 <= status < 300 or 400 <= status < 500 or status in (503, 504), (status, body[:500])
        assert b"Traceback" not in body
        if status >= 400:
            assert len(body) <= MAX_ERROR_BYTES, len(body)
            raise InputError(f"{status} {body.decode()}")
        return 0

    def close(self) -> None:
        """Stop the engine and close the event loop."""
        self._runner.run(self._engine.drain(0))
        self._runner.close()

    async def _start(self, bundle: Path) -> Starlette:
        metrics = Metrics()
        self._engine = Engine(bundle, ServingConfig(slots=8), observer=metrics.observer("m"), threads=1)
        await self._engine.start()
        return build_app({"m": self._engine}, HttpConfig(completions=True, translate=True), metrics)

    async def _ask(self, request: dict[str, Any]) -> tuple[int, bytes]:
        body, parts = request["body"].encode("latin-1"), request["chunks"]
        size = len(body) // parts + 1
        unread = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        messages = [
            {"type": "http.request", "body": part, "more_body": number + 1 < len(unread)}
            for number, part in enumerate(unread)
        ]
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request["headers"]]
        if not any(name == b"content-length" for name, _ in headers):
            headers.append((b"content-length", str(len(body)).encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request["method"],
            "scheme": "http",
            "path": request["path"],
            "raw_path": request["path"].encode("latin-1", "replace"),
            "root_path": "",
            "query_string": request["query"].encode("latin-1"),
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        status, answer = 0, b""
        silent = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await silent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status, answer
            status = message.get("status", status)
            answer += message.get("body", b"")

        await self._app(scope, receive, send)
        return status, answer
