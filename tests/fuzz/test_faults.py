"""Every call of the file system fails once, is the last before kill -9, or is where SIGTERM or Ctrl-C comes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bundle.made import make
from tests.conftest import ROOT
from tests.tensorrt.artifact import stored


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A bundle with an engine and kernels, a model directory, a checkpoint, and files of somebody else."""
    from safetensors.torch import save_file

    from tests import tiny
    from tests.importing.layout.test_layout import IDENTITY, state
    from tfexport.importing.layout.layout import render_layout
    from tfexport.nn.directory import save_model

    home = tmp_path.resolve() / "home"
    bundle = make(home / "out" / "bundle")
    kept = stored.store(bundle, stored.manifest(bundle)) / "kernels" / "here"
    kept.mkdir(parents=True)
    (kept / "kernels.json").write_text("{}")
    save_model(tiny.model(tiny.VARIANTS["post"]).float(), home / "out" / "model")
    save_file(state(), home / "weights")
    (home / "identity.yaml").write_text(render_layout(IDENTITY))
    for name in ("notes.txt", ".bundle.tmp-mine", "bundle.tmp", ".model.old-0123"):
        (home / "out" / name).write_text("mine")
    return home


def faults(home: Path, command: str, *actions: str) -> int:
    """Try all places in a process of its own; return the number of calls."""
    words = [sys.executable, "-m", "tests.fuzz.faults", command, str(home), *actions]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["wrong"], "\n".join(found["wrong"])
    return int(found["calls"])


def test_a_bundle_is_the_old_or_the_new_one(home: Path) -> None:
    assert faults(home, "bundle", "EIO", "SIGKILL", "SIGINT") > 50


@pytest.mark.slow
@pytest.mark.parametrize("action", ["EIO", "ENOSPC", "EACCES", "SIGKILL", "SIGTERM", "SIGINT"])
def test_a_model_directory_is_the_old_or_the_new_one(action: str, home: Path) -> None:
    assert faults(home, "import", action) > 30
