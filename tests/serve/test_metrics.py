"""What Prometheus reads."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import parser

from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.metrics import BUCKETS, Metrics

NAMES = {
    "tfexport_requests": "counter",
    "tfexport_requests_running": "gauge",
    "tfexport_requests_waiting": "gauge",
    "tfexport_slots": "gauge",
    "tfexport_slots_used": "gauge",
    "tfexport_queue_seconds": "histogram",
    "tfexport_encode_seconds": "histogram",
    "tfexport_decode_step_seconds": "histogram",
    "tfexport_time_to_first_token_seconds": "histogram",
    "tfexport_time_per_output_token_seconds": "histogram",
    "tfexport_request_seconds": "histogram",
    "tfexport_align_seconds": "histogram",
    "tfexport_source_tokens": "counter",
    "tfexport_target_tokens": "counter",
    "tfexport_step_batch_size": "histogram",
}


@pytest.fixture(scope="module")
def metrics(dates_bundle: Path) -> Metrics:
    metrics = Metrics()

    async def use() -> None:
        engine = Engine(dates_bundle, ServingConfig(slots=8), observer=metrics.observer("dates"), threads=1)
        metrics.watch({"dates": engine, "other": Engine(dates_bundle)})
        async with engine:
            await engine.generate("3 May 1999")
            await engine.generate("3 May 1999", do_sample=True, num_return_sequences=2)
            await engine.generate("3 May 1999", max_new_tokens=1)

    asyncio.run(use())
    return metrics


def test_the_names_types_and_labels_are_those_of_the_documentation(metrics: Metrics) -> None:
    body, kind = metrics.expose("text/plain")
    assert kind.startswith("text/plain")
    families = {
        family.name: family
        for family in parser.text_string_to_metric_families(body.decode())
        if not family.name.endswith("_created")
    }
    assert {name: family.type for name, family in families.items()} == NAMES
    labels = {label for family in families.values() for sample in family.samples for label in sample.labels}
    assert labels == {"model", "outcome", "finish_reason", "le"}
    assert {sample.labels["model"] for family in families.values() for sample in family.samples} == {"dates"}
    limits = {sample.labels["le"] for sample in families["tfexport_queue_seconds"].samples if "le" in sample.labels}
    assert {float(limit) for limit in limits} == {*BUCKETS, float("inf")}


def test_everything_is_counted(metrics: Metrics) -> None:
    def total(name: str) -> float:
        return metrics.total(f"tfexport_{name}", "dates")

    assert total("requests_total") == total("request_seconds_count") == 3
    assert total("queue_seconds_count") == total("time_to_first_token_seconds_count") == 3
    assert total("time_per_output_token_seconds_count") == 2  # one text has one token
    assert total("encode_seconds_count") == 3
    assert total("decode_step_seconds_count") == total("step_batch_size_count") >= 23
    assert total("step_batch_size_sum") == total("target_tokens_total") >= 34
    assert total("source_tokens_total") > 6
    assert total("slots") == 8
    assert total("slots_used") == total("requests_running") == total("requests_waiting") == 0


def test_promtool_finds_nothing_to_say(metrics: Metrics) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([promtool, "check", "metrics"], input=metrics.expose("")[0], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
