"""docs/guides/serving.md shows what a server answers, and names a test for each of its promises."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT
from tests.serve.running import Running, running
from tests.test_docs import same, table

GUIDE = ROOT / "docs" / "guides" / "serving.md"
SESSIONS = re.findall(r"^\$ curl (.*)\n((?:(?!\$ |```).*\n)*)", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
PROMISES = table(GUIDE, "what happens")


@pytest.fixture(scope="module")
def server(dates_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    with running(tmp_path_factory.mktemp("guide"), dates_bundle, "--threads", 1) as found:
        yield found


@pytest.mark.parametrize(("command", "shown"), [found for found in SESSIONS if "/v2/" in found[0]])
def test_curl_is_answered_as_shown(server: Running, command: str, shown: str) -> None:
    _, url, option, body = shlex.split(command)
    assert option == "--json"
    path = httpx.URL(f"http://{url}").path
    headers = {"Content-Type": "application/json"}
    said = server.client.post(path, headers=headers, content=body.encode()).text.splitlines()
    lines = [line for line in shown.splitlines() if line and line != "…"]
    assert lines
    for line in lines:
        assert any(same(one, line) for one in said), said


def test_sessions_were_found() -> None:
    assert len(SESSIONS) == 5
    assert all(shown for _, shown in SESSIONS)


@pytest.mark.parametrize("row", PROMISES, ids=[row[0] for row in PROMISES])
def test_every_promise_has_its_test(row: list[str]) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "serve").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", row[3])
    assert named
    for name in named:
        assert f"def {name}(" in sources
