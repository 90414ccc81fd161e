"""Fixtures for the whole session."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATES = ROOT / "models" / "dates"
Once = Callable[[str, Callable[[Path], object]], Path]
OPTIONAL = ("hypothesis", "transformers", "fastapi", "uvicorn", "prometheus_client", "httpx")

# A shell that runs the tests in the background has them ignore Ctrl-C, and their child processes with them.
signal.signal(signal.SIGINT, signal.default_int_handler)


class SkipWithout(MetaPathFinder):
    """Skips files of tests whose packages are not installed: a machine with a GPU may have pytest and little else."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise pytest's skip; asked last, when nobody has found the package."""
        if name.partition(".")[0] in OPTIONAL:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


sys.meta_path.append(SkipWithout())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests of the HTTP app ask a server that runs already; see `tests/serve/http/remote.py`."""
    parser.addoption("--server", metavar="URL", help="server that tests/serve/http asks in place of its own")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let what is marked slow take its time."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_worker() -> None:
    """Keep torch to one thread: the models are tiny and the workers already fill the cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return a function that makes a path once for all workers: once(name, make) calls make(path) if it is missing."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
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
    """Export models/dates in fp32; not to be changed."""
    return exported(once, "dates", str(DATES))


@pytest.fixture(scope="session")
def dates_fp16(once: Once) -> Path:
    """Export models/dates in fp16; not to be changed."""
    return exported(once, "dates-fp16", str(DATES), precision="fp16")


@pytest.fixture(scope="session")
def dates_aligned(once: Once) -> Path:
    """Export models/dates with the last layer's attention as alignment, only for the CPU; not to be changed."""
    from tfexport.contract import AlignmentHeads

    return exported(once, "dates-aligned", str(DATES), forms=("contrib",), alignment=AlignmentHeads(layer=-1))


@pytest.fixture(scope="session")
def random_bundle(once: Once) -> Path:
    """Export the preset tiny, of random weights, which ends texts late, only for the CPU; not to be changed."""
    return exported(once, "random", "preset:tiny", forms=("contrib",))


@pytest.fixture(scope="session")
def variant(once: Once) -> Callable[[str], Path]:
    """Return a function that exports a variant of `tests/tiny.py`, see `variant_bundle`; not to be changed."""
    from tests.runtime.exported import variant_bundle

    return lambda name: variant_bundle(name, once)


@pytest.fixture(scope="session")
def meetings(once: Once) -> Path:
    """Export the model of `tests/meetings.py` with its guided head as alignment; not to be changed."""
    from tests.meetings import HEAD, made, trained

    return once("meetings", lambda path: made(path, trained(), HEAD))


@pytest.fixture
def workplace(dates_bundle: Path, dates_aligned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand where a reader does who has run the first commands of the README, with some texts of their own."""
    (tmp_path / "build").mkdir()
    bundles = {"dates": dates_bundle, "larger": dates_bundle, "aligned": dates_aligned}
    for name, bundle in bundles.items():
        (tmp_path / "build" / name).symlink_to(bundle)
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "texts.txt").write_text("Dienstag, 3. März 2026\nle 14 juillet 1989\n", encoding="utf-8")
    (tmp_path / "pairs.tsv").write_text("le 14 juillet 1989\t1989-07-14\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path
