"""The tables of docs/serving.md say what the code says."""

from __future__ import annotations

import re
from typing import get_args

from starlette.routing import Route

from tests.conftest import ROOT
from tests.serve.test_metrics import NAMES
from tests.test_docs import table
from tfexport.serve.http.app import build_app
from tfexport.serve.http.config import HttpConfig
from tfexport.serve.metrics import Metrics
from tfexport.serve.observer import Outcome

SERVING = ROOT / "docs" / "serving.md"


def test_the_endpoints_are_those_of_the_app() -> None:
    app = build_app({}, HttpConfig(completions=True, translate=True, ui=False), Metrics())
    routes = {
        f"{method} {route.path}"
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
        if "{version}" not in route.path
    }
    assert {name for row in table(SERVING, "endpoint") for name in re.findall(r"`([^`]+)`", row[0])} == routes


def test_the_metrics_are_those_of_the_code() -> None:
    counters = {name for name, kind in NAMES.items() if kind == "counter"}
    shown = {row[0].strip("`") for row in table(SERVING, "metric")}
    assert shown == {f"{name}_total" if name in counters else name for name in NAMES}


def test_the_outcomes_are_those_of_the_code() -> None:
    assert {row[0].strip("`") for row in table(SERVING, "outcome")} == set(get_args(Outcome))
