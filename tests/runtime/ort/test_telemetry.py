"""ONNX Runtime is loaded with its telemetry switched off."""

from __future__ import annotations

import subprocess
import sys


def test_it_is_off_before_onnxruntime_is_loaded() -> None:
    program = (
        "import builtins, os, sys\n"
        "import_module, seen = builtins.__import__, []\n"
        "def watch(name, *rest):\n"
        "    if name == 'onnxruntime' and name not in sys.modules:\n"
        "        seen.append(os.environ.get('ORT_DISABLE_TELEMETRY'))\n"
        "    return import_module(name, *rest)\n"
        "builtins.__import__ = watch\n"
        "import tfexport.runtime.ort.backend\n"
        "print(seen[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr
