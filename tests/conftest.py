"""Fixtures for the whole session."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tfexport.model.model import Model

ROOT = Path(__file__).resolve().parent.parent
DATES, DIGITS = ROOT / "models" / "dates", ROOT / "models" / "digits"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
Once = Callable[[str, Callable[[Path], object]], Path]
OPTIONAL = ("hypothesis", "transformers", "fastapi", "uvicorn", "prometheus_client", "httpx")

# The collector has nothing to free while tests are collected, and reads what they imported only once.
gc.disable()
# A shell that runs the tests in the background makes them, and their child processes, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


class SkipWithout(MetaPathFinder):
    """Skip test files that need packages that are not installed, as on a GPU machine."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in OPTIONAL:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


sys.meta_path.append(SkipWithout())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests of the HTTP app use a running server; see `tests/serve/http/remote.py`."""
    parser.addoption("--server", metavar="URL", help="server that tests/serve/http uses instead of its own")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use more workers than cores, because many tests wait for processes and deadlines."""
    return min(4, (os.cpu_count() or 1) * 3 // 2)


def pytest_collection_finish() -> None:
    """Leave imported modules and collected tests out of garbage collection, which otherwise takes 8% of the time."""
    gc.freeze()
    gc.set_threshold(20_000)  # models and traces are many objects and little garbage
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give slow tests no time limit."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_worker() -> None:
    """Use one thread, because the models are tiny and the workers fill the cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return once(name, make), which calls make(path) once for all workers and returns the path."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        with FileLock(root / f"{name}.lock"):
            if not (root / name).exists():
                make(root / name)
        return root / name

    return make_once


def exported(once: Once, name: str, source: str, **options: Any) -> Path:
    """Export a source once for all workers, without verification."""
    from tfexport.export import export_bundle
    from tfexport.export.config import ExportConfig

    return once(name, lambda path: export_bundle(source, path, ExportConfig(**options), verify=False))


@pytest.fixture(scope="session")
def dates_bundle(once: Once) -> Path:
    """Export models/dates in fp32; read-only, as all bundles below."""
    return exported(once, "dates", str(DATES))


@pytest.fixture(scope="session")
def digits_bundle(once: Once) -> Path:
    """Export models/digits in fp32 through the command line, verified, only for the CPU."""
    from tests.command import ran

    return once("digits", lambda path: ran("onnx", DIGITS, "--output", path, "--variants", "contrib"))


@pytest.fixture(scope="session")
def dates_fp16(once: Once) -> Path:
    """Export models/dates in fp16."""
    return exported(once, "dates-fp16", str(DATES), precision="fp16")


@pytest.fixture(scope="session")
def dates_int8(once: Once) -> Path:
    """Export models/dates in int8."""
    return exported(once, "dates-int8", str(DATES), precision="int8", variants=("contrib",))


@pytest.fixture(scope="session")
def dates_aligned(once: Once) -> Path:
    """Export models/dates with alignment, only for the CPU."""
    from tfexport.contract import AlignmentHeads

    return exported(once, "dates-aligned", str(DATES), variants=("contrib",), alignment=AlignmentHeads(layer=-1))


@pytest.fixture(scope="session")
def random_bundle(once: Once) -> Path:
    """Export preset:tiny, whose random weights end texts late, only for the CPU."""
    return exported(once, "random", "preset:tiny", variants=("contrib",))


@pytest.fixture(scope="session")
def speech_bundle(once: Once) -> Path:
    """Export a model that reads audio, with its processor and a tokenizer, only for the CPU."""
    from tests.test_inputs import AUDIO, SPEECH, write_bundle

    return once("speech", lambda path: write_bundle(path, SPEECH, AUDIO))


@pytest.fixture(scope="module")
def speech(speech_bundle: Path) -> Iterator[Model]:
    """Load the model that reads audio."""
    from tfexport.model.load import load

    with load(speech_bundle, threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def variant(once: Once) -> Callable[[str], Path]:
    """Return a function that exports a variant of `tests/tiny.py`."""
    from tests.runtime.exported import variant_bundle

    return lambda name: variant_bundle(name, once)


@pytest.fixture(scope="session")
def meetings(once: Once) -> Path:
    """Export the model of `tests/meetings.py` with its guided head as alignment."""
    from tests.meetings import HEAD, made, trained

    return once("meetings", lambda path: made(path, trained(), HEAD))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a browser, whose microphone beeps."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        options = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        launched = driver.chromium.launch(executable_path=found, args=options)
        yield launched
        launched.close()


@pytest.fixture
def workplace(
    dates_bundle: Path, dates_aligned: Path, digits_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Change to a directory with the results of the first commands of the README."""
    (tmp_path / "build").mkdir()
    bundles = {"dates": dates_bundle, "larger": dates_bundle, "aligned": dates_aligned, "digits": digits_bundle}
    for name, bundle in bundles.items():
        (tmp_path / "build" / name).symlink_to(bundle)
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "texts.txt").write_text("Dienstag, 3. März 2026\nle 14 juillet 1989\n", encoding="utf-8")
    (tmp_path / "pairs.tsv").write_text("le 14 juillet 1989\t1989-07-14\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path
