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
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as `scripts/docs` does, into a folder of its own: a dead link, or a page outside the menu, fails."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [ROOT / "scripts" / "docs", "build", folder]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def test_a_dead_anchor_fails(site: Path, tmp_path: Path) -> None:
    """With the settings of the site, on two pages."""
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "README.md").write_text("# One\n\n[dead](two.md#nowhere)\n", encoding="utf-8")
    (pages / "two.md").write_text("# Two\n", encoding="utf-8")
    settings = f"INHERIT: {ROOT}/docs/mkdocs.yml\nhooks: []\nextra_css: []\nnav: [README.md, two.md]\n"
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    places = {"SITE_ROOT": str(ROOT), "SITE_PAGES": str(pages), "SITE_HTML": str(tmp_path / "html")}
    command = ["mkdocs", "build", "--strict", "--config-file", tmp_path / "mkdocs.yml"]
    done = subprocess.run(command, capture_output=True, text=True, env={**ENVIRONMENT, **places}, timeout=300)
    assert done.returncode != 0
    assert "'#nowhere'" in done.stderr
    assert " 1 warnings" in done.stdout + done.stderr


def test_every_page_is_built(site: Path) -> None:
    for page in [*DOCS, *OTHERS]:
        place = page.relative_to(ROOT).with_suffix("")
        html = site / (place.parent if page.name == "README.md" else place) / "index.html"
        assert html.is_file(), html


def test_pages_load_nothing_external_and_show_code_as_code(site: Path) -> None:
    """No font, script, style or picture of another machine; no fence or mark that the site does not understand."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not [tag for tag in ELSEWHERE.findall(text) if 'rel="canonical"' not in tag], page
        assert "```" not in text, page
        assert not re.search(r"(?<!<code>)&lt;!-- (?:needs|runs):", text), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style
