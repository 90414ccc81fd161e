"""What a first text costs before it is computed, in counts that no busy machine changes: modules and compiled code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# What no first call of `generate` needs.
NOT_NEEDED = {
    "tfexport.bulk",
    "tfexport.checkpoint",
    "tfexport.decode.align",
    "tfexport.decode.pairs",
    "tfexport.decode.score",
    "tfexport.decode.unknowns",
    "tfexport.graph",
    "tfexport.runtime.eager",
    "tfexport.runtime.ort.session",
    "tfexport.serve",
    "tfexport.trt",
    "tfexport.verify",
    # Beside those of NumPy and ONNX Runtime.
    "asyncio",
    "email",
    "secrets",
    "shutil",
    "socket",
    "tempfile",
    "uuid",
}
# Pieces of code that importing compiles, whatever is cached: of CPython 3.11, later ones compile fewer.
MOST_COMPILED = 170
GENERATE = """
import json, sys
import numpy, onnxruntime
before, compiled = set(sys.modules), []
sys.addaudithook(
    lambda event, given: event == "exec" and given[0].co_filename == "<string>" and compiled.append(given)
)
import tfexport
tfexport.load
num_compiled = len(compiled)
with tfexport.load(sys.argv[1], backend="ort", threads=1) as model:
    model.generate_ids([[4, 5, 6]], max_new_tokens=2)
print(json.dumps([sorted(set(sys.modules) - before), num_compiled]))
"""


def test_modules_and_compiled_code_of_a_first_call(random_bundle: Path) -> None:
    command = [sys.executable, "-P", "-c", GENERATE, str(random_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules, num_compiled = json.loads(done.stdout)
    loaded: set[str] = set(modules)
    assert "tfexport.runtime.ort.contrib" in loaded
    assert not loaded & NOT_NEEDED
    ours = {name for name in loaded if name.partition(".")[0] == "tfexport"}
    assert len(ours) <= 83, "each takes a few tenths of a millisecond; import late what generating does not need"
    assert num_compiled <= MOST_COMPILED, "a dataclass has Python compile up to six methods; no cache keeps them"
