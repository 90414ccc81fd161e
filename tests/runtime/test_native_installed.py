"""The wheel of `tfexport-native`, and the libraries that CPUs without newer instructions take from it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import DATES, ROOT
from tests.runtime import compiled
from tests.runtime.exported import Once
from tfexport.runtime.native._library import MODULE

QEMU = shutil.which("qemu-x86_64")
NUM_TEXTS = 8
DECODE = """
import json, sys
import tfexport
from tfexport.runtime.native._library import find_library

texts, *bundles = sys.argv[1:]
models = [tfexport.load(bundle, backend="native") for bundle in bundles]
ids = [[result.token_ids for result in model.generate(json.loads(texts), num_beams=2)] for model in models]
print(json.dumps({"kernels": find_library().path.stem, "ids": ids}))
"""

pytestmark = pytest.mark.slow


def test_a_wheel_is_for_one_platform_and_every_python(tmp_path: Path) -> None:
    flags = compiled.compiler().FLAGS
    shutil.copytree(compiled.DISTRIBUTION, tmp_path / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path]
    done = subprocess.run([*command, tmp_path / "source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith(MODULE)}
    libraries = {f"{MODULE}/{compiled.compiler().library_name(kernels)}" for kernels in flags}
    assert libraries < names
    assert {name for name in names if "dist-info" not in name} == libraries | {f"{MODULE}/__init__.py"}


@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed (Debian package qemu-user)")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulated programs are for x86-64")
@pytest.mark.parametrize(("cpu", "kernels"), [("Haswell", "avx2"), ("IvyBridge", "baseline")])
def test_a_cpu_takes_the_fastest_kernels_that_it_has(
    cpu: str, kernels: str, once: Once, dates_bundle: Path, tmp_path: Path
) -> None:
    package = tmp_path / MODULE
    package.mkdir()
    (package / "__init__.py").touch()
    for each in compiled.compiler().FLAGS:
        shutil.copy(compiled.path_of(each, once), package)
    lines = (DATES / "heldout.tsv").read_text(encoding="utf-8").splitlines()[:NUM_TEXTS]
    texts = json.dumps([line.split("\t")[0] for line in lines])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def decoded(*python: str) -> dict[str, object]:
        command = [*python, "-c", DECODE, texts, str(dates_bundle)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return found

    here, emulated = decoded(sys.executable), decoded(str(QEMU), "-cpu", cpu, sys.executable)
    assert emulated["kernels"] == kernels
    assert emulated["ids"] == here["ids"]
