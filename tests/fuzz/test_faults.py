"""A writer that fails, is killed or is interrupted at any file system call leaves the old target or the new one."""

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
    """A bundle with an engine and kernels, a model directory, a checkpoint, and other files."""
    from safetensors.torch import save_file

    from tests import tiny
    from tests.importing.layout.test_apply import IDENTITY, state
    from tfexport.importing.layout.layout import render_layout
    from tfexport.nn.directory import save_model

    home = tmp_path.resolve() / "home"
    bundle = make(home / "out" / "bundle")
    kernels = stored.store(bundle, stored.manifest(bundle)) / "kernels" / "here"
    kernels.mkdir(parents=True)
    (kernels / "kernels.json").write_text("{}")
    save_model(tiny.model(tiny.VARIANTS["post"]).float(), home / "out" / "model")
    save_file(state(), home / "weights")
    (home / "identity.yaml").write_text(render_layout(IDENTITY))
    for name in ("notes.txt", ".bundle.tmp-mine", "bundle.tmp", ".model.old-0123"):
        (home / "out" / name).write_text("mine")
    return home


def faults(home: Path, command: str, step: int, *actions: str) -> int:
    """Try the calls in a process of its own; return their number."""
    words = [sys.executable, "-m", "tests.fuzz.faults", command, str(home), str(step), *actions]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["wrong"], "\n".join(found["wrong"])
    return int(found["calls"])


@pytest.mark.parametrize("command", ["bundle", "engine"])
def test_a_bundle_or_engine_is_the_old_or_the_new_one(command: str, home: Path) -> None:
    assert faults(home, command, 4, "EIO", "SIGKILL", "SIGINT") > 50


@pytest.mark.slow
@pytest.mark.parametrize("action", ["EIO", "ENOSPC", "EACCES", "SIGKILL", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("command", ["bundle", "engine", "import"])
def test_the_target_is_the_old_or_the_new_one(command: str, action: str, home: Path) -> None:
    assert faults(home, command, 1, action) > 30
