"""Compare int8 token ids with those of an emulated Haswell, an x86 CPU with AVX2 and without VNNI."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DATES, ROOT, Once, exported

QEMU = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed (Debian package qemu-user)"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulated programs are for x86-64"),
]
HASWELL = (str(QEMU), "-cpu", "Haswell", sys.executable)
NUM_TEXTS = 32

# Prints how products are computed, and the token ids of each bundle. It does not import torch, which takes the emulator
# 20 seconds.
DECODE = """
import json, sys
import tfexport
from tfexport.runtime.ort.int8_products import int8_session_options

texts, *bundles = sys.argv[1:]
models = [tfexport.load(bundle, threads=1) for bundle in bundles]
ids = [[result.token_ids for result in model.generate(json.loads(texts))] for model in models]
print(json.dumps({"options": dict(int8_session_options()), "ids": ids}))
"""


def test_int8_bundles_give_equal_token_ids_without_vnni(once: Once, dates_int8: Path) -> None:
    options = {"precision": "int8", "optimize_for": "throughput", "variants": ("contrib",)}
    throughput = exported(once, "dates-int8-throughput", str(DATES), **options)
    lines = (DATES / "heldout.tsv").read_text(encoding="utf-8").splitlines()[:NUM_TEXTS]
    arguments = (json.dumps([line.split("\t")[0] for line in lines]), str(dates_int8), str(throughput))

    def run(*python: str) -> dict[str, Any]:
        command = [*python, "-c", DECODE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    here, haswell = run(sys.executable), run(*HASWELL)
    assert haswell["options"] == {"session.x64quantprecision": "1"}
    assert haswell["ids"] == here["ids"]


def test_products_are_exact_without_vnni() -> None:
    # Without conftest and plugins, which import torch.
    options = ("-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider")
    command = [*HASWELL, "-m", "pytest", *options, "tests/runtime/ort/test_int8_products.py"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]
