"""models/digits: from the samples that ship with it to their digits, in Python, on the command line and over HTTP."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfexport
from tests.command import ran
from tests.conftest import DIGITS, ROOT, Once, exported
from tests.serve.running import running
from tfexport.bundle.bundle import open_bundle

SAMPLES = sorted((DIGITS / "samples").glob("*.wav"))
EXPECTED = [path.stem for path in SAMPLES]
GUIDE = ROOT / "docs" / "guides" / "audio-and-images.md"


def test_the_directory_exports_and_the_command_reads_files(digits_bundle: Path) -> None:
    parity = open_bundle(digits_bundle).manifest.parity
    assert parity is not None
    assert parity["passed"]
    assert len(SAMPLES) > 3
    assert ran("generate", digits_bundle, *SAMPLES).stdout.splitlines() == EXPECTED


@pytest.mark.parametrize(("precision", "backend"), [("fp32", "eager"), ("fp32", "ort"), ("int8", "ort")])
def test_every_backend_and_precision_reads_the_samples(
    once: Once, digits_bundle: Path, precision: str, backend: str
) -> None:
    int8 = exported(once, "digits-int8", str(DIGITS), precision="int8", variants=("contrib",))
    bundle = digits_bundle if precision == "fp32" else int8
    with tfexport.load(bundle, backend=backend, threads=1) as model:
        assert [result.text for result in model.generate(SAMPLES)] == EXPECTED
        assert [model.generate([path.read_bytes()])[0].text for path in SAMPLES] == EXPECTED


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_is_answered_as_the_guide_shows(digits_bundle: Path, tmp_path: Path) -> None:
    lines = GUIDE.read_text(encoding="utf-8").splitlines()
    ((command, shown),) = ((line[2:], lines[i + 1]) for i, line in enumerate(lines) if line.startswith("$ curl "))
    with running(tmp_path, f"digits={digits_bundle}", "--threads", 1) as server:
        words = shlex.split(command.replace("localhost:8000", server.url))
        assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == shown
        for path in SAMPLES:
            answer = server.client.post("/v1/audio/transcriptions", files={"file": (path.name, path.read_bytes())})
            assert answer.json() == {"text": path.stem}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("espeak-ng"), reason="espeak-ng is not installed")
def test_the_training_writes_a_model_directory(tmp_path: Path) -> None:
    command = f"{sys.executable} scripts/train_digits.py --steps 3 --recordings 40 --held-out 10"
    folders = ("--output", tmp_path / "model", "--cache", tmp_path / "cache")
    subprocess.run([*command.split(), *folders], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    written = {path.name for path in (tmp_path / "model").iterdir()}
    assert written == {path.name for path in DIGITS.iterdir()} - {"README.md"}
