"""The comparison of ways to serve: loads in the worker, and a quick run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import serving
from click.testing import CliRunner
from workers import BATCH_SIZE, Ledger, run_load


@pytest.mark.parametrize("policy", ["threads", "window"])
def test_every_request_gets_its_own_answer(policy: str) -> None:
    sizes: list[int] = []

    def decode(batch: list[list[int]]) -> list[list[int]]:
        sizes.append(len(batch))
        return [[ids[0] + 1] for ids in batch]

    sources = [[number] for number in range(100)]
    found = run_load(policy, decode, sources, Ledger(None, len(sources), 60.0))
    assert found["outputs"] == [[number + 1] for number in range(100)]
    assert sum(sizes) == 100
    assert max(sizes) <= (1 if policy == "threads" else BATCH_SIZE)
    assert all(latency > 0 for latency in found["latencies_s"])


def test_late_requests_are_abandoned() -> None:
    def decode(batch: list[list[int]]) -> list[list[int]]:
        time.sleep(0.1)
        return batch

    found = run_load("window", decode, [[1]] * 70, Ledger(None, 70, 0.05))
    assert None in found["latencies_s"]


@pytest.mark.slow
def test_a_quick_run_writes_result_and_table(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "found.json"), "--model", "tiny", "--quick", "--python", "/nowhere/python"]
    done = CliRunner().invoke(serving.main, words)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["agreement"]["equal"] for one in found["contestants"][:3]] == [1.0] * 3
    assert len(found["contestants"]) == 4  # without the peer
    assert (tmp_path / "found.md").read_text().count("\n") >= 6
