"""The first text of a process loads none of the libraries and packages that it does not need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOT_NEEDED = {
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "safetensors",
    "cryptography",
    "tensorrt",
    "tfexport.bulk",
    "tfexport.export",
    "tfexport.importing",
    "tfexport.runtime.eager",
    "tfexport.serve",
    "tfexport.tensorrt",
    "tfexport.verify",
}
GENERATE = """
import json, sys
import tfexport
with tfexport.load(sys.argv[1], backend="ort", threads=1) as model:
    model.generate_ids([[4, 5, 6]], max_new_tokens=2)
print(json.dumps(list(sys.modules)))
"""


def test_a_first_call_loads_only_what_it_needs(random_bundle: Path) -> None:
    command = [sys.executable, "-P", "-c", GENERATE, str(random_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "tfexport.runtime.ort._contrib" in loaded
    assert not loaded & NOT_NEEDED
