"""The page of docs/languages in headless Chromium: its outputs equal those of the command line."""

from __future__ import annotations

import contextlib
import functools
import http.server
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.languages.conftest import expected

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, with headers of its server."""

    def end_headers(self) -> None:
        for name, value in self.server.headers.items():  # type: ignore[attr-defined]
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Return a function that serves a folder on loopback until the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(folder: Path, headers: dict[str, str] | None = None) -> str:
            handler = functools.partial(Files, directory=str(folder))
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            server.headers = headers or {}  # type: ignore[attr-defined]
            threading.Thread(target=server.serve_forever).start()
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/"

        yield start


@pytest.fixture
def folder(javascript: Path, dates_bundle: Path, tmp_path: Path) -> Path:
    """Build the page."""
    output = tmp_path / "page"
    words = ["node", str(javascript / "build.mjs"), str(dates_bundle), str(output)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return output


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Open a page; at the end, check that it has no errors and sent requests only to its origin."""
    errors, urls = list[str](), list[str]()
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.on("request", lambda request: urls.append(request.url))
    yield page
    origin = "/".join(page.url.split("/")[:3]) + "/"
    context.close()
    assert errors == []
    assert urls
    assert all(url.startswith(origin) for url in urls)


def read(page: Page, text: str) -> str:
    page.fill("#text", "")
    page.wait_for_function("document.querySelector('#answer').value === ''")
    page.fill("#text", text)
    page.wait_for_function("document.querySelector('#answer').value !== ''")
    return page.locator("#answer").inner_text()


def test_outputs_equal_those_of_the_command_line(
    page: Page, serve: Callable[..., str], folder: Path, dates: list[str], dates_bundle: Path, tmp_path: Path
) -> None:
    texts = dates[::6]
    assert len(texts) == 40
    page.goto(serve(folder))
    page.locator("#text:enabled").wait_for()
    assert page.inner_text("#state").startswith("Ready: 4.1 MB of weights, 1 thread")
    assert [read(page, text) for text in texts] == [
        answer["text"] for answer in expected(dates_bundle, texts, tmp_path)
    ]


def test_an_isolated_page_uses_threads(page: Page, serve: Callable[..., str], folder: Path) -> None:
    page.add_init_script("Object.defineProperty(navigator, 'hardwareConcurrency', {get: () => 4})")
    page.goto(serve(folder, ISOLATED))
    page.locator("#text:enabled").wait_for()
    assert page.inner_text("#state").endswith(" 2 threads")
    page.get_by_role("button", name="Dienstag").click()
    page.wait_for_function("document.querySelector('#answer').value === '2026-03-03'")
    assert page.evaluate("crossOriginIsolated")
    assert "2026" in page.inner_text("#said")


def test_a_damaged_bundle_is_not_loaded(page: Page, serve: Callable[..., str], folder: Path) -> None:
    weights = folder / "bundle" / "weights.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    page.goto(serve(folder))
    page.wait_for_selector("#state[data-failed]")
    assert page.inner_text("#state").startswith("weights.safetensors is not the file that the manifest names")
    assert page.is_disabled("#text")
