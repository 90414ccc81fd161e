"""Requests to the server, in process: bodies, headers, query strings and paths."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from starlette.applications import Starlette

from tests.fuzz.bundles import TEXTS
from tests.fuzz.kind import Kind
from tests.fuzz.mutations import mutated, mutated_json
from tfexport.errors import InputError
from tfexport.serve.app import build_app
from tfexport.serve.config import HttpConfig, ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.metrics import Metrics

MAX_ERROR_BYTES = 6000
_ANSWER_WITHIN_S = 30
_JSON = [["content-type", "application/json"]]
# A request to each endpoint that takes a body, as it should be.
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
_PATHS = [
    *_BODIES,
    *("/", "/v2", "/v2/models/m", "/v2/models/m/stats", "/metrics", "/livez", "/readyz", "/openapi.json", "/v1/models"),
]
_HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            "content-type content-length content-encoding transfer-encoding host accept authorization "
            "inference-header-content-length x-request-id expect connection cookie".split()
        ),
        st.one_of(
            st.sampled_from(["", "0", "5", "-1", "+2", "9" * 30, "application/json", "text/plain", "gzip", "chunked"]),
            st.text(st.characters(min_codepoint=0, max_codepoint=255), max_size=12),
        ),
    ).map(list),
    max_size=3,
)  # fmt: skip
_QUERIES = st.one_of(st.just(""), st.text(st.characters(min_codepoint=0, max_codepoint=255), max_size=20))


def _parts(path: str, body: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Draw the rest of a request, and write it as one JSON."""

    def written(body: bytes, headers: list[list[str]], query: str, other: str, method: str, chunks: int) -> bytes:
        request = {
            "method": method,
            "path": other or path,
            "query": query,
            "headers": [*_JSON, *headers],
            "body": body.decode("latin-1"),
            "chunks": chunks,
        }
        return json.dumps(request).encode()

    rarely = st.integers(0, 15)
    return st.builds(
        written,
        body,
        rarely.flatmap(lambda n: st.just([]) if n < 10 else _HEADERS),
        rarely.flatmap(lambda n: st.just("") if n < 12 else _QUERIES),
        rarely.flatmap(lambda n: st.just("") if n < 14 else st.sampled_from(_PATHS) | _odd_path(path)),
        rarely.flatmap(lambda n: st.just("POST") if n < 14 else st.sampled_from("GET PUT HEAD OPTIONS X".split())),
        st.integers(1, 4),
    )


def _odd_path(path: str) -> st.SearchStrategy[str]:
    odd = st.text(st.characters(min_codepoint=1, max_codepoint=255), max_size=6) | st.sampled_from(
        ["..", "%2e", "/", "//"]
    )
    return st.tuples(st.integers(0, len(path)), odd).map(lambda one: "/" + path[: one[0]] + one[1] + path[one[0] :])


def kind(folder: Path, scratch: Path) -> Kind:
    """Return the kind of requests; the app runs for as long as the process does."""
    app = _Running(folder / "bundle")
    whole = [
        _parts(path, mutated_json(document) | mutated(json.dumps(document).encode()))
        for path, document in _BODIES.items()
    ]
    return Kind(st.one_of(*whole), app.use, 0, close=app.close)


class _Running:
    """An app on an event loop of its own thread."""

    def __init__(self, bundle: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._app: Starlette = self._run(self._start(bundle))

    def use(self, raw: bytes) -> int:
        """Send a request; what is refused is an error here too."""
        status, body = self._run(self._ask(json.loads(raw)))
        assert 200 <= status < 300 or 400 <= status < 500 or status in (503, 504), (status, body[:500])
        assert b"Traceback" not in body
        if status >= 400:
            assert len(body) <= MAX_ERROR_BYTES, len(body)
            raise InputError(f"{status} {body.decode()}")
        return 0

    def close(self) -> None:
        """End the engine and its event loop."""
        self._run(self._engine.drain(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(_ANSWER_WITHIN_S)

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
        status, said = 0, b""
        silent = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await silent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status, said
            status = message.get("status", status)
            said += message.get("body", b"")

        await self._app(scope, receive, send)
        return status, said
