"""Test a server elsewhere: `pytest tests/serve/http --server URL`.

It has to serve the bundle of `models/dates` as `dates`, with `OFFERS` and other settings at their defaults. Tests that
need other settings, or that look into the process of the server, are skipped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from tests.serve.http.served import OFFERS, Asking
from tfexport.serve.config import HttpConfig

PATIENCE_S = 60.0


class Scraped:
    """The metrics of a server since this was made."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._totals()

    def total(self, metric: str, model: str) -> float:
        return self._totals()[metric, model] - self._before[metric, model]

    def _totals(self) -> defaultdict[tuple[str, str], float]:
        text = httpx.get(f"{self._url}/metrics", timeout=PATIENCE_S).raise_for_status().text
        totals: defaultdict[tuple[str, str], float] = defaultdict(float)
        for name, model, value in re.findall(r'^(\w+)\{.*\bmodel="([^"]+)".*\} (\S+)$', text, re.MULTILINE):
            totals[name, model] += float(value)
        return totals


class Remote(Asking):
    """A server elsewhere, in place of `Served`."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.client, self.metrics = client, Scraped(url)

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip(f"looks at the {name} of a server, which is elsewhere")


@asynccontextmanager
async def elsewhere(url: str, http: HttpConfig | None, bundle: Path, **config: Any) -> AsyncIterator[Remote]:
    """Ask the server elsewhere, where its settings will do; skip the test else."""
    if config or bundle.name != "dates" or http not in (None, OFFERS):
        pytest.skip("wants a server with other settings")
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        yield Remote(url, client)
