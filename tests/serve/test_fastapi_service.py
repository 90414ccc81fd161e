"""Run the FastAPI service of docs/serving."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT
from tests.serve.running import PATIENCE_S, eventually

TEXT = "Dienstag, 3. März 2026"


@pytest.fixture(scope="module")
def client(dates_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    pytest.importorskip("fastapi", reason="fastapi is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("fastapi") / "log"
    command = [sys.executable, "-m", "uvicorn", "--app-dir", ROOT / "docs" / "serving", "fastapi_service:app"]
    environment = {**os.environ, "BUNDLE": str(dates_bundle), "OMP_NUM_THREADS": "1"}
    with (
        log.open("w") as out,
        subprocess.Popen(
            [*map(str, command), "--port", str(port)], cwd=log.parent, env=environment, stdout=out, stderr=out
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
    ):
        try:
            eventually(lambda: process.poll() is not None or is_ready(client))
            assert process.poll() is None, log.read_text()
            yield client
        finally:
            process.send_signal(signal.SIGTERM)
            # uvicorn ends by the signal itself when all is done
            assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM), log.read_text()
    assert "Application shutdown complete" in log.read_text()
    assert "Traceback" not in log.read_text()


def is_ready(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/tfexport/readyz").status_code == 200
    return False


def count(client: httpx.Client, name: str) -> float:
    found = re.findall(rf"^tfexport_{name} (\S+)$", client.get("/tfexport/metrics").text, re.MULTILINE)
    assert found
    return sum(map(float, found))


def test_the_service_answers(client: httpx.Client) -> None:
    answer = client.post("/read", json={"text": TEXT, "num_beams": 4})
    assert (answer.status_code, answer.json()) == (200, ["2026-03-03"])
    asked = {"text_input": TEXT}
    assert client.post("/tfexport/v2/models/dates/generate", json=asked).json()["text_output"] == "2026-03-03"


def test_the_service_streams(client: httpx.Client) -> None:
    with client.stream("POST", "/stream", json={"text": TEXT}) as answer:
        pieces = [json.loads(line.removeprefix("data: "))["piece"] for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "".join(pieces) == "2026-03-03"
    assert len(pieces) > 3


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/read", {"timeout_s": 1e-6}, 504),
        ("/read", {"num_beams": 9}, 422),
        ("/stream", {"num_beams": 2}, 400),
    ],
)
def test_the_service_reports_errors(client: httpx.Client, path: str, options: dict[str, float], status: int) -> None:
    assert client.post(path, json={"text": TEXT, **options}).status_code == status


@pytest.mark.parametrize("path", ["/read", "/stream"])
def test_a_client_that_disconnects_frees_its_slots(client: httpx.Client, path: str) -> None:
    cancelled = r'requests_total\{.*outcome="cancelled"\}'
    before = count(client, cancelled)
    body = json.dumps({"text": TEXT}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(60):
        with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as gone:
            gone.sendall(head.encode() + body)

    def is_over() -> bool:
        is_idle = count(client, r'requests_(?:running|waiting)\{model="dates"\}') == 0
        return is_idle and count(client, cancelled) >= before + 20  # some are gone before they are read

    eventually(is_over)
    assert client.post("/read", json={"text": TEXT}).json() == ["2026-03-03"]
