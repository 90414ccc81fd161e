"""Three nodes on loopback: the server's own tests through the proxy, faults, and scaling.

`pytest -m slow -s tests/integrations/ray` runs all tests in a few minutes, and prints its measurements.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT
from tests.serve.running import eventually
from tfexport.model.model import Model

pytest.importorskip("ray", reason="Ray is not installed; pip install 'tfexport[ray]'")
from tests.integrations.ray.cluster import PATIENCE_S, Load, Machines

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FAULTY = "tests.integrations.ray.faulty:app"
NUM_CLIENTS = 16
DATE = "Dienstag, 3. März 2026"
GENERATE = "/v2/models/dates/generate"


def check(load: Load, model: Model, texts: list[str]) -> None:
    expected = {result.text for result in model.generate(texts)}
    assert {one.text for one in load.requests if one.status == 200} <= expected


def report(what: str, **figures: Any) -> None:
    print(f"\n{what}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))


def test_the_tests_of_the_server_pass_through_the_proxy(machines: Machines, dates_bundle: Path) -> None:
    assert not machines.deploy(bundle=f"dates={dates_bundle}", completions=True, translate=True)
    command = [sys.executable, "-m", "pytest", "-q", "tests/serve/http", "--server", machines.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    passed, skipped = (int(re.search(rf"(\d+) {word}", done.stdout)[1]) for word in ("passed", "skipped"))  # type: ignore[index]
    report("conformance", passed=passed, skipped=skipped)
    assert passed >= 70


@pytest.mark.parametrize("killed", ["replica", "node"])
async def test_a_killed_replica_or_node_loses_its_requests_and_is_replaced(
    machines: Machines, dates_bundle: Path, model: Model, texts: list[str], killed: str
) -> None:
    assert not machines.deploy(bundle=f"dates={dates_bundle}", min_replicas=2, max_replicas=2)
    async with Load(machines.url, texts, NUM_CLIENTS) as load:
        await load.for_more(200)
        before, start = set(machines.replicas()), time.monotonic()
        if killed == "replica":
            os.kill(machines.replicas()[0], signal.SIGKILL)
        else:
            await asyncio.to_thread(machines.cluster.remove_node, machines.cluster.list_all_nodes()[-1], False)
        await load.until(lambda: before - set(machines.replicas()))
        await load.until(lambda: len(machines.replicas()) == 2 and machines.num_running() == 2)
        back_s = time.monotonic() - start
        await load.for_more(200)
    if killed == "node":
        machines.cluster.add_node(node_ip_address="127.0.0.5", include_dashboard=False, num_cpus=2)
    check(load, model, texts)
    errors = Counter((one.status, one.text[:40]) for one in load.lost)
    report(f"{killed} killed", back_s=round(back_s, 1), lost=len(load.lost), of=len(load.requests), errors=errors)
    assert len(load.lost) <= NUM_CLIENTS
    if killed == "replica":
        assert all(one.start < start for one in load.lost)
        assert back_s < 10


async def test_the_number_of_replicas_follows_the_load(
    machines: Machines, dates_bundle: Path, model: Model, texts: list[str]
) -> None:
    scaling = {
        "min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 4, "upscale_delay_s": 0.5,
        "downscale_delay_s": 2, "metrics_interval_s": 0.2, "look_back_period_s": 1,
    }  # fmt: skip
    assert not machines.deploy(FAULTY, {"autoscaling_config": scaling}, bundle=f"dates={dates_bundle}", step_s=0.02)
    assert machines.num_running() == 1
    async with Load(machines.url, texts, NUM_CLIENTS) as load:
        up_s = await load.until(lambda: machines.num_running() == 3)
        await load.for_more(100)
    async with Load(machines.url, texts, 1) as few:
        down_s = await few.until(lambda: machines.num_running() == 1 and len(machines.replicas()) == 1)
        await few.for_more(20)
    report("scaled", up_s=round(up_s, 1), down_s=round(down_s, 1), lost=len(load.lost + few.lost))
    check(load, model, texts)
    check(few, model, texts)
    assert not load.lost + few.lost


async def test_a_new_configuration_replaces_every_replica_and_loses_no_request(
    machines: Machines, dates_bundle: Path, model: Model, texts: list[str]
) -> None:
    """Each old replica first finishes its accepted requests, with steps of 50 ms."""
    arguments = {"bundle": f"dates={dates_bundle}", "min_replicas": 2, "max_replicas": 2}
    assert not machines.deploy(FAULTY, step_s=0.05, **arguments)
    async with Load(machines.url, texts, NUM_CLIENTS) as load:
        await load.for_more(50)
        before = set(machines.replicas())
        await asyncio.to_thread(machines.submit, FAULTY, step_s=0.01, **arguments)
        took_s = await load.until(lambda: not before & set(machines.replicas()) and machines.num_running() == 2)
        await load.for_more(50)
    report("replaced", took_s=round(took_s, 1), lost=len(load.lost), answered=len(load.requests))
    check(load, model, texts)
    assert not load.lost


def test_a_full_queue_is_429(machines: Machines, dates_bundle: Path) -> None:
    assert not machines.deploy(FAULTY, bundle=f"dates={dates_bundle}", step_s=0.05, slots=2, max_waiting=4)
    limits = httpx.Limits(max_connections=40)
    with (
        httpx.Client(base_url=machines.url, timeout=PATIENCE_S, limits=limits) as client,
        ThreadPoolExecutor(40) as pool,
    ):
        found = list(pool.map(lambda _: client.post(GENERATE, json={"text_input": DATE}), range(40)))
    counts = Counter(one.status_code for one in found)
    report("flood of 40, 2 slots, 4 may wait", counts=dict(counts))
    assert set(counts) == {200, 429}
    assert counts[200] >= 8  # two for each slot, and those that wait
    assert {one.headers["retry-after"] for one in found if one.status_code == 429} == {"1"}
    assert {one.json()["text_output"] for one in found if one.status_code == 200} == {"2026-03-03"}
    assert httpx.post(machines.url + GENERATE, json={"text_input": DATE}).status_code == 200


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
async def test_a_client_that_disconnects_frees_its_rows(machines: Machines, dates_bundle: Path, endpoint: str) -> None:
    assert not machines.deploy(FAULTY, bundle=f"dates={dates_bundle}", step_s=0.1)

    def metric(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{machines.url}/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    used = partial(metric, 'tfexport_slots_used{model="dates"}')
    request = {"text_input": DATE, "parameters": {"min_new_tokens": 14}}
    async with httpx.AsyncClient(base_url=machines.url, timeout=PATIENCE_S) as client:
        tasks = [asyncio.create_task(client.post(f"/v2/models/dates/{endpoint}", json=request)) for _ in range(8)]
        while not await asyncio.to_thread(used):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    eventually(lambda: used() == 0)
    assert metric('tfexport_requests_total{finish_reason="",model="dates",outcome="cancelled"}') > 0


def test_a_stream_is_not_buffered(machines: Machines, dates_bundle: Path) -> None:
    """Each step takes 100 ms, so that buffering in the proxy is visible."""
    assert not machines.deploy(FAULTY, bundle=f"dates={dates_bundle}", step_s=0.1)
    with httpx.stream(
        "POST", f"{machines.url}{GENERATE}_stream", json={"text_input": DATE}, timeout=PATIENCE_S
    ) as answer:
        assert answer.status_code == 200
        times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: ")]
    assert len(times) == 11
    assert times[-1] - times[0] > 0.5


def test_a_replica_whose_engine_has_failed_is_replaced(machines: Machines, dates_bundle: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    assert not machines.deploy(FAULTY, bundle=f"dates={dates_bundle}", fault=str(fault))
    (before,) = machines.replicas()
    fault.touch()
    assert httpx.post(machines.url + GENERATE, json={"text_input": DATE}).status_code == 500
    failed = time.monotonic()
    fault.unlink()
    eventually(lambda: machines.replicas() not in ([], [before]) and machines.num_running() == 1, PATIENCE_S)
    report("engine failed", replaced_s=round(time.monotonic() - failed, 1))
    eventually(lambda: httpx.post(machines.url + GENERATE, json={"text_input": DATE}).status_code == 200, PATIENCE_S)


def test_requests_need_a_token(machines: Machines, dates_bundle: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    assert not machines.deploy(bundle=f"dates={dates_bundle}", token_file=str(tokens))
    for header, status in (({}, 401), ({"Authorization": "Bearer 0123456789abcdef"}, 200)):
        assert httpx.post(machines.url + GENERATE, json={"text_input": DATE}, headers=header).status_code == status
    machines.deploy_several({"/below": {"bundle": f"dates={dates_bundle}", "token_file": str(tokens)}})
    assert httpx.get(f"{machines.url}/below/livez").status_code == 200
    assert httpx.get(f"{machines.url}/below/v2").status_code == 401


def test_an_invalid_bundle_or_argument_is_reported_in_one_line(
    machines: Machines, dates_bundle: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(dates_bundle, damaged)
    content = bytearray((damaged / "encoder.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "encoder.onnx").write_bytes(content)
    start = time.monotonic()
    for args, line in (
        ({"bundle": str(tmp_path / "none")}, r"node 127\.0\.0\.\d: there is no bundle at .*none; each node that runs"),
        ({"bundle": str(damaged)}, r"node 127\.0\.0\.\d: bundle .*damaged: encoder.onnx was changed"),
        ({"bundle": str(dates_bundle), "slotz": 3, "slots": "x"}, "application: unknown key slotz; slots is 'x'"),
        ({}, "application: missing key bundle"),
        ({"bundle": str(dates_bundle), "token_file": str(tmp_path / "none")}, "token file .* cannot be read"),
        ({"bundle": str(dates_bundle), "device": "cuda"}, "BackendError: node .*"),
    ):
        assert re.search(line, machines.deploy(**args)), args
    report("six that fail", took_s=round(time.monotonic() - start, 1))


def test_a_node_without_the_bundle_is_reported_while_the_others_serve(
    machines: Machines, dates_bundle: Path, tmp_path: Path
) -> None:
    """The nodes here share their files, so the bundle is moved away before the second replica starts."""
    moved = tmp_path / "dates"
    shutil.copytree(dates_bundle, moved)
    assert not machines.deploy(bundle=str(moved))
    moved.rename(tmp_path / "elsewhere")
    machines.submit(bundle=str(moved), deployment={"num_replicas": 2})
    eventually(lambda: "there is no bundle at" in machines.status().deployments["tfexport"].message, PATIENCE_S)
    assert machines.num_running() == 1
    assert httpx.post(machines.url + GENERATE, json={"text_input": DATE}).status_code == 200
    (tmp_path / "elsewhere").rename(moved)
    eventually(lambda: machines.num_running() == 2, PATIENCE_S)


async def test_two_replicas_are_faster_than_one(
    machines: Machines, dates_bundle: Path, model: Model, texts: list[str]
) -> None:
    """Steps wait for 20 ms, as for a GPU, because clients, proxy and replicas share the cores."""
    common = {"bundle": f"dates={dates_bundle}", "slots": 4, "step_s": 0.02, "num_cpus": 1}
    machines.deploy_several({f"/{n}": common | {"min_replicas": n, "max_replicas": n} for n in (1, 2)}, FAULTY)
    counts = {}
    for number in (1, 2):
        async with Load(f"{machines.url}/{number}", texts, NUM_CLIENTS) as load:
            await asyncio.sleep(10)
        check(load, model, texts)
        assert not load.lost
        counts[number] = len(load.requests)
    report("requests by replicas", counts=counts)
    assert counts[2] > 1.3 * counts[1]
