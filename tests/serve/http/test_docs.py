"""The tables of docs/guides/serving.md say what the code says."""

from __future__ import annotations

import re
from typing import get_args

from tests.conftest import ROOT
from tests.serve.test_metrics import NAMES
from tests.test_docs import table
from tfexport.generation import DecodeConfig
from tfexport.serve.app import build_app
from tfexport.serve.config import HttpConfig
from tfexport.serve.metrics import Metrics
from tfexport.serve.observer import Outcome

SERVING = ROOT / "docs" / "guides" / "serving.md"


def test_the_endpoints_are_those_of_the_app() -> None:
    paths = build_app({}, HttpConfig(completions=True, translate=True), Metrics()).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, item in paths.items() for method in item} | {"GET /openapi.json"}
    assert {name for row in table(SERVING, "endpoint") for name in re.findall(r"`([^`]+)`", row[0])} == routes


def test_the_metrics_are_those_of_the_code() -> None:
    counters = {name for name, kind in NAMES.items() if kind == "counter"}
    shown = {row[0].strip("`") for row in table(SERVING, "metric")}
    assert shown == {f"{name}_total" if name in counters else name for name in NAMES}


def test_the_openapi_document_describes_every_option_with_its_bounds() -> None:
    schemas = build_app({}).openapi()["components"]["schemas"]
    options = schemas["Parameters"]["properties"]
    assert options.keys() == {*DecodeConfig().to_dict(), "prefix", "priority", "timeout_ms", "timeout"}
    assert options["num_beams"].items() >= {"type": "integer", "minimum": 1, "maximum": 64}.items()
    assert options["num_beams"]["description"] == "Beams of beam search; 1 is greedy."
    assert options["suppress_tokens"]["items"] == {"type": "integer", "minimum": 0}
    assert {"GenerateRequest", "InferRequest", "AlignRequest", "Generated", "Inferred"} <= schemas.keys()


def test_the_outcomes_are_those_of_the_code() -> None:
    assert {row[0].strip("`") for row in table(SERVING, "outcome")} == set(get_args(Outcome))
