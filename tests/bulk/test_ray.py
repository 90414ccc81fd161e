"""Runs on a Ray cluster: workers and the driver are killed, and the output equals that of one call."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.bulk.corpus import TEXTS, check_files, check_outputs, expected, outputs
from tests.bulk.test_resume import begin
from tests.conftest import ROOT
from tests.integrations.ray import conftest as environment  # before Ray, which reads it when it is imported
from tfexport.bulk.config import BulkConfig, Progress
from tfexport.errors import TfexportError
from tfexport.model.model import Model

assert environment
with warnings.catch_warnings(action="ignore"):
    pytest.importorskip("ray.data", reason="Ray is not installed; pip install 'tfexport[ray]'")

ROWS = int(os.environ.get("BULK_ROWS", "20000"))
# Loopback, but not 127.0.0.1, which Ray replaces by the address of the machine.
HOST = "127.0.0.2"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "node_ip_address": HOST}
    cluster = Cluster(initialize_head=True, head_node_args={**arguments, "include_dashboard": False})
    yield str(cluster.address)
    cluster.shutdown()


class Driver(subprocess.Popen[str]):
    """A run in its own process."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.bulk.test_ray", *map(str, arguments)]
        super().__init__(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
        self.lines: list[str] = []

    def until(self, rows: int) -> int:
        """Wait until at least this many rows are done; return their number."""
        assert self.stdout
        for line in self.stdout:
            self.lines.append(line.rstrip())
            if line.strip().isdigit() and int(line) >= rows:
                return int(line)
        raise AssertionError("\n".join(self.lines[-5:]))

    def end(self) -> int:
        """Read the other lines; return the exit code."""
        assert self.stdout
        self.lines += self.stdout.read().splitlines()
        return self.wait()


@pytest.fixture
def start(address: str, dates_bundle: Path) -> Iterator[Callable[..., Driver]]:
    """Return a function that starts a driver, which ends with the test."""
    drivers = []

    def start_one(source: Path, target: Path, bundle: Path = dates_bundle) -> Driver:
        drivers.append(Driver(address, bundle, source, target))
        return drivers[-1]

    yield start_one
    for driver in drivers:
        driver.kill()
        driver.communicate()


def kill_a_worker() -> None:
    """Kill a process of this cluster that decodes: one with the cluster's token in its environment."""
    token = os.environ["RAY_AUTH_TOKEN_PATH"].encode()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"MapWorker" in (path / "cmdline").read_bytes() and token in (path / "environ").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)
                return
    raise AssertionError("there is no worker")


def test_killed_workers_and_drivers_lose_no_row(model: Model, start: Callable[..., Driver], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [TEXTS[row % len(TEXTS)] for row in range(ROWS)]
    source.write_text("".join(json.dumps({"id": row, "text": text}) + "\n" for row, text in enumerate(texts)))
    first = start(source, target)
    done = first.until(ROWS // 10)
    kill_a_worker()
    done = first.until(max(done + 2048, ROWS * 4 // 10))
    assert done < ROWS
    first.kill()
    first.wait()
    assert not target.exists()
    saved = sum(parquet.read_metadata(path).num_rows for path in (tmp_path / "out.jsonl.parts").glob("part-*"))
    assert saved >= done
    second = start(source, target)
    second.until(saved + 1024)
    kill_a_worker()
    assert second.end() == 0, second.lines
    (resumed,) = (line for line in second.lines if line.startswith("resuming a former run: "))
    (decoded,) = (line for line in second.lines if line.startswith("decoded "))
    assert int(resumed.split()[4].replace(",", "")) >= saved
    assert int(decoded.split()[1]) <= ROWS - saved
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["id"], row["text"]) for row in found] == list(enumerate(texts))
    wanted = expected(model)
    check_outputs(outputs(target), [wanted[row % len(TEXTS)] for row in range(ROWS)])
    check_files(tmp_path, "in.jsonl", "out.jsonl")


def test_a_run_of_one_machine_is_resumed(model: Model, start: Callable[..., Driver], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"text": TEXTS[row % len(TEXTS)]}) + "\n" for row in range(2000)))
    begin(model, source, target, 1, BulkConfig(rows_per_part=512))
    driver = start(source, target)
    assert driver.end() == 0, driver.lines
    assert "decoded 1488 of 2000" in driver.lines
    assert len(target.read_text().splitlines()) == 2000


@pytest.mark.parametrize(
    ("text", "bundle", "message"),
    [
        ('{"text": "1.1.2000"}\n{', [], "InputError: .*line 2 is not JSON"),
        ("", [], "InputError: .* is empty"),
        ('{"text": "1.1.2000"}\n', ["nothing"], "BundleError: .*tfexport onnx SOURCE --output"),
    ],
)
def test_errors_are_one_line(
    text: str, bundle: list[str], message: str, start: Callable[..., Driver], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    driver = start(tmp_path / "in.jsonl", tmp_path / "out.jsonl", *(tmp_path / name for name in bundle))
    assert driver.end() == 1
    assert re.search(message, driver.lines[-1])
    check_files(tmp_path, "in.jsonl")


def drive(address: str, bundle: str, source: str, target: str) -> None:
    """Decode a file on a cluster; print the progress, and the error if it fails."""
    import ray

    from tfexport.bulk.ray import Workers, generate_file

    ray.init(address=address, log_to_driver=False, _node_ip_address=address.partition(":")[0])
    config, workers, show = BulkConfig(rows_per_part=512), Workers(least=2), partial(print, flush=True)

    def show_progress(progress: Progress) -> None:
        show(progress.done)

    try:
        summary = generate_file(bundle, source, target, config, workers=workers, report=show, on_progress=show_progress)
    except TfexportError as error:
        show(f"{type(error).__name__}: {error}")
        sys.exit(1)
    show(f"decoded {summary.num_decoded} of {summary.num_rows}")


if __name__ == "__main__":
    drive(*sys.argv[1:])
