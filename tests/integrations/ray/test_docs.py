"""The configuration file, the program and the commands of docs/guides/ray.md are right."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import ROOT
from tests.serve.running import PATIENCE_S, eventually
from tests.test_docs import EVERY
from tfexport.integrations.ray import Arguments

FILE = ROOT / "docs" / "serving" / "ray.yaml"
(PROGRAM,) = (block.text for block in EVERY if block.name.startswith("ray.md:") and block.language == "python")


def test_the_file_has_valid_arguments() -> None:
    (application,) = yaml.safe_load(FILE.read_text(encoding="utf-8"))["applications"]
    found = Arguments.read(application["args"])
    scaling = application["deployments"][0]["autoscaling_config"]
    assert (found.min_replicas, found.max_replicas) == (scaling["min_replicas"], scaling["max_replicas"])
    assert scaling["target_ongoing_requests"] == found.slots


def known(given: Any, read: Any) -> bool:
    """Return whether everything was read; Serve ignores keys that it does not know."""
    if isinstance(given, dict):
        return all(key in read and known(value, read[key]) for key, value in given.items())
    if isinstance(given, list):
        return len(given) == len(read) and all(map(known, given, read))
    return given == read


@pytest.mark.filterwarnings("ignore")
def test_serve_knows_every_key_of_the_file() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed; pip install 'tfexport[ray]'")
    given = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    read = schema.ServeDeploySchema.model_validate(given).model_dump(mode="json", exclude_unset=True)
    assert known(given, read)
    with pytest.raises(AssertionError):
        assert known({"proxi_location": "EveryNode"} | given, read)


def command(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start `serve`, Ray's command line."""
    pytest.importorskip("ray", reason="Ray is not installed; pip install 'tfexport[ray]'")
    program = "import sys; from ray.serve.scripts import cli; sys.argv[0] = 'serve'; cli()"
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, *map(str, words)], text=True, **options)


@pytest.mark.slow
def test_serve_build_takes_the_program(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(PROGRAM, encoding="utf-8")
    with command("build", "service:application", "-o", tmp_path / "out.yaml", cwd=tmp_path) as process:
        assert process.wait(PATIENCE_S) == 0
    (application,) = yaml.safe_load((tmp_path / "out.yaml").read_text())["applications"]
    assert application["import_path"] == "service:application"
    (deployment,) = application["deployments"]
    assert deployment["name"] == "tfexport"
    assert deployment["ray_actor_options"]["num_gpus"] == 0.5
    assert deployment["backpressure_config"]["status_code"] == 429


@pytest.mark.slow
def test_serve_run_takes_the_file(dates_bundle: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = FILE.read_text(encoding="utf-8").replace("/srv/bundles/dates", f"dates={dates_bundle}")
    (tmp_path / "ray.yaml").write_text(text.replace("port: 8000", f"port: {port}"), encoding="utf-8")
    environment = os.environ | {"RAY_ADDRESS": "local"}  # and no cluster that runs here already
    with (
        (tmp_path / "log").open("w") as log,
        command("run", "ray.yaml", cwd=tmp_path, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: process.poll() is not None or is_ready(url), 2 * PATIENCE_S)
            request = {"text_input": "Dienstag, 3. März 2026"}
            assert httpx.post(f"{url}/v2/models/dates/generate", json=request).json()["text_output"] == "2026-03-03"
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.HTTPError:
        return False
