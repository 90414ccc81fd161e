"""Imports, files, a server, bulk and output on this system; on Linux, on a double of Windows.

The double is `windows_site/sitecustomize.py`.
"""

from __future__ import annotations

import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tfexport
from tests import tiny
from tests.command import TFEXPORT
from tests.conftest import ROOT
from tests.serve.running import running
from tfexport.bundle.bundle import open_bundle
from tfexport.nn.directory import save_model

PLATFORM = "win32" if sys.platform == "linux" else sys.platform
STOP = {"linux": "SIGUSR2", "darwin": "SIGTERM", "win32": "CTRL_BREAK_EVENT"}[sys.platform]  # of the double: Ctrl-Break
TEXT, ISO = "Dienstag, 3. März 2026", "2026-03-03"
IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Triton brings its module itself; Ray is not in the tests' environment.
        if error.name not in ("triton_python_backend_utils", "ray"):
            raise
print(sys.modules["tfexport.sandbox"].sys.platform)
"""
BUNDLES = """
import sys, tfexport
from pathlib import Path
from tfexport.errors import BundleError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
source, target = sys.argv[1], Path(sys.argv[2])
config = ExportConfig(variants=("concat",))
with tfexport.load(target, threads=1) as model:
    answers = model.generate_ids([[4, 5, 6]], max_new_tokens=4)
    try:
        export_bundle(source, target, config, verify=False, force=True)
    except BundleError as error:
        print(type(error).__name__)
    assert model.generate_ids([[4, 5, 6]], max_new_tokens=4) == answers
del model
export_bundle(source, target, config, verify=False, force=True)
"""
CHECKPOINTS = """
import sys, tempfile
from pathlib import Path
from tfexport.importing._files import read_checkpoint
for path in sys.argv[2:]:
    found = read_checkpoint(Path(path)).tensors
    print({name: tensor.sum().item() for name, tensor in found.items()}, list(Path(sys.argv[1]).iterdir()))
"""
BULK = """
import sys, tfexport
from tfexport.bulk.config import BulkConfig
from tfexport.bulk.run import generate_file
with tfexport.load(sys.argv[1], threads=1) as model:
    for target in sys.argv[3:]:
        print(generate_file(model, sys.argv[2], target, BulkConfig(rows_per_part=4)).num_rows)
"""


@pytest.fixture(autouse=True)
def _windows(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        return
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "windows_site"), str(ROOT)]))
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    monkeypatch.setenv("PYTHONWARNDEFAULTENCODING", "1")


def output_of(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(code: str, *arguments: object) -> list[str]:
    return output_of(sys.executable, "-P", "-c", code, *arguments).splitlines()


def test_every_module_is_imported() -> None:
    names = {module.name for module in pkgutil.walk_packages(tfexport.__path__, "tfexport.")}
    names.remove("tfexport.serve._processes")  # for Linux only
    assert python(IMPORTS, *names) == [PLATFORM]


def test_bundles_are_replaced_unless_they_are_in_use(random_bundle: Path, tmp_path: Path) -> None:
    one = {"layers": 1}
    save_model(tiny.model(tiny.config(encoder=one, decoder=one), dtype=torch.float32), tmp_path / "model")
    shutil.copytree(random_bundle, tmp_path / "tiny")
    errors = python(BUNDLES, tmp_path / "model", tmp_path / "tiny")
    assert errors == ["BundleError"] * (PLATFORM == "win32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tiny"]
    assert sorted(open_bundle(tmp_path / "tiny").manifest.graphs) == ["decoder", "encoder", "reorder"]


def test_copies_of_checkpoints_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path / "tmp"))
    state = {"a.weight": torch.ones(2, 3)}
    torch.save(state, tmp_path / "model.pt")
    save_file(state, tmp_path / "model.safetensors")
    found = python(CHECKPOINTS, tmp_path / "tmp", tmp_path / "model.pt", tmp_path / "model.safetensors")
    assert found == ["{'a.weight': 6.0} []"] * 2


def test_a_server_answers_and_drains(dates_bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path, dates_bundle, "--threads", 1) as server:
        assert server.ask(TEXT).json()["text_output"] == ISO
        server.send(getattr(signal, STOP))
        assert server.ended() == 0
        assert server.log.read_text(encoding="utf-8").splitlines()[-1].endswith("drained: all requests are answered")


def test_bulk_leaves_only_its_outputs(dates_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(f"{TEXT}\n" * 9, encoding="utf-8")
    outputs = [tmp_path / f"out{suffix}" for suffix in (".csv", ".jsonl", ".parquet", ".txt")]
    assert python(BULK, dates_bundle, tmp_path / "in.txt", *outputs, outputs[0]) == ["9"] * 5
    assert sorted(tmp_path.iterdir()) == [tmp_path / "in.txt", *outputs]
    assert outputs[-1].read_text(encoding="utf-8") == f"{ISO}\n" * 9


def test_texts_are_printed_in_utf_8(dates_bundle: Path) -> None:
    source = "2088년 9월 17일"
    assert source in output_of(TFEXPORT, "generate", dates_bundle, source, "--json")
