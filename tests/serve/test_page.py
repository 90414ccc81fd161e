"""Test the web page in a browser; skipped without one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import DIGITS, Once
from tests.serve.running import Running, eventually, running, slow_steps
from tests.test_inputs import CAPTIONS, IMAGE, write_bundle
from tfexport.model.load import load

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TEXT, ISO = "Dienstag, 3. März 2026", "2026-03-03"
# Of Chromium, for each status that is no success; the page says it better.
REFUSAL = "Failed to load resource: the server responded with a status of 4"


@pytest.fixture(scope="module")
def server(
    browser: Browser, dates_aligned: Path, dates_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    work = tmp_path_factory.mktemp("page")
    bundles = (f"aligned={dates_aligned}", f"plain={dates_bundle}")
    with running(work, *bundles, "--threads", 1, before=slow_steps(0.1)) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Page]:
    with opened(browser, server) as page:
        yield page


@pytest.fixture(scope="module")
def file_server(
    browser: Browser, digits_bundle: Path, once: Once, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    captions = once("captions", lambda path: write_bundle(path, CAPTIONS, IMAGE))
    with running(tmp_path_factory.mktemp("files"), f"digits={digits_bundle}", captions, "--threads", 1) as server:
        yield server


@contextmanager
def opened(browser: Browser, server: Running) -> Iterator[Page]:
    """Open the page; at the end no script has failed, and the policy was not broken."""
    complaints: list[str] = []
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(server.url)
    page.locator("#generate:enabled").wait_for()
    yield page
    context.close()
    assert [one for one in complaints if not one.startswith(REFUSAL)] == []


def expect_text(page: Page, text: str | re.Pattern[str], place: str = "#answer") -> None:
    from playwright.sync_api import expect

    expect(page.locator(place)).to_have_text(text, timeout=20_000)


def test_an_answer_comes_token_by_token(page: Page) -> None:
    page.fill("#text", TEXT)
    page.keyboard.press("Control+Enter")
    seen = set()
    while (text := page.inner_text("#answer")) != ISO:
        assert ISO.startswith(text)
        seen.add(text)
    expect_text(page, "Complete", "#status")
    assert len(seen - {""}) >= 4
    names, values = (page.locator(f"#numbers {part}").all_inner_texts() for part in ("dt", "dd"))
    numbers = dict(zip(names, values, strict=True))
    assert numbers["Tokens"] == "11"
    assert 0 < float(numbers["Tokens per second"]) <= 12
    assert page.locator("#answer").get_attribute("aria-busy") == "false"


def test_a_cancelled_request_ends_and_the_next_is_answered(page: Page, server: Running) -> None:
    cancelled = 'tfexport_requests_total{finish_reason="",model="aligned",outcome="cancelled"}'
    before = server.metric(re.escape(cancelled))
    for number, cancel in enumerate((lambda: page.click("#cancel"), lambda: page.keyboard.press("Escape")), 1):
        page.fill("#text", TEXT)
        page.click("#generate")
        expect_text(page, re.compile(r"^2\d*"))
        cancel()
        expect_text(page, "Cancelled", "#status")
        left = page.inner_text("#answer")
        assert left != ISO
        assert ISO.startswith(left)
        eventually(lambda counted=before + number: server.metric(re.escape(cancelled)) == counted)
    page.click("#generate")
    expect_text(page, ISO)


def test_several_answers_are_those_of_the_model_with_their_scores(page: Page, dates_bundle: Path) -> None:
    with load(dates_bundle, threads=1) as model:
        expected = model.generate([TEXT], num_beams=4, num_return_sequences=4)
    page.fill("#text", TEXT)
    page.get_by_text("Beam search", exact=True).click()
    page.fill("[name=num_return_sequences]", "4")
    page.click("#generate")
    page.locator(".answers li:nth-child(4)").wait_for()
    assert page.locator(".answers .output").all_inner_texts() == [one.text for one in expected]
    scores = [float(text.replace("−", "-")) for text in page.locator(".answers .score").all_inner_texts()]
    assert scores == pytest.approx([one.score for one in expected], abs=6e-4)
    widths = [bar.evaluate("bar => bar.getBoundingClientRect().width") for bar in page.locator(".bar i").all()]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 1.5 * widths[-1]
    page.locator(".answers button").nth(2).click()
    expect_text(page, expected[2].text)


def test_a_sample_is_that_of_its_seed(page: Page, dates_bundle: Path) -> None:
    options = {"do_sample": True, "temperature": 3.5, "top_k": 0, "seed": 7}
    with load(dates_bundle, threads=1) as model:
        (expected,) = model.generate([TEXT], **options)
    page.fill("#text", TEXT)
    page.get_by_text("Sampling", exact=True).click()
    for name in ("temperature", "top_k", "seed"):
        page.fill(f"[name={name}]", str(options[name]))
    page.click("#generate")
    page.locator(".answers li").wait_for()
    expect_text(page, expected.text)


def test_refusals_are_shown_as_plain_text(page: Page) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    page.get_by_text("Sampling", exact=True).click()
    page.fill("[name=temperature]", hostile)
    page.click("#generate")
    expect_text(page, re.compile(re.escape(hostile)), "#error")
    assert page.locator("#error img").count() == 0
    page.fill("[name=temperature]", "")
    page.fill("[name=num_return_sequences]", "999")
    page.click("#generate")
    expect_text(page, re.compile("num_return_sequences is 999, expected"), "#error")
    page.fill("[name=num_return_sequences]", "")
    page.click("#generate")
    page.locator(".answers li").wait_for()
    assert page.locator("#error").is_hidden()


def test_hostile_text_is_shown_as_visible_text(page: Page) -> None:
    text = "<b>1</b>'; \u202e" + "9" * 30
    page.set_viewport_size({"width": 390, "height": 800})
    page.fill("#text", text)
    page.click("#tab-curl")
    command = page.inner_text(".command code")
    assert "\u202e" not in command
    assert r"\u202e" in command
    assert "'\\''" in command
    page.click("#generate")
    expect_text(page, re.compile("^(Complete|Cut off at the limit)$"), "#status")
    page.click("#tab-tokens")
    page.locator(".tokens").first.wait_for()
    shown = page.locator(".tokens").first.locator("b").all_inner_texts()
    assert "".join(shown)[:3] == "<b>" or "<unk>" in shown
    for tab in ("answers", "tokens", "alignment", "curl"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(300)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.locator("main b:not(.tokens b), main img:not(#preview)").count() == 0


def test_the_alignment_is_drawn_if_the_bundle_has_one(page: Page) -> None:
    page.click("#tab-alignment")
    page.fill("#text", TEXT)
    page.click("#generate")
    picture = page.locator(".alignment svg")
    picture.wait_for()
    assert "6 from 6" in (picture.get_attribute("aria-label") or "")
    assert picture.locator(".cell").count() > 20
    picture.hover()
    expect_text(page, re.compile(r"attends to .+ with \d+ %"), ".alignment figcaption")
    page.select_option("#model", "plain")
    page.fill("#text", TEXT)
    page.click("#generate")
    expect_text(page, re.compile("exported without alignment"), "#panel-alignment")


def test_the_shown_command_equals_the_request(page: Page) -> None:
    page.fill("#text", TEXT)
    page.get_by_text("Beam search", exact=True).click()
    page.click("#tab-curl")
    page.click(".command button")
    command = page.evaluate("() => navigator.clipboard.readText()")
    assert command.startswith("curl 'http://127.0.0.1:")
    body = json.loads(re.search(r"-d '(.*)'$", command)[1])  # type: ignore[index]
    assert body == {"text_input": TEXT, "parameters": {"num_beams": 4}}


def test_plots_and_state_follow_the_server(page: Page) -> None:
    page.click("#generate")
    expect_text(page, re.compile(r"\d"), ".plot:nth-child(2) dd")
    page.locator(".plot:nth-child(3) dd", has_text=re.compile("m?s$")).first.wait_for()
    assert page.locator(".plot:nth-child(4) .line").get_attribute("d", timeout=5000)
    assert page.locator("#state").get_attribute("data-state") == "ready"


def test_the_keyboard_reaches_the_tabs(page: Page) -> None:
    page.focus("#tab-answers")
    page.keyboard.press("ArrowRight")
    assert page.locator("#panel-tokens").is_visible()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#panel-curl").is_visible()
    assert page.evaluate("() => document.activeElement.id") == "tab-curl"


def test_the_page_sends_the_token_and_shows_when_the_server_stops(
    browser: Browser, dates_bundle: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    options = ("--threads", 1, "--token-file", tokens, "--drain-delay", 3)
    with running(tmp_path, f"dates={dates_bundle}", *options) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.locator("#token").wait_for()
        assert page.locator("#generate").is_disabled()
        page.fill("#token", "0123456789abcdef")
        page.keyboard.press("Enter")
        page.locator("#generate:enabled").wait_for()
        assert page.locator("#token").is_hidden()
        page.fill("#text", TEXT)
        page.click("#generate")
        expect_text(page, ISO)
        expect_text(page, "ready", "#state-text")
        server.send(signal.SIGTERM)
        expect_text(page, "about to stop", "#state-text")
        expect_text(page, "unreachable", "#state-text")
        page.close()


def test_files_are_chosen_dropped_and_recorded(browser: Browser, file_server: Running, tmp_path: Path) -> None:
    chosen, dropped, *_ = sorted((DIGITS / "samples").glob("*.wav"))
    quoted = Path(shutil.copy(chosen, tmp_path / "a 'b' \"c\".wav"))
    with opened(browser, file_server) as page:
        assert page.locator("#text").is_hidden()
        page.click("#generate")
        expect_text(page, "Choose a file first.", "#error")
        page.set_input_files("#file", quoted)
        page.click("#generate")
        expect_text(page, chosen.stem)
        page.click("#tab-tokens")
        page.locator(".tokens").first.wait_for()
        tokens = page.locator(".tokens b").all_inner_texts()
        assert "".join(filter(str.isdigit, tokens)) == chosen.stem
        page.click("#tab-curl")
        words = shlex.split(page.inner_text(".command code").replace("\\\n", ""))
        assert words[-1] == 'file=@"' + quoted.name.replace('"', '\\"') + '"'
        data = page.evaluate_handle(
            """(bytes) => {
                const data = new DataTransfer();
                data.items.add(new File([new Uint8Array(bytes)], "d.wav"));
                return data;
            }""",
            list(dropped.read_bytes()),
        )
        page.dispatch_event("#drop", "drop", {"dataTransfer": data})
        expect_text(page, "d.wav", "#file-name")
        page.click("#generate")
        expect_text(page, dropped.stem)
        page.click("#record")
        expect_text(page, "Stop", "#record")
        page.wait_for_timeout(600)
        page.click("#record")
        expect_text(page, "recording.wav", "#file-name")
        page.click("#generate")
        expect_text(page, re.compile("^(Complete|Cut off at the limit)$"), "#status")
        page.set_input_files("#file", {"name": "<b>x</b>.wav", "mimeType": "audio/wav", "buffer": b"RIFF"})
        expect_text(page, "<b>x</b>.wav", "#file-name")
        page.click("#generate")
        expect_text(page, re.compile("not audio in a supported format"), "#error")


def test_an_image_is_shown_and_described(browser: Browser, file_server: Running, once: Once, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (40, 30), "red").save(path := tmp_path / "red.png")
    with load(once("captions", lambda path: write_bundle(path, CAPTIONS, IMAGE)), threads=1) as model:
        (expected,) = model.generate([path], num_beams=4)
    with opened(browser, file_server) as page:
        page.select_option("#model", "captions")
        assert page.locator("#record").is_hidden()
        page.set_input_files("#file", path)
        page.locator("#preview").wait_for()
        page.get_by_text("Beam search", exact=True).click()
        page.click("#generate")
        expect_text(page, expected.text)
