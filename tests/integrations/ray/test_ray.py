"""Three nodes on loopback: the server's own tests through the proxy, what a fault costs, and how replicas come and go.

`pytest -m slow -s tests/integrations/ray` runs all of it in a few minutes, and prints what it has measured.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
REPLICAS = {"one": 1, "two": 2}
ROUNDS, ROUND_S = 5, 4.0
GENERATE = "/v2/models/dates/generate"


def checked(load: Load, model: Model, texts: list[str]) -> None:
    """Check that what was answered is what `generate` says."""
    expected = {result.text for result in model.generate(texts)}
    assert {one.said for one in load.asked if one.status == 200} <= expected


def report(what: str, **figures: Any) -> None:
    """Print what was measured."""
    print(f"\n{what}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))


def test_the_tests_of_the_server_pass_through_the_proxy(machines: Machines, dates_bundle: Path) -> None:
    assert not machines.deploy(bundle=f"dates={dates_bundle}", completions=True, translate=True)
    command = [sys.executable, "-m", "pytest", "-q", "tests/serve/http", "--server", machines.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    passed, skipped = (int(re.search(rf"(\d+) {word}", done.stdout)[1]) for word in ("passed", "skipped"))  # type: ignore[index]
    report("conformance", passed=passed, skipped=skipped)
    assert passed >= 70


def test_a_replica_that_is_killed_loses_what_it_had_and_comes_back(
    machines: Machines, dates_bundle: Path, model: Model, texts: list[str]
) -> None:
    assert not machines.deploy(bundle=f"dates={dates_bundle}", min_replicas=2, max_replicas=2)

    async def use() -> None:
        async with Load(machines.url, texts, NUM_CLIENTS) as load:
            await load.for_more(200)
            victim = machines.replicas()[0]
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            await load.until(lambda: victim not in machines.replicas())
            await load.until(lambda: len(machines.replicas()) == 2 and machines.num_running() == 2)
            back_s = time.monotonic() - killed
            await load.for_more(200)
        report(
            "replica killed",
            back_s=round(back_s, 1),
            lost=len(load.lost),
            answered=len(load.asked) - len(load.lost),
            how=dict(Counter((one.status, one.said[:40]) for one in load.lost)),
            last_lost_began_s=round(max((one.start for one in load.lost), default=killed) - killed, 3),
        )
        checked(load, model, texts)
        assert all(one.start < killed for one in load.lost)
        assert len(load.lost) <= NUM_CLIENTS
        assert back_s < 10

    asyncio.run(use())


def test_a_node_that_is_killed_is_left_and_its_replicas_start_elsewhere(
    machines: Machines, dates_bundle: Path, model: Model, texts: list[str]
) -> None:
    assert not machines.deploy(bundle=f"dates={dates_bundle}", min_replicas=2, max_replicas=2)

    async def use() -> None:
        async with Load(machines.url, texts, NUM_CLIENTS) as load:
            await load.for_more(200)
            before = set(machines.replicas())
            node = machines.cluster.list_all_nodes()[-1]
            killed = time.monotonic()
            await asyncio.to_thread(machines.cluster.remove_node, node, False)
            await load.until(lambda: before - set(machines.replicas()))
            await load.until(lambda: len(machines.replicas()) == 2 and machines.num_running() == 2)
            back_s = time.monotonic() - killed
            await load.for_more(200)
        report(
            "node killed",
            back_s=round(back_s, 1),
            lost=len(load.lost),
            answered=len(load.asked) - len(load.lost),
            how=dict(Counter((one.status, one.said[:40]) for one in load.lost)),
            last_lost_began_s=round(max((one.start for one in load.lost), default=killed) - killed, 3),
        )
        checked(load, model, texts)
        assert len(load.lost) <= NUM_CLIENTS

    try:
        asyncio.run(use())
    finally:
        machines.cluster.add_node(node_ip_address="127.0.0.5", include_dashboard=False, num_cpus=2)


def test_replicas_come_with_the_load_and_go_with_it(
    machines: Machines, dates_bundle: Path, model: Model, texts: list[str]
) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 4,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 2,
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1,
    }
    assert not machines.deploy(FAULTY, {"autoscaling_config": scaling}, bundle=f"dates={dates_bundle}", step_s=0.02)
    assert machines.num_running() == 1

    async def use() -> None:
        async with Load(machines.url, texts, NUM_CLIENTS) as load:
            up_s = await load.until(lambda: machines.num_running() == 3)
            await load.for_more(100)
        async with Load(machines.url, texts, 1) as few:
            down_s = await few.until(lambda: machines.num_running() == 1 and len(machines.replicas()) == 1)
            await few.for_more(20)
        report("scaled", up_s=round(up_s, 1), down_s=round(down_s, 1), lost=len(load.lost + few.lost))
        checked(load, model, texts)
        checked(few, model, texts)
        assert not load.lost + few.lost

    asyncio.run(use())


def test_a_new_configuration_replaces_every_replica_and_loses_no_request(
    machines: Machines, dates_bundle: Path, model: Model, texts: list[str]
) -> None:
    """Each old replica finishes what it has accepted, steps of 50 ms, before it goes."""
    asked = {"bundle": f"dates={dates_bundle}", "min_replicas": 2, "max_replicas": 2}
    assert not machines.deploy(FAULTY, step_s=0.05, **asked)

    async def use() -> None:
        async with Load(machines.url, texts, NUM_CLIENTS) as load:
            await load.for_more(50)
            before = set(machines.replicas())
            await asyncio.to_thread(machines.submit, FAULTY, step_s=0.01, **asked)
            took_s = await load.until(lambda: not before & set(machines.replicas()) and machines.num_running() == 2)
            await load.for_more(50)
        report("replaced", took_s=round(took_s, 1), lost=len(load.lost), answered=len(load.asked))
        checked(load, model, texts)
        assert not load.lost

    asyncio.run(use())


def test_what_the_slots_and_the_queue_do_not_hold_is_429(machines: Machines, dates_bundle: Path) -> None:
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
def test_who_goes_away_frees_its_rows(machines: Machines, dates_bundle: Path, endpoint: str) -> None:
    assert not machines.deploy(FAULTY, bundle=f"dates={dates_bundle}", step_s=0.1)

    def used() -> float:
        found = re.search(
            r'^tfexport_slots_used\{model="dates"\} (\S+)$', httpx.get(f"{machines.url}/metrics").text, re.M
        )
        return float(found[1]) if found else 0.0

    async def leave() -> None:
        asked = {"text_input": DATE, "parameters": {"min_new_tokens": 14}}
        async with httpx.AsyncClient(base_url=machines.url, timeout=PATIENCE_S) as client:
            tasks = [asyncio.create_task(client.post(f"/v2/models/dates/{endpoint}", json=asked)) for _ in range(8)]
            while not await asyncio.to_thread(used):
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: used() == 0)
    cancelled = r'^tfexport_requests_total\{finish_reason="",model="dates",outcome="cancelled"\} (\S+)$'
    assert float(re.search(cancelled, httpx.get(f"{machines.url}/metrics").text, re.M)[1]) > 0  # type: ignore[index]


def test_pieces_of_a_stream_come_as_they_are_made(machines: Machines, dates_bundle: Path) -> None:
    """Each step takes 100 ms, so that a proxy which held pieces back would show."""
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


def test_only_who_has_a_token_may_ask(machines: Machines, dates_bundle: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    assert not machines.deploy(bundle=f"dates={dates_bundle}", token_file=str(tokens))
    for header, status in (({}, 401), ({"Authorization": "Bearer 0123456789abcdef"}, 200)):
        asked = httpx.post(machines.url + GENERATE, json={"text_input": DATE}, headers=header)
        assert asked.status_code == status
    machines.deploy_beside({"/below": {"bundle": f"dates={dates_bundle}", "token_file": str(tokens)}})
    assert httpx.get(f"{machines.url}/below/livez").status_code == 200
    assert httpx.get(f"{machines.url}/below/v2").status_code == 401


def test_what_cannot_be_served_fails_with_a_line_that_says_why(
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


def test_a_replica_on_a_node_without_the_bundle_says_so_while_the_others_serve(
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


@pytest.mark.parametrize(("what", "step_s"), [("steps on the CPU", 0.0), ("steps that wait 20 ms, as for a GPU", 0.02)])
def test_two_replicas_beside_one(
    machines: Machines, dates_bundle: Path, model: Model, texts: list[str], what: str, step_s: float
) -> None:
    """In turns. Clients, proxy and replicas share the cores: only what waits can gain all that a second one brings."""
    asked = {"bundle": f"dates={dates_bundle}", "slots": 4, "step_s": step_s, "num_cpus": 1}
    machines.deploy_beside(
        {f"/{name}": asked | {"min_replicas": number, "max_replicas": number} for name, number in REPLICAS.items()},
        FAULTY,
    )
    rates: dict[str, list[float]] = {name: [] for name in REPLICAS}

    async def use() -> None:
        for _ in range(ROUNDS):
            for name in REPLICAS:
                start = time.monotonic()
                async with Load(f"{machines.url}/{name}", texts, NUM_CLIENTS) as load:
                    await asyncio.sleep(ROUND_S)
                rates[name].append(len(load.asked) / (time.monotonic() - start))
                checked(load, model, texts)
                assert not load.lost

    asyncio.run(use())
    ratios = [two / one for one, two in zip(*rates.values(), strict=True)]
    medians = {name: round(statistics.median(found), 1) for name, found in rates.items()}
    report(what, **medians, ratio=round(statistics.median(ratios), 2), ratios=[round(one, 2) for one in ratios])
    assert not step_s or statistics.median(ratios) > 1.3
