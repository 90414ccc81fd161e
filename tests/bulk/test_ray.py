"""Over a cluster: workers and the driver are killed, and each row is there once, as one call decodes it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.bulk.corpus import TEXTS, expected, near, no_litter
from tests.conftest import ROOT
from tfexport.model.model import Model

# Ray reads its environment when it is imported, and would keep its token in the home of whoever runs the tests.
if "RAY_AUTH_TOKEN_PATH" not in os.environ:
    _TOKEN = Path(tempfile.mkdtemp(prefix="tfexport-ray-"), "auth_token")
    _TOKEN.touch(0o600)
    _TOKEN.write_text(os.urandom(32).hex())
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(_TOKEN), "RAY_USAGE_STATS_ENABLED": "0"}
# It warns of itself while it is imported.
with warnings.catch_warnings(action="ignore"), contextlib.suppress(ImportError):
    importlib.import_module("ray.data")
ray = pytest.importorskip("ray", reason="Ray is not installed; pip install 'tfexport[ray]'")

ROWS = int(os.environ.get("BULK_ROWS", "20000"))
# Of loopback; not 127.0.0.1, in whose place Ray takes the address of the machine.
HOST = "127.0.0.2"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start a node on loopback."""
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "node_ip_address": HOST}
    cluster = Cluster(initialize_head=True, head_node_args={**arguments, "include_dashboard": False})
    yield str(cluster.address)
    cluster.shutdown()


class Driver:
    """A run in a process of its own."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.bulk.ray_driver", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
        self.said: list[str] = []

    def until(self, rows: int) -> int:
        """Read what it says until so many rows are done; return how many are."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if line.strip().isdigit() and int(line) >= rows:
                return int(line)
        raise AssertionError("\n".join(self.said[-5:]))

    def end(self) -> int:
        """Read the rest; return the exit code."""
        assert self.process.stdout
        self.said += self.process.stdout.read().splitlines()
        self.process.stdout.close()
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def start(address: str, dates_bundle: Path) -> Iterator[Callable[..., Driver]]:
    """Return a function that starts a driver; it is ended with the test."""
    drivers = []

    def start_one(source: Path, target: Path, bundle: Path = dates_bundle) -> Driver:
        drivers.append(Driver(address, bundle, source, target))
        return drivers[-1]

    yield start_one
    for driver in drivers:
        driver.kill()


def workers() -> list[int]:
    """Return the processes of this cluster that decode: those with its token in their environment."""
    token, found = os.environ["RAY_AUTH_TOKEN_PATH"].encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"MapWorker" in (path / "cmdline").read_bytes() and token in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def test_each_row_is_there_once_whoever_is_killed(model: Model, start: Callable[..., Driver], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [TEXTS[row % len(TEXTS)] for row in range(ROWS)]
    source.write_text("".join(json.dumps({"id": row, "text": text}) + "\n" for row, text in enumerate(texts)))
    first = start(source, target)
    done = first.until(ROWS // 10)
    os.kill(workers()[0], signal.SIGKILL)
    done = first.until(max(done + 2048, ROWS * 4 // 10))
    assert done < ROWS
    first.kill()
    assert not target.exists()
    kept = sum(parquet.read_metadata(path).num_rows for path in (tmp_path / "out.jsonl.parts").glob("part-*"))
    assert kept >= done
    second = start(source, target)
    second.until(kept + 1024)
    os.kill(workers()[0], signal.SIGKILL)
    assert second.end() == 0, second.said
    (went_on,) = (line for line in second.said if line.startswith("resuming a former run: "))
    (decoded,) = (line for line in second.said if line.startswith("decoded "))
    assert int(went_on.split()[4].replace(",", "")) >= kept
    assert int(decoded.split()[1]) <= ROWS - kept
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["id"], row["text"]) for row in found] == list(enumerate(texts))
    wanted = expected(model)
    near(
        [(row["output"], row["output_score"], row["output_finish_reason"], row["output_error"]) for row in found],
        [wanted[row % len(TEXTS)] for row in range(ROWS)],
    )
    no_litter(tmp_path, "in.jsonl", "out.jsonl")


def test_a_run_of_one_machine_is_gone_on_with(model: Model, start: Callable[..., Driver], tmp_path: Path) -> None:
    from tests.bulk.test_going_on import begin
    from tfexport.bulk.config import BulkConfig

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [TEXTS[row % len(TEXTS)] for row in range(2000)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    begin(model, source, target, 1, BulkConfig(rows_per_part=512))
    driver = start(source, target)
    assert driver.end() == 0, driver.said
    assert "decoded 1488 of 2000" in driver.said
    assert len(target.read_text().splitlines()) == 2000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"text": "1.1.2000"}\n{', "InputError: .*line 2 is not JSON"),
        (b"", "InputError: .* is empty"),
    ],
)
def test_what_is_refused_is_one_line(data: bytes, message: str, start: Callable[..., Driver], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(data)
    driver = start(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert driver.end() == 1
    assert re.search(message, driver.said[-1])
    no_litter(tmp_path, "in.jsonl")


def test_what_a_worker_refuses_is_one_line(start: Callable[..., Driver], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1.1.2000"}\n')
    driver = start(tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "nothing")
    assert driver.end() == 1
    assert driver.said[-1].startswith("BundleError: ")
    assert "tfexport onnx SOURCE --output" in driver.said[-1]
