"""The server scenario with an engine in process, and with servers over HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.bench import test_report as reports
from tests.bundle.made import edit, reseal
from tests.command import ran, refuses, run
from tests.serve.http.served import on_port
from tfexport.bench._report import settings
from tfexport.bench._server import exchange, http_client
from tfexport.bench.config import BenchConfig
from tfexport.bundle.bundle import open_bundle
from tfexport.errors import ServingError

TEXTS = "3. März 2026\nle 14 juillet 1989\n5 May 2001\n"
QUICK = ("--scenario", "server", "--processes", 1, "--duration", 0.3)


@pytest.fixture(scope="module")
def url(dates_bundle: Path) -> Iterator[str]:
    with on_port(dates_bundle, "dates") as address:
        yield f"http://{address}"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").write_text(TEXTS)
    return tmp_path / "texts"


def test_texts_and_requests_reach_a_real_server(dates_bundle: Path, tmp_path: Path, texts: Path) -> None:
    result = ran(
        *("bench", dates_bundle, *QUICK, "--rate", 100, "--input", texts, "--slots", 4, "--goal-ms", 60_000),
        *("--no-verify", "--json", tmp_path / "a.json"),
        code=2,
    )
    found = json.loads((tmp_path / "a.json").read_text())
    metrics = found["metrics"]
    assert found["settings"]["input"]["texts"] == 3
    assert metrics["output_sequence_length"]["value"] == pytest.approx(11, abs=1)  # 2026-03-03 and the end
    assert metrics["request_count"]["value"] > 10
    assert metrics["goodput"]["value"] == pytest.approx(metrics["request_throughput"]["value"])
    assert metrics["queue_time"]["count"] == metrics["request_count"]["value"]
    assert 0 < metrics["slot_occupancy"]["value"] <= 1
    assert 0 < metrics["time_to_first_token"]["p50"] < metrics["request_latency"]["p50"]
    assert metrics["step_time"]["count"] >= 10
    assert found["cells"][0]["time_split"]["rest"] > 0
    reports.check_schema(found)
    assert "server at 100 requests/s · slots 4 · 3 texts" in result.stdout


def test_beams_are_served_too(dates_bundle: Path, tmp_path: Path) -> None:
    sizes = ("--num-beams", 9, "--source-length", 5, "--target-length", 4)
    ran("bench", dates_bundle, *QUICK, "--rate", 30, *sizes, "--no-verify", "--json", tmp_path / "a.json", code=2)
    metrics = json.loads((tmp_path / "a.json").read_text())["metrics"]
    assert metrics["output_sequence_length"]["value"] == 4
    assert 0 < metrics["time_to_first_token"]["min"] <= metrics["request_latency"]["max"]


def test_a_running_server_is_measured(url: str, tmp_path: Path, texts: Path) -> None:
    files = ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    result = ran("bench", "--url", url, *QUICK, "--rate", 40, "--input", texts, "--goal-ms", 60_000, *files, code=2)
    found = json.loads((tmp_path / "a.json").read_text())
    metrics = found["metrics"]
    assert found["bundle"] == {"name": "dates", "sha256": None, "precision": None}
    assert metrics["output_sequence_length"]["value"] == pytest.approx(11, abs=1)
    assert 0 < metrics["time_to_first_token"]["p50"] < metrics["request_latency"]["p50"]
    assert metrics["slot_occupancy"]["value"] is None
    assert metrics["goodput"]["value"] > 1
    assert metrics["load_time"]["value"] is None
    assert found["validity"]["reasons"][0] == "parity was not checked (pass the served BUNDLE)"
    assert f"dates · {url} · http · server at 40 requests/s · 3 texts" in " ".join(result.stdout.split())
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("source", ["texts", "ids"])
def test_a_server_returns_the_outputs_of_its_bundle(url: str, dates_bundle: Path, source: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text(TEXTS)
    given = ("--input", tmp_path / "texts") if source == "texts" else ("--target-length", 5)
    result = run(
        *("bench", dates_bundle, "--url", url, "--model", "dates", *QUICK, "--rate", 30, *given),
        *("--json", tmp_path / "a.json"),
    )
    found = json.loads((tmp_path / "a.json").read_text())
    assert result.exit_code == (0 if found["validity"]["valid"] else 2), result.output
    assert found["parity"] == {
        "passed": True,
        "source": f"{3 if source == 'texts' else 8} answers equal those of the bundle",
    }
    assert found["bundle"]["sha256"] == open_bundle(dates_bundle).sha256


def test_a_server_with_other_outputs_is_not_timed(dates_bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(dates_bundle, tmp_path / "bundle"))
    weights = bytearray((other / "weights.safetensors").read_bytes())
    header = 8 + int.from_bytes(weights[:8], "little")
    np.frombuffer(weights, np.float32, offset=header)[:] *= -1
    (other / "weights.safetensors").write_bytes(weights)
    reseal(other)
    edit(other, lambda data: data["text"].update(samples=[]))  # which are what the weights said
    with on_port(other, "dates", slots=2) as address:
        result = run("bench", dates_bundle, "--url", f"http://{address}", *QUICK, "--rate", 30)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "answer 1 of 8 differs from the bundle's" in result.stderr


def test_refused_requests_are_counted(dates_bundle: Path, tmp_path: Path, texts: Path) -> None:
    with on_port(dates_bundle, "a", "b", slots=1, max_waiting=1) as address:
        bench = ("bench", "--url", f"http://{address}", *QUICK, "--input", texts)
        refuses(run(*bench, "--rate", 9), "models a, b; choose one with --model")
        refuses(run(*bench, "--rate", 9, "--model", "c"), "the server returns 404")
        ran(*bench, "--rate", 1000, "--model", "b", "--json", tmp_path / "a.json", code=2)
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["metrics"]["refused"]["value"] > 0
    refused = f"overloaded: {found['metrics']['refused']['value']} requests were refused (lower --rate)"
    assert refused in found["validity"]["reasons"]


def test_missing_requirements_are_reported(texts: Path) -> None:
    refuses(run("bench", *QUICK, "--rate", 5), "neither a bundle nor a server; pass BUNDLE or --url")
    nowhere = ("bench", "--url", "http://127.0.0.1:1", *QUICK, "--rate", 5)
    refuses(run(*nowhere), "sources are missing; set --input")
    refuses(run(*nowhere, "--input", texts), "http://127.0.0.1:1", "cannot be reached")


# ---- the client


@contextmanager
def saying(answer: bytes, received: list[bytes] | None = None) -> Iterator[str]:
    """Run a server that gives this answer to every request and closes the connection; append lines to `heard`."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline().strip():
                (received if received is not None else []).append(line)
            self.wfile.write(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/base/"
        finally:
            server.shutdown()
            thread.join()


def asked(url: str) -> tuple[int, bytes]:
    async def ask() -> tuple[int, bytes]:
        async with http_client(url) as client:
            await exchange(client, "GET", "x")
            return await exchange(client, "GET", "x")

    return asyncio.run(ask())


def test_a_closed_connection_is_reopened() -> None:
    with saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as url:
        assert asked(url) == (200, b"{}")


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{"])
def test_an_invalid_answer_counts_as_refused(answer: bytes) -> None:
    with saying(answer) as url, pytest.raises(ServingError):
        asked(url)


def test_a_token_is_shown_and_not_reported(tmp_path: Path, texts: Path) -> None:
    received: list[bytes] = []
    (tmp_path / "token").write_text("open sesame\nanother\n")
    with saying(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno", received) as url:
        result = run("bench", "--url", url, *QUICK, "--rate", 5, "--input", texts, "--token-file", tmp_path / "token")
    refuses(result, "the server returns 401 for /v2: no")
    assert b"Authorization: Bearer open sesame" in received
    config = BenchConfig(scenario="server", rate=1.0, url=url, token_file=str(tmp_path / "token"))
    assert "token_file" not in settings(config)
