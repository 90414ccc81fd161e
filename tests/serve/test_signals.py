"""SIGTERM and SIGINT drain the server, a second one ends it, SIGHUP reloads it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.bundle.made import edit
from tests.serve.running import PATIENCE_S, Running, eventually, running, slow_steps
from tfexport.model.load import load

TEXTS = ("Dienstag, 3. März 2026", "le 14 juillet 1989", "2088년 9월 17일 금요일", "15 de septiembre de 2001")
# Steps take as long as those of a large model.
HEAVY = slow_steps(0.01)
# A bundle that takes long to load.
LARGE = """
import time
import tfexport.serve.engine as engine
load = engine.load
def large(*args, **options):
    time.sleep(60)
    return load(*args, **options)
engine.load = large
"""


class Load:
    """Clients that ask until they are refused; `answers` counts texts with answers, `ends` has each client's last."""

    def __init__(self, server: Running, num_clients: int) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self.ends: list[object] = []
        self._server, self._is_over = server, False
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)]

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._server.url, timeout=PATIENCE_S) as client:
            while not self._is_over:
                text = TEXTS[number % len(TEXTS)]
                number += 1
                try:
                    found = client.post("/v2/models/dates/generate", json={"text_input": text})
                except httpx.TransportError as error:
                    self.ends.append(type(error))
                    return
                if found.status_code != 200:
                    self.ends.append(found.status_code)
                    return
                self.answers[text, found.json()["text_output"]] += 1

    @property
    def num_answers(self) -> int:
        return sum(self.answers.values())

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        self.start()
        try:
            eventually(lambda: self.num_answers >= len(self._threads))
            yield
        finally:
            self._is_over = True
            self.join()


@pytest.fixture(scope="module")
def expected(dates_bundle: Path) -> set[tuple[str, str]]:
    model = load(dates_bundle, threads=1)
    return {(text, result.text) for text, result in zip(TEXTS, model.generate(list(TEXTS)), strict=True)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_at_once(dates_bundle: Path, tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, dates_bundle, "--threads", 1) as server:
        assert server.is_ready()  # the connection stays open
        start = time.monotonic()
        server.send(number)
        assert server.ended() == 0
        assert time.monotonic() - start < 10
        assert server.log.read_text().splitlines()[-1].endswith("drained: all requests are answered")


def test_accepted_requests_are_answered_before_the_server_stops(
    dates_bundle: Path, tmp_path: Path, expected: set[tuple[str, str]]
) -> None:
    options = ("--threads", 1, "--slots", 8, "--drain-delay", 4)
    with running(tmp_path, dates_bundle, *options, before=HEAVY) as server:
        load = Load(server, 12)
        with load.going_on():
            server.send(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{server.url}/readyz").status_code == 503, 3)
            before = load.num_answers
            assert httpx.get(f"{server.url}/livez").status_code == 200
            eventually(lambda: load.num_answers > before + 4, 4)  # it still takes requests
            assert server.ended() == 0
            eventually(lambda: len(load.ends) == 12)
        assert set(load.answers) <= expected
        assert set(load.ends) <= {503, httpx.ConnectError}
        assert 503 in load.ends


def test_a_stream_that_has_begun_is_finished(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, "--threads", 1, before=HEAVY) as server:
        asked = {"text_input": TEXTS[0]}
        with server.client.stream("POST", "/v2/models/dates/generate_stream", json=asked) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.send(signal.SIGTERM)
            rest = list(lines)
        assert first.startswith("data: ")
        assert '"finish_reason": "eos"' in "".join(rest)
        assert server.ended() == 0


def test_requests_beyond_the_shutdown_timeout_are_cancelled(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, "--threads", 1, "--shutdown-timeout", 1, before=slow_steps(1)) as server:
        load = Load(server, 3)
        load.start()
        eventually(lambda: server.metric('tfexport_requests_running{model="dates"}') == 3)
        assert server.stop() == 1
        load.join()
        assert load.ends == [503, 503, 503]
        assert "not all requests were answered within 1 s" in server.log.read_text()


def test_a_second_signal_ends_the_server_at_once(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, "--threads", 1, before=slow_steps(30)) as server:
        load = Load(server, 1)
        load.start()
        eventually(lambda: httpx.get(f"{server.url}/metrics").text.count('running{model="dates"} 1.0'))
        server.send(signal.SIGTERM)
        eventually(lambda: "draining: 1 requests" in server.log.read_text())
        start = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.ended() == 128 + signal.SIGTERM
        assert time.monotonic() - start < 5
        load.join()
        assert server.log.read_text().endswith("SIGTERM again: aborted\n")


def test_a_loading_server_is_alive_and_stops_at_once(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, before=LARGE, ready=False) as server:
        assert server.client.get("/livez").status_code == 200
        assert server.client.get("/readyz").status_code == 503
        found = server.ask(TEXTS[0])
        assert (found.status_code, "retry-after" in found.headers) == (503, True)
        server.send(signal.SIGHUP)
        eventually(lambda: "SIGHUP: ignored" in server.log.read_text())
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 5
        assert "SIGTERM: stopped before it was ready" in server.log.read_text()


def reloads(server: Running) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if "model dates: " in line]


def test_bundles_are_replaced_under_load(dates_bundle: Path, tmp_path: Path, expected: set[tuple[str, str]]) -> None:
    other, wrong, damaged, served = (tmp_path / name for name in ("other", "wrong", "damaged", "dates"))
    shutil.copytree(dates_bundle, other)
    edit(other, lambda data: data["text"].update(target_prefix=[20]))
    shutil.copytree(other, wrong)
    edit(other, lambda data: data["text"].update(samples=[]))
    shutil.copytree(dates_bundle, damaged)
    with (damaged / "weights.safetensors").open("r+b") as file:
        file.seek(100_000)
        file.write(b"damage")
    found = load(other, threads=1).generate(list(TEXTS))
    expected_then = {(text, result.text) for text, result in zip(TEXTS, found, strict=True)}
    assert not expected & expected_then
    served.symlink_to(dates_bundle)
    with running(tmp_path, served, "--threads", 1) as server:
        load_of_clients = Load(server, 4)
        with load_of_clients.going_on():
            for number, (bundle, message) in enumerate(
                [
                    (wrong, "the old one stays in use: the output of recorded text"),
                    (other, "dates: reloaded in"),
                    (damaged, "the old one stays in use: bundle"),
                    (dates_bundle, "dates: reloaded in"),
                    (other, "dates: reloaded in"),
                ]
            ):
                link = tmp_path / "link"
                link.symlink_to(bundle)
                os.replace(link, served)
                server.send(signal.SIGHUP)
                eventually(lambda number=number: len(reloads(server)) > number)
                assert message in reloads(server)[-1]
                before = load_of_clients.num_answers
                eventually(lambda before=before: load_of_clients.num_answers > before + 8)
                assert server.is_ready()
        assert load_of_clients.ends == []
        assert set(load_of_clients.answers) == expected | expected_then
        assert (TEXTS[0], server.ask(TEXTS[0]).json()["text_output"]) in expected_then
        assert server.stop() == 0


def test_garbage_collections_skip_what_is_loaded(dates_bundle: Path, tmp_path: Path) -> None:
    count = "import atexit, gc, sys\natexit.register(lambda: print(len(gc.get_objects()), file=sys.stderr))"
    with running(tmp_path, dates_bundle, "--threads", 1, before=count) as server:
        server.send(signal.SIGHUP)
        eventually(lambda: reloads(server))
        server.ask(TEXTS[0])
        assert server.stop() == 0
        assert int(server.log.read_text().splitlines()[-1]) < 20_000  # of 85,000


def test_a_server_stops_while_a_bundle_is_replaced(dates_bundle: Path, tmp_path: Path) -> None:
    later = LARGE.replace("    time.sleep(60)\n", "    time.sleep(60 * len(loaded)); loaded.append(1)\n")
    with running(tmp_path, dates_bundle, "--threads", 1, before=f"loaded = []{later}") as server:
        server.send(signal.SIGHUP)
        time.sleep(0.5)
        assert server.ask(TEXTS[0]).status_code == 200
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 10


def test_a_killed_process_is_replaced_with_the_same_output(dates_bundle: Path, tmp_path: Path) -> None:
    sampled = {"do_sample": True, "temperature": 3.0, "num_return_sequences": 4, "seed": 11}
    with running(tmp_path, dates_bundle, "--threads", 1, before=HEAVY) as server:
        before = server.ask(TEXTS[0], **sampled).json()
        asked = {"text_input": TEXTS[0]}
        with server.client.stream("POST", "/v2/models/dates/generate_stream", json=asked) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.send(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert server.ended() == -signal.SIGKILL
    with running(tmp_path, dates_bundle, "--threads", 1) as server:
        assert server.ask(TEXTS[0], **sampled).json() == before


def test_a_failed_thread_answers_all_and_a_reload_recovers(dates_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "fault"
    fault = slow_steps(0.01, file=file, fault="raise MemoryError('out of memory')")
    with running(tmp_path, dates_bundle, "--threads", 1, "--slots", 1, before=fault) as server:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(server.ask, TEXTS[0]) for _ in range(8)]
            eventually(lambda: server.metric('tfexport_requests_waiting{model="dates"}') > 1)
            file.touch()
            found = [one.result() for one in asked]
        failed = [one for one in found if one.status_code != 200]
        assert {one.status_code for one in failed} == {500}
        assert all(one.json().keys() == {"error"} and "Traceback" not in one.text for one in failed)
        assert server.client.get("/readyz").status_code == 503
        assert server.client.get("/livez").status_code == 503
        assert "out of memory" in server.log.read_text()
        file.unlink()
        server.send(signal.SIGHUP)
        eventually(server.is_ready)
        assert server.client.get("/livez").status_code == 200
        assert server.ask(TEXTS[0]).status_code == 200
        assert server.stop() == 0
