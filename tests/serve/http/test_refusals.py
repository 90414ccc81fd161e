"""Invalid requests get 4xx with one bounded line of JSON."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.serve.http.served import Serve
from tfexport.serve.config import MAX_BODY_BYTES, HttpConfig

GENERATE = "/v2/models/dates/generate"
TEXT = "3 May 1999"


def check(answer: httpx.Response, status: int, why: str) -> None:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    message = answer.json()["error"]
    assert why in message
    assert "Traceback" not in message
    assert "\n" not in message
    assert len(answer.content) < 4500


WRONG_INPUTS: list[tuple[object, str]] = [
    ({}, "expected either text_input or input_ids"),
    ({"text_input": "a", "input_ids": [5]}, "expected either text_input or input_ids"),
    ({"text_input": ""}, "the text is empty"),
    ({"text_input": None}, "text_input is None"),
    ({"text_input": 5}, "text_input is 5"),
    ({"input_ids": []}, "the source is empty"),
    ({"input_ids": [5.0]}, "input_ids[0] is 5.0"),
    ({"input_ids": [True]}, "input_ids[0] is True"),
    ({"input_ids": [-1]}, "source has -1, expected ids 0 to"),
    ({"input_ids": [388]}, "source has 388, expected ids 0 to 387"),
    ({"input_ids": [5] * 65}, "65"),
    ({"text_input": "a" * 100_000}, "the text has 100000 characters"),
    ({"text_input": "a", "parameters": []}, "parameters is []"),
    ({"text_input": "a", "nonsense": 1}, "unknown key nonsense"),
    ({"text_input": "a", "x" * 10_000: 1}, "unknown key xxx"),
    ({"text_input": "a", "parameters": {"prefix": [5]}}, "prefix is list, expected a text"),
    ({"input_ids": [5], "parameters": {"prefix": "a"}}, "prefix is 'a'"),
    ({"text_input": "a", "parameters": {"prefix": "1" * 500}}, "prefix"),
    ([], "the body is"),
    (5, "the body is"),
    ("a", "the body is"),
]
WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_new_tokens": "5"}, "max_new_tokens is '5'"),
    ({"num_beams": 9}, "num_beams is 9, the limit is 8"),
    ({"num_return_sequences": 2}, "num_return_sequences is 2 but num_beams is 1"),
    ({"do_sample": True, "num_return_sequences": 33}, "the request needs 33 slots, the engine has 32"),
    ({"priority": "high"}, "priority is 'high'"),
    ({"timeout_ms": 0}, "timeout_ms is 0"),
    ({"timeout_ms": [5]}, "timeout_ms is [5]"),
    *(
        ({name: 1}, f"unknown key parameters.{name}")
        for name in ("config", "stream", "text", "self", "source", "timeout_s", "temprature")
    ),
]


async def test_wrong_inputs_and_options(serve: Serve) -> None:
    wrong = [*WRONG_INPUTS, *(({"text_input": TEXT, "parameters": one}, why) for one, why in WRONG_OPTIONS)]
    async with serve() as served:
        for path in ("generate", "generate_stream"):
            for data, why in wrong:
                check(await served.post(path, data), 400, why)
        answer = await served.post("generate", {"text_input": TEXT, "parameters": {"do_sample": True, "top_k": 10**6}})
        assert answer.status_code == 200  # as in Hugging Face: as many as there are
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == 2 * len(wrong) + 1


WRONG_JSON: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b'{"text_input": "a"', "not JSON"),
    (b'\xef\xbb\xbf{"text_input": "a"}', "not JSON"),
    (b'{"text_input": "\xff"}', "not JSON"),
    (b'{"text_input": "a", "parameters": {"seed": NaN}}', "parameters.seed is nan"),
    (b'{"text_input": "a", "parameters": {"timeout_ms": 1e999}}', "parameters.timeout_ms is inf"),
    (b'{"text_input": "a", "parameters": {"seed": ' + b"9" * 5000 + b"}}", "not JSON: number out of range"),
    (b'{"text_input": "\\ud800"}', "not JSON"),
    (b"[" * 100_000, "recursion limit"),
    (b'{"text_input":' + b"[" * 100 + b"]" * 100 + b"}", "text_input is [["),
    (b"{" + b",".join(b'"%d":1' % number for number in range(90)) + b"}", "unknown key 0"),
    (b"{" + b",".join(b'"%d":1' % number for number in range(80_000)) + b"}", "the body has 8000"),
]


async def test_wrong_json(serve: Serve) -> None:
    async with serve() as served:
        for body, why in WRONG_JSON:
            headers = {"Content-Type": "application/json; charset=utf-8"}
            check(await served.client.post(GENERATE, content=body, headers=headers), 400, why)
        odd = ("\0 3 May 1999", "\u202e3 May 1999", "e" + "\u0301" * 500, "😀 3 May 1999", "</s> <pad> 3 May 1999")
        for text in odd:
            assert (await served.post("generate", {"text_input": text})).status_code in (200, 400)
        assert (await served.post("generate", {"text_input": "\U0001f600 3 May 1999"})).status_code == 200


async def test_a_million_keys_are_bounded_by_the_body_or_refused_by_name(serve: Serve) -> None:
    body = b"{" + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}"

    for http, status in ((None, 413), (HttpConfig(max_body_bytes=MAX_BODY_BYTES), 400)):
        async with serve(http) as served:
            answer = await served.client.post(GENERATE, content=body, headers={"Content-Type": "application/json"})
            check(answer, status, "")


async def test_bodies_that_are_too_large_or_not_taken(serve: Serve) -> None:
    async def chunks(number: int, size: int = 1) -> AsyncIterator[bytes]:
        for _ in range(number):
            yield b" " * size

    async with serve(HttpConfig(max_body_bytes=70_000)) as served:

        async def post(content: Any, **headers: str) -> httpx.Response:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await served.client.post(
                GENERATE, content=content, headers={"Content-Type": "application/json"} | named
            )

        check(await post(b"x" * 70_001), 413, "the limit is 70000")
        check(await post(chunks(71, 1000)), 413, "above the limit of 70000")
        check(await post(b"{}", Content_Length="9" * 30), 413, "the limit is 70000")
        check(await post(b"{}", Content_Length="-1"), 400, "Content-Length is '-1'")
        check(await post(b"{}", Content_Length="+2"), 400, "Content-Length is")
        check(await post(b"\x1f\x8b", Content_Encoding="gzip"), 415, "Content-Encoding 'gzip' is not supported")
        check(await post(b"{}", Content_Encoding="zstd, br"), 415, "Content-Encoding 'zstd, br' is not supported")
        check(await post(b"{}", Content_Type="text/plain"), 415, "expected application/json")
        check(await post(b"a=b", Content_Type="application/x-www-form-urlencoded"), 415, "expected application/json")
        assert (await post(b"x" * 70_001)).headers["connection"] == "close"


MISSING = (
    "/v2/models/other/generate",
    "/v2/models/da%74es2/generate",
    "/v2/models/../dates/generate",
    "/v2/models/%2e%2e/generate",
    "/v2/models/dates%2fx/generate",
    "/v2/models//generate",
    "/v2/models/dates/versions/2/generate",
    "/v2/models/dates/versions/%00/generate",
    "/v2/models/" + "x" * 5000 + "/generate",
    "/v2/models/%ff%0a/generate",
    "/v2/repository/index",
    "/v2/models/dates/load",
    "/v2/models/dates/generate/",
    "/",
)


async def test_unknown_paths_are_404(serve: Serve) -> None:
    async with serve(HttpConfig(ui=False)) as served:
        for path in MISSING:
            check(await served.client.post(path, json={"text_input": TEXT}), 404, "")


def say(address: str, request: bytes) -> bytes:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    return answer


HEAD = b"POST /v2/models/dates/generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HEAD + b"\r\n", 411),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: x\r\n\r\n{}", 400),
        (HEAD + b"Bad\x00Header: 1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
        (HEAD + b"Content-Length: 99999999\r\n\r\n", 413),
        (b"nonsense\r\n\r\n", 400),
    ],
)
def test_broken_framing_is_refused(address: str, request_bytes: bytes, status: int) -> None:
    answer = say(address, request_bytes)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"Traceback" not in answer
    assert len(answer) < 2000
    assert httpx.get(f"http://{address}/livez").status_code == 200


async def test_internal_errors_are_not_disclosed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    async with serve() as served:
        monkeypatch.setattr(served.engine, "submit", fail)
        check(await served.post("generate", {"text_input": TEXT}), 500, "internal error; see the server's log")


async def test_deadlines_are_504(serve: Serve) -> None:
    async with serve(HttpConfig(max_timeout_s=0.001)) as served:
        check(await served.post("generate", {"text_input": TEXT, "parameters": {"timeout_ms": 0.01}}), 504, "exceeded")
        slow = {"text_input": TEXT, "parameters": {"timeout_ms": 1e9}}
        check(await served.post("generate", slow), 504, "the time limit of 0.001 s was exceeded")
