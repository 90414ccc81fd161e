"""Test `tfexport serve` as a process: startup, overload, slow clients, tokens, TLS."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.command import ran, refuses
from tests.conftest import ROOT
from tests.serve.running import COMMAND, PATIENCE_S, Running, eventually, running
from tests.test_docs import same
from tfexport.serve.config import ServerConfig
from tfexport.serve.server import SEND_BUFFER_BYTES, listen

DATE = "Dienstag, 3. März 2026"
GUIDE = ROOT / "docs" / "guides" / "serving.md"
SESSIONS = re.findall(
    r"^\$ curl (.* --json .*)\n((?:(?!\$ |```).*\n)*)", GUIDE.read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.fixture(scope="module")
def server(dates_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ("--threads", 1, "--slots", 4, "--max-waiting", 8)
    with running(tmp_path_factory.mktemp("server"), dates_bundle, f"other={dates_bundle}", *options) as found:
        yield found


def refused(*arguments: object) -> str:
    (line,) = [line for line in ran("serve", *arguments, code=1).stderr.splitlines() if line.startswith("error: ")]
    return line


def test_serve_prints_its_models_and_a_command_to_try(server: Running) -> None:
    assert server.lines[1].startswith("dates: 2 decoder layers of 128, fp32 on ort, 1 thread, 4 slots;")
    assert server.lines[2].startswith("other: ")
    assert server.lines[3].startswith("ready after ")
    words = shlex.split(server.lines[4])
    asked = dict(zip(words[2::2], words[3::2], strict=True))
    answer = httpx.post(words[1], headers=dict([asked["-H"].split(": ")]), content=asked["-d"])
    assert answer.json()["text_output"].count("-") == 2
    assert server.lines[5] == f"  or open {server.url}/ in a browser"
    assert server.client.get("/").headers["content-type"].startswith("text/html")
    assert server.ask(DATE).json()["text_output"] == "2026-03-03"
    assert server.ask(DATE, "other").json()["text_output"] == "2026-03-03"


def test_curl_is_answered_as_the_readme_shows(server: Running) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"^\$ (curl .*)\n(.*)$", readme, re.MULTILINE)[0]
    words = shlex.split(command)
    assert words[2] == "-H"
    headers = dict([words[3].split(": ")])
    answer = server.client.post(httpx.URL(words[1]).path, headers=headers, content=words[5].encode()).json()
    expected = json.loads(shown)
    assert answer.pop("scores") == pytest.approx(expected.pop("scores"), abs=1e-6)
    assert answer == expected


@pytest.mark.parametrize(("command", "shown"), [found for found in SESSIONS if "/v2/" in found[0]])
def test_curl_is_answered_as_shown(server: Running, command: str, shown: str) -> None:
    _, url, option, body = shlex.split(command)
    assert option == "--json"
    path = httpx.URL(f"http://{url}").path
    headers = {"Content-Type": "application/json"}
    output = server.client.post(path, headers=headers, content=body.encode()).text.splitlines()
    lines = [line for line in shown.splitlines() if line and line != "…"]
    assert lines
    for line in lines:
        assert any(same(one, line) for one in output), output


def test_sessions_were_found() -> None:
    assert len(SESSIONS) == 5
    assert all(shown for _, shown in SESSIONS)


def test_every_request_of_a_flood_is_answered_or_429(server: Running) -> None:
    server.ask(DATE)
    before = server.rss_mb()
    limits = httpx.Limits(max_connections=100)
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client,
        ThreadPoolExecutor(100) as pool,
    ):
        asked = {"text_input": DATE, "parameters": {"num_beams": 2}}
        found = list(pool.map(lambda _: client.post("/v2/models/dates/generate", json=asked), range(800)))
    codes = [one.status_code for one in found]
    assert set(codes) == {200, 429}
    assert all(1 <= int(one.headers["retry-after"]) <= 60 for one in found if one.status_code == 429)
    assert {one.json()["text_output"] for one in found if one.status_code == 200} == {"2026-03-03"}
    assert server.rss_mb() - before < 50
    assert server.ask(DATE).status_code == 200
    assert server.is_ready()


def test_a_flood_of_one_model_does_not_stop_another(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client, ThreadPoolExecutor(20) as pool:
        body = {"text_input": DATE}
        flood = [pool.submit(client.post, "/v2/models/other/generate", json=body) for _ in range(400)]
        found = [server.ask(DATE) for _ in range(30)]
        assert {one.result().status_code for one in flood} <= {200, 429}
    assert {one.status_code for one in found} == {200}


def connected(server: Running) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port or 80), timeout=PATIENCE_S)


HASTY = """
from tfexport.serve.config import HttpConfig
HttpConfig.__init__.__kwdefaults__.update(read_timeout_s=1.0, body_timeout_s=2.0, max_send_s=1.0)
"""
BEGUN = (
    b"POST /v2/models/dates/generate HTTP/1.1\r\nHost: x\r\n"
    b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
)


def test_a_slow_body_is_408_and_delays_no_other_request(dates_bundle: Path, tmp_path: Path) -> None:
    with (
        running(tmp_path, dates_bundle, "--threads", 1, before=HASTY) as server,
        contextlib.ExitStack() as stack,
    ):
        bodyless, dripping = ([stack.enter_context(connected(server)) for _ in range(count)] for count in (100, 10))
        for one in (*bodyless, *dripping):
            one.sendall(BEGUN)
        start = time.monotonic()
        while time.monotonic() - start < 4:
            for one in dripping:
                with contextlib.suppress(OSError):
                    one.sendall(b"x")
            assert server.client.get("/livez", timeout=5).status_code == 200
            time.sleep(0.1)
        for one in (*bodyless, *dripping):
            output = b"".join(iter(lambda one=one: rest_of(one), b""))
            assert output.startswith(b"HTTP/1.1 408 ") or (not output and one in dripping)  # reset by its last piece
        assert server.metric('tfexport_requests_total{.*outcome="invalid".*}') == 110
        assert server.ask(DATE).status_code == 200


def test_unread_responses_are_dropped(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, "--threads", 1, before=HASTY) as server, socket.socket() as one:
        url = httpx.URL(server.url)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((url.host, url.port))
        one.settimeout(20)
        with pytest.raises(ConnectionError):
            for _ in range(2000):
                one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
                time.sleep(0.01)
        assert server.ask(DATE).status_code == 200
        assert "Traceback" not in server.log.read_text()


def rest_of(connection: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(4096)
    return b""


def test_connections_above_the_limit_are_refused(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, "--threads", 1, "--max-connections", 4) as server:
        server.client.close()
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(connected(server))
            with pytest.raises(AssertionError), connected(server) as one:
                eventually(lambda: b"200 OK" in asked_live(one), 1)
            with connected(server) as one:
                assert asked_live(one).startswith(b"HTTP/1.1 503")
        eventually(lambda: httpx.get(f"{server.url}/livez").status_code == 200)


FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_idle_connections_do_not_use_up_the_files_of_the_process(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, "--threads", 1, "--max-connections", 16, before=FEW_FILES) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(connected(server))
            eventually(lambda: is_full(server))
        eventually(lambda: httpx.get(f"{server.url}/livez").status_code == 200)
        assert "out of system resource" not in server.log.read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_connections_that_arrive_together_do_not_use_up_the_files_of_the_process(
    dates_bundle: Path, tmp_path: Path
) -> None:
    before = FEW_FILES.replace("64", "300")
    with running(tmp_path, dates_bundle, "--threads", 1, "--max-connections", 16, before=before) as server:
        server.send(signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            for number in range(800):
                if number == 250:
                    server.send(signal.SIGCONT)
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", httpx.URL(server.url).port))
            eventually(lambda: is_full(server))
        eventually(lambda: httpx.get(f"{server.url}/livez").status_code == 200)
        assert "out of system resource" not in server.log.read_text()


def is_full(server: Running) -> bool:
    with connected(server) as one:
        return asked_live(one).startswith(b"HTTP/1.1 503")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_more_connections_than_the_process_may_open(dates_bundle: Path) -> None:
    code = f"{FEW_FILES}\n{COMMAND}"
    command = [sys.executable, "-c", code, "serve", dates_bundle, "--max-connections", "100", "--port", "0"]
    refuses(subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S), "--max-connections 100")


QUICK_TIMEOUT = "import tfexport.serve._connections as connections; connections.HEAD_TIMEOUT_S = 0.5"


def test_a_head_that_is_too_long_or_too_slow_is_refused(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, "--threads", 1, before=QUICK_TIMEOUT) as server:
        for head in (b"GET /", b"GET /livez HTTP/1.1\r\nlong: ", b"GET /livez HTTP/1.1\r\n" + 10_000 * b"many: x\r\n"):
            with connected(server) as one:
                assert sent_until_closed(one, head, 40 * [100_000 * b"x"]) < 40
        for begun in (b"", b"GET /livez", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /"):
            with connected(server) as one:
                one.sendall(begun)
                assert b"HTTP/1.1 408" in until_closed(one)


def test_pipelined_requests_are_answered_up_to_a_limit(dates_bundle: Path, tmp_path: Path) -> None:
    """Each that waits takes memory, so a client that never reads could fill it."""
    asked = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(tmp_path, dates_bundle, "--threads", 1) as server:
        with connected(server) as one:
            one.sendall(9 * asked + asked.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert until_closed(one).count(b"HTTP/1.1 200") == 10
        with connected(server) as one:
            assert sent_until_closed(one, b"", 500 * [1000 * asked]) < 500
        assert server.client.get("/livez").status_code == 200


def until_closed(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.read()


def sent_until_closed(connection: socket.socket, head: bytes, blocks: list[bytes]) -> int:
    """Send without reading; return how many blocks were sent before the server closed the connection."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        connection.sendall(head)
        for block in blocks:
            connection.sendall(block)
            sent += 1
    return sent


def asked_live(connection: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    return rest_of(connection)


def test_answers_are_sent_without_delay_or_buffering() -> None:
    with listen(ServerConfig(port=0)) as listener, socket.create_connection(listener.getsockname()):
        one, _ = listener.accept()
        with one:
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * SEND_BUFFER_BYTES  # as Linux counts


def test_requests_without_a_token_are_refused(dates_bundle: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\nfedcba9876543210\n")
    tokens.chmod(0o644)
    with running(tmp_path, dates_bundle, "--threads", 1, "--token-file", tokens) as server:
        assert f'-H "Authorization: Bearer $(head -n 1 {tokens})"' in server.lines[-2]
        assert "can be read by others (mode 644)" in server.log.read_text()
        assert server.is_ready()
        assert server.client.get("/livez").status_code == 200
        for header in (None, "Bearer", "Bearer 0123456789abcde", "Basic 0123456789abcdef", "Bearer ü"):
            headers = {} if header is None else {"Authorization": header.encode()}
            for path in ("/metrics", "/v2", "/nothing", "/v2/models/dates/generate"):
                found = server.client.request("GET", path, headers=headers)  # type: ignore[arg-type]
                assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")
                assert "token" in found.json()["error"]
        for token in ("0123456789abcdef", "fedcba9876543210"):
            server.client.headers["Authorization"] = f"Bearer {token}"
            assert server.ask(DATE).status_code == 200
        tokens.write_text("new-token-of-today\n")
        server.send(signal.SIGHUP)
        eventually(lambda: server.ask(DATE).status_code == 401)
        server.client.headers["Authorization"] = "Bearer new-token-of-today"
        assert server.ask(DATE).status_code == 200


def test_serve_warns_about_missing_protection(dates_bundle: Path, tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    both = (f"one={dates_bundle}", f"two={dates_bundle}")
    with running(tmp_path, *both, "--threads", cores, "--host", "0.0.0.0") as server:
        log = server.log.read_text()
        assert f"set --threads {max(1, cores // 2)}\n" in log
        assert (
            "accepts requests from other machines; set --token-file and --tls-cert unless you trust the network" in log
        )
        assert httpx.get(f"http://127.0.0.1:{httpx.URL(server.url).port}/readyz").status_code == 200


def test_invalid_server_options_are_refused(dates_bundle: Path, tmp_path: Path) -> None:
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.write_text("\n")
    short.write_text("secret\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}: Address already in use" in refused(dates_bundle, "--port", port)
    assert "name dates is taken" in refused(dates_bundle, f"dates={tmp_path}")
    assert "is not valid in a URL" in refused(tmp_path / "a b")
    assert "there is no bundle" in refused(tmp_path / "nothing", "--port", 0)
    assert "it has no token" in refused(dates_bundle, "--token-file", empty)
    assert "token 1 is not valid" in refused(dates_bundle, "--token-file", short)
    assert "cannot be read" in refused(dates_bundle, "--token-file", tmp_path / "none")
    assert "cannot be used" in refused(dates_bundle, "--tls-cert", short)
    assert "without tls_cert" in refused(dates_bundle, "--tls-key", short)
    assert "slots is 0" in refused(dates_bundle, "--slots", 0)


def test_a_missing_package_is_named_with_its_extra(dates_bundle: Path) -> None:
    program = f"import sys; sys.modules['uvicorn'] = None\n{COMMAND}"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", str(dates_bundle)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    message = "error: this needs uvicorn, which is not installed; pip install 'tfexport[serve]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


def test_tls_refuses_plain_http(
    dates_bundle: Path, tls: tuple[ssl.SSLContext, Sequence[object]], tmp_path: Path
) -> None:
    with running(tmp_path, dates_bundle, *tls[1], verify=tls[0]) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert server.ask(DATE).json()["text_output"] == "2026-03-03"
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/livez")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{server.url}/livez")
        server.client.close()  # an idle TLS connection would keep the server until the end of its grace time
        assert server.stop() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_unfinished_handshakes_do_not_use_up_the_files_of_the_process(
    dates_bundle: Path, tls: tuple[ssl.SSLContext, Sequence[object]], tmp_path: Path
) -> None:
    options = (*tls[1], "--max-connections", 16)
    with running(tmp_path, dates_bundle, *options, before=FEW_FILES, verify=tls[0]) as server:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(connected(server)) for _ in range(100)]
            assert server.client.get("/livez").status_code == 200
            assert server.ask(DATE).json()["text_output"] == "2026-03-03"
            silent[0].settimeout(PATIENCE_S)
            assert rest_of(silent[0]) == b""  # the oldest is closed
        assert "out of system resource" not in server.log.read_text()
