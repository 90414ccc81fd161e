"""Compare int8 token ids with those of an emulated Haswell, an x86 CPU with AVX2 and without VNNI."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DATES, ROOT
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig

QEMU = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed (Debian package qemu-user)"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulated programs are for x86-64"),
]
HASWELL = (str(QEMU), "-cpu", "Haswell", sys.executable)
NUM_TEXTS, NUM_RANDOM = 16, 16

# Prints how products are computed and, for each bundle, the token ids of dates or of random sequences. It does not
# import torch, which takes the emulator 20 seconds.
DECODE = """
import json, sys
import numpy as np
import tfexport
from tfexport.runtime.ort.int8_products import int8_session_options

texts, count, *bundles = sys.argv[1:]
rng = np.random.default_rng(0)
sources = [rng.integers(4, 900, length).tolist() for length in rng.integers(5, 24, int(count))]
ids = {}
for bundle in bundles:
    with tfexport.load(bundle, threads=1) as model:
        if model.tokenizer:
            ids[bundle] = [result.token_ids for result in model.generate(json.loads(texts))]
        else:
            found = model.generate_ids(sources, batch_size=8, max_new_tokens=8)
            ids[bundle] = [best.token_ids for best, *_ in found]
print(json.dumps({"options": dict(int8_session_options()), "ids": ids}))
"""


def test_int8_bundles_give_equal_token_ids_without_vnni(once: Callable[[str, Callable[[Path], object]], Path]) -> None:
    def bundle(source: str, optimize_for: Any) -> str:
        config = ExportConfig(precision="int8", optimize_for=optimize_for, forms=("contrib",))
        name = f"emulated-{Path(source).name}-{optimize_for}"
        return str(once(name, lambda path: export_bundle(source, path, config, verify=False)))

    aims = ("latency", "throughput")
    trained, random = ([bundle(source, aim) for aim in aims] for source in (str(DATES), "preset:tiny"))
    lines = (DATES / "heldout.tsv").read_text(encoding="utf-8").splitlines()[:NUM_TEXTS]
    texts = json.dumps([line.split("\t")[0] for line in lines])

    def run(*python: str) -> dict[str, Any]:
        command = [*python, "-c", DECODE, texts, str(NUM_RANDOM), *trained, *random]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    here, haswell = run(sys.executable), run(*HASWELL)
    assert haswell["options"] == {"session.x64quantprecision": "1"}
    for path in trained:
        assert haswell["ids"][path] == here["ids"][path]
    # Random weights have near ties, which float32 rounding decides, as it does between batch sizes.
    pairs = [pair for path in random for pair in zip(haswell["ids"][path], here["ids"][path], strict=True)]
    assert sum(mine == other for mine, other in pairs) > 0.9 * len(pairs)


def test_products_are_exact_without_vnni() -> None:
    # Without conftest and plugins, which import torch.
    options = ("-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider")
    command = [*HASWELL, "-m", "pytest", *options, "tests/runtime/ort/test_int8_products.py"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]
