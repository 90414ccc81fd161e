"""Metrics for Prometheus, and Triton's statistics of a model."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.serve.http.service import VERSION, service_of
from tfexport.serve.metrics import Metrics


async def expose(request: Request) -> Response:
    """Return all metrics as text."""
    body, kind = _metrics(request).expose(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": kind})


async def statistics(request: Request) -> Response:
    """Return the statistics of a model."""
    name = service_of(request).name(request)
    return JSONResponse({"model_stats": [_statistics(_metrics(request), name)]})


async def all_statistics(request: Request) -> Response:
    """Return the statistics of every model."""
    metrics = _metrics(request)
    return JSONResponse({"model_stats": [_statistics(metrics, name) for name in service_of(request).engines]})


def _metrics(request: Request) -> Metrics:
    metrics = service_of(request).metrics
    assert metrics, "without metrics there are no such routes"
    return metrics


def _statistics(metrics: Metrics, name: str) -> dict[str, Any]:
    """Return what Triton tells of a model; times are in nanoseconds."""

    def count(metric: str) -> int:
        return int(metrics.total(f"tfexport_{metric}", name))

    def duration(number: int, seconds: float) -> dict[str, int]:
        return {"count": number, "ns": int(seconds * 1e9)}

    def timed(*names: str) -> dict[str, int]:
        seconds = sum(metrics.total(f"tfexport_{one}_seconds_sum", name) for one in names)
        return duration(sum(count(f"{one}_seconds_count") for one in names), seconds)

    success, steps = timed("request", "align"), count("decode_step_seconds_count")
    failures = duration(count("requests_total") - success["count"], metrics.observer(name).failed_s)
    return {
        "name": name,
        "version": VERSION,
        "inference_count": success["count"],
        "execution_count": steps,
        "inference_stats": {
            "success": success,
            "fail": failures,
            "queue": timed("queue"),
            "compute_infer": timed("encode", "decode_step"),
        },
        "batch_stats": [],
    }


METRICS = [Route("/metrics", expose)]
STATISTICS = [
    Route("/v2/models/stats", all_statistics),
    *(Route(f"/v2/models/{{name}}{version}/stats", statistics) for version in ("", "/versions/{version}")),
]
