"""int8 on an x86 CPU without VNNI: qemu-user emulates a Haswell (AVX2), and the results are those of this CPU."""

from __future__ import annotations

import json
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
NUM_TEXTS = 120

# Prints how products are computed and the token ids of dates and of random sequences.
DECODE = """
import json, sys
import numpy as np
import tfexport
from tfexport.runtime.ort.int8_products import int8_session_options

dates, tiny, texts = sys.argv[1:]
rng = np.random.default_rng(0)
sources = [rng.integers(4, 900, length).tolist() for length in rng.integers(5, 24, 40)]
found = tfexport.load(dates, threads=1).generate(json.loads(texts), batch_size=32)
random = tfexport.load(tiny, threads=1).generate_ids(sources, batch_size=8, max_new_tokens=16)
ids = [[int(id) for id in result.token_ids] for result in [*found, *(results[0] for results in random)]]
print(json.dumps({"options": dict(int8_session_options()), "ids": ids}))
"""


def run(command: list[str], *arguments: str) -> dict[str, Any]:
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("optimize_for", ["latency", "throughput"])
def test_a_bundle_gives_equal_token_ids_without_vnni(
    optimize_for: Any, once: Callable[[str, Callable[[Path], object]], Path]
) -> None:
    config = ExportConfig(precision="int8", optimize_for=optimize_for)

    def bundle(source: str, name: str) -> str:
        return str(once(f"{name}-{optimize_for}", lambda path: export_bundle(source, path, config, verify=False)))

    lines = (DATES / "heldout.tsv").read_text(encoding="utf-8").splitlines()[:NUM_TEXTS]
    arguments = [
        bundle(str(DATES), "dates-int8"),
        bundle("preset:tiny", "tiny-int8"),
        json.dumps([line.split("\t")[0] for line in lines]),
    ]
    here = run([sys.executable, "-c", DECODE], *arguments)
    haswell = run([str(QEMU), "-cpu", "Haswell", sys.executable, "-c", DECODE], *arguments)
    assert haswell["options"] == {"session.x64quantprecision": "1"}
    assert haswell["ids"][:NUM_TEXTS] == here["ids"][:NUM_TEXTS]
    # Random weights have near ties, which float32 rounding decides, as it does between batch sizes.
    equal = [mine == other for mine, other in zip(haswell["ids"], here["ids"], strict=True)]
    assert sum(equal) > 0.9 * len(equal)


def test_the_int8_tests_pass_without_vnni() -> None:
    quantize = "tests/export/quantize"
    files = [
        "tests/runtime/ort/test_int8_products.py",
        *(
            f"{quantize}/test_integers.py::{name}"
            for name in (
                "test_every_way_to_write_a_linear_map",
                "test_a_product_is_that_of_the_rounded_rows",
                "test_a_row_is_the_same_to_the_bit_in_any_batch",
                "test_an_activation_is_rounded_once_for_all_its_readers",
            )
        ),
        f"{quantize}/test_qdq.py::test_the_runtime_runs_graphs_with_narrow_weights",
    ]
    command = [str(QEMU), "-cpu", "Haswell", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]
