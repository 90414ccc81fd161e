"""What callers see when the engine's thread fails or hangs, or a reader is slow."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.serve.running import eventually, running, slow_steps

DATE = "Dienstag, 3. März 2026"


def test_a_thread_that_fails_answers_all_and_a_reload_begins_anew(dates_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "fault"
    fault = slow_steps(0.01, file=file, fault="raise MemoryError('out of memory')")
    with running(tmp_path, dates_bundle, "--threads", 1, "--slots", 1, before=fault) as server:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(server.ask, DATE) for _ in range(8)]
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
        assert server.ask(DATE).status_code == 200
        assert server.stop() == 0
