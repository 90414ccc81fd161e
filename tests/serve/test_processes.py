"""`tfexport serve --processes`: one server, whatever process answers."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.serve.running import COMMAND, PATIENCE_S, Running, eventually, running, slow_steps
from tests.serve.test_signals import LARGE, TEXTS
from tfexport.errors import ConfigError
from tfexport.model.load import load
from tfexport.serve.config import ServerConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux supports several processes")
TWO = ("--processes", 2, "--threads", 1)
TOKENS = "0123456789abcdef\n", "fedcba9876543210\n"
# More than a busy machine takes.
HASTY = "import tfexport.serve._processes as processes; processes.ANSWER_S = 3\n"


def children(server: Running) -> list[int]:
    pid = server.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def num_sockets(pid: int) -> int:
    return sum(str(file.readlink()).startswith("socket:") for file in Path(f"/proc/{pid}/fd").iterdir())


@contextmanager
def clients(server: Running, count: int, **options: object) -> Iterator[list[httpx.Client]]:
    """Connect clients, whose connections stay open."""
    with ExitStack() as stack:
        found = [stack.enter_context(httpx.Client(base_url=server.url, **options)) for _ in range(count)]  # type: ignore[arg-type]
        for client in found:
            client.timeout = httpx.Timeout(PATIENCE_S)
            client.get("/page/icon.svg")
        yield found


def asked(client: httpx.Client, text: str) -> httpx.Response:
    return client.post("/v2/models/dates/generate", json={"text_input": text})


@contextmanager
def four_requests(server: Running) -> Iterator[list[Future[httpx.Response]]]:
    """Let four clients ask, two of each process, and wait until all are accepted."""
    with clients(server, 4) as four, ThreadPoolExecutor(4) as pool:
        found = [pool.submit(asked, client, text) for client, text in zip(four, TEXTS, strict=True)]
        eventually(lambda: server.metric(r'tfexport_requests_(?:running|waiting)\{model="dates"}') == 4)
        yield found


@pytest.fixture(scope="module")
def secured(
    dates_bundle: Path, tls: tuple[ssl.SSLContext, Sequence[object]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, dict[str, object], Path]]:
    """Return a server with TLS and tokens, options of its clients, and the file of tokens."""
    folder = tmp_path_factory.mktemp("processes")
    file = folder / "tokens"
    file.write_text(TOKENS[0])
    file.chmod(0o600)
    options: dict[str, object] = {"verify": tls[0], "headers": {"Authorization": f"Bearer {TOKENS[0].strip()}"}}
    arguments = (*TWO, *tls[1], "--token-file", file, "--slots", 4)
    with running(folder, dates_bundle, *arguments, before=HASTY, **options) as server:
        yield server, options, file


def test_lines_are_printed_once(secured: tuple[Running, dict[str, object], Path]) -> None:
    server, _, _ = secured
    assert [line.partition(" ")[0] for line in server.lines] == ["listening", "dates:", "ready", "", ""]
    assert server.log.read_text().count("loaded on ort") == 1


def test_processes_have_equal_shares_of_connections_and_answer_as_one(
    secured: tuple[Running, dict[str, object], Path], dates_bundle: Path
) -> None:
    server, options, _ = secured
    expected = [result.text for result in load(dates_bundle, threads=1).generate(list(TEXTS))]
    before = [num_sockets(pid) for pid in children(server)]
    with clients(server, 6, **options) as six:
        assert [num_sockets(pid) - number for pid, number in zip(children(server), before, strict=True)] == [3, 3]
        for client in six:
            assert [asked(client, text).json()["text_output"] for text in TEXTS] == expected
    with clients(server, 1, **{**options, "headers": {}}) as (stranger,):
        assert asked(stranger, TEXTS[0]).status_code == 401


def test_metrics_and_statistics_are_of_all_processes(secured: tuple[Running, dict[str, object], Path]) -> None:
    server, options, _ = secured
    done = 'tfexport_requests_total{finish_reason="eos",model="dates",outcome="ok"}'
    with clients(server, 2, **options) as both:
        before = server.metric(done)
        for number in range(6):
            assert asked(both[number % 2], TEXTS[number % 4]).status_code == 200
            refused = both[number % 2].post("/v2/models/dates/generate", json={"text_input": 1})
            assert refused.status_code == 400
        for client in both:
            metrics = dict(
                line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#")
            )
            assert float(metrics[done]) == before + 6
            assert float(metrics['tfexport_slots{model="dates"}']) == 8
            assert float(metrics['tfexport_request_seconds_bucket{le="+Inf",model="dates"}']) == before + 6
            (stats,) = client.get("/v2/models/dates/stats").json()["model_stats"]
            assert stats["inference_stats"]["success"]["count"] == before + 6
            assert stats["inference_stats"]["fail"]["count"] == 6
            assert stats["inference_stats"]["fail"]["ns"] > 0
            (shown,) = client.get("/page/models").json()["models"]
            assert shown["facts"]["Slots"] == "4 in each of 2 processes"


def test_sighup_reloads_all_processes(secured: tuple[Running, dict[str, object], Path]) -> None:
    server, options, file = secured
    with clients(server, 2, **options) as both:
        file.write_text(TOKENS[1])
        server.send(signal.SIGHUP)
        for client in both:
            eventually(lambda client=client: asked(client, TEXTS[0]).status_code == 401)  # type: ignore[misc]
            client.headers["Authorization"] = f"Bearer {TOKENS[1].strip()}"
            assert asked(client, TEXTS[0]).status_code == 200
    reloads = [line for line in server.log.read_text().splitlines() if "model dates: reloaded" in line]
    assert sorted(line.partition("[")[2].partition("]")[0] for line in reloads) == sorted(map(str, children(server)))


def test_all_processes_answer_what_they_have_accepted(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, *TWO, before=slow_steps(0.1)) as server:
        with four_requests(server) as found:
            server.send(signal.SIGTERM)
            for pid in children(server):  # as Ctrl-C and systemd do
                os.kill(pid, signal.SIGTERM)
            assert [one.result().status_code for one in found] == [200] * 4
        assert server.ended() == 0
        assert server.log.read_text().count("drained: all requests are answered") == 2


def test_a_killed_process_ends_the_server_after_the_others_have_answered(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, *TWO, before=slow_steps(0.1)) as server:
        with four_requests(server) as found:
            killed, other = children(server)
            os.kill(killed, signal.SIGKILL)
            ends = Counter(type(one.exception()) for one in found)
            assert ends == {type(None): 2, httpx.RemoteProtocolError: 2} or ends == {type(None): 2, httpx.ReadError: 2}
        assert server.ended() == 1
        (line,) = [line for line in server.log.read_text().splitlines() if " ERROR " in line]
        assert str(killed) in line
        assert "SIGKILL" in line
        assert not exists(other)


def test_probes_are_of_all_processes_and_none_outlives_the_parent(dates_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "fault"
    fault = slow_steps(0, file=file, fault="raise MemoryError('out of memory')")

    def probed(path: str) -> list[int]:
        return [client.get(path).status_code for client in both]

    with running(tmp_path, dates_bundle, *TWO, before=fault) as server, clients(server, 2) as both:
        file.touch()
        assert asked(both[0], TEXTS[0]).status_code == 500
        file.unlink()
        assert probed("/livez") == probed("/readyz") == probed("/v2/models/dates/ready") == [503, 503]
        assert asked(both[1], TEXTS[0]).status_code == 200
        server.send(signal.SIGHUP)
        eventually(server.is_ready)
        assert probed("/livez") == [200, 200]
        assert asked(both[0], TEXTS[0]).status_code == 200
        pids = children(server)
        server.send(signal.SIGKILL)
        eventually(lambda: not any(map(exists, pids)))


def test_a_process_that_does_not_respond_makes_the_server_unhealthy(
    secured: tuple[Running, dict[str, object], Path],
) -> None:
    server, options, _ = secured
    before = {pid: num_sockets(pid) for pid in children(server)}
    with clients(server, 1, **options) as (client,):
        (other,) = (pid for pid, number in before.items() if num_sockets(pid) == number)
        os.kill(other, signal.SIGSTOP)
        assert client.get("/livez").status_code == 503
        os.kill(other, signal.SIGCONT)
        eventually(lambda: client.get("/livez").status_code == 200)


def test_a_loading_server_stops_at_once(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, *TWO, before=LARGE, ready=False) as server:
        assert server.client.get("/livez").status_code == 200
        assert server.client.get("/readyz").status_code == 503
        server.send(signal.SIGHUP)
        eventually(lambda: server.log.read_text().count("SIGHUP: ignored") == 1)
        pids = children(server)
        assert server.stop() == 0
        eventually(lambda: not any(map(exists, pids)))


def test_a_second_signal_ends_all_processes(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, *TWO, before=slow_steps(30)) as server, four_requests(server) as found:
        pids = children(server)
        server.send(signal.SIGINT)
        eventually(lambda: server.log.read_text().count("draining: 2 requests") == 2)
        server.send(signal.SIGINT)
        assert server.ended() == 128 + signal.SIGINT
        assert all(isinstance(one.exception(), httpx.TransportError) for one in found)
        eventually(lambda: not any(map(exists, pids)))


def test_other_systems_refuse_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(ConfigError):
        patch.setattr("sys.platform", "darwin")
        ServerConfig(processes=2)


def test_errors_are_printed_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port, message in ((taken.getsockname()[1], "Address already in use"), (0, "there is no bundle")):
            count = len(os.sched_getaffinity(0)) + 1
            options = ("--processes", count, "--port", port, "--log-level", "error")
            command = [sys.executable, "-c", COMMAND, "serve", tmp_path / "nothing", *options]
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S)
            (line,) = done.stderr.splitlines()
            assert message in line
            assert done.returncode == 1
