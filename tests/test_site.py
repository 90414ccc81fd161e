"""The docs as a site: it builds without a warning, and a browser that opens it asks no other machine."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_docs import DOCS, OTHERS

ELSEWHERE = re.compile(r"""<(?:link|script|img|iframe)\b[^>]*\b(?:href|src)=["']?(?:https?:)?//[^>]*>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as `scripts/docs` does, into a folder of its own: a dead link, or a page outside the menu, fails."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [ROOT / "scripts" / "docs", "build", folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def test_every_page_is_built(site: Path) -> None:
    for page in [*DOCS, *OTHERS]:
        place = page.relative_to(ROOT).with_suffix("")
        html = site / (place.parent if page.name == "README.md" else place) / "index.html"
        assert html.is_file(), html


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """No font, script, style or picture of another machine: it works offline, and tells nobody who reads."""
    for page in site.rglob("*.html"):
        found = [tag for tag in ELSEWHERE.findall(page.read_text(encoding="utf-8")) if 'rel="canonical"' not in tag]
        assert not found, page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_code_is_shown_as_code(site: Path) -> None:
    """A fence that the site does not understand would be shown with its backticks, a mark above it as text."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "```" not in text, page
        assert not re.search(r"&lt;!-- (?:needs|runs):", text), page
