"""Test the library of each backend in a subprocess, which a broken one may crash."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tfexport.runtime.registry import Backend, Requirement

_CALL = """
import importlib, json, sys
module, function, *arguments = sys.argv[1:]
print(json.dumps(getattr(importlib.import_module(module), function)(*arguments)))
"""
# y = x + x on float32 [2], ONNX IR 8, opset 18. As bytes, because the probe must not need the onnx package.
ADD_MODEL = bytes.fromhex(
    "08083a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a020802620f0a0179120a0a08080112040a02080242040a001012"
)
TIMEOUT_S = 120


def run_probe(backend: Backend, library: Requirement) -> dict[str, str]:
    """Test a library as a backend; return the problem by device, or ""."""
    found = _call(backend.probe_module, "probe", library.name, ADD_MODEL.hex())
    if isinstance(found, str):
        return {library.device: found}
    return {device: " ".join(problem.split()) for device, problem in found.items()}


def find_gpus() -> tuple[list[dict[str, Any]], str]:
    """Return the fields of each GPU, and the reason if none can be used."""
    found = _call("tfexport.tensorrt.cuda", "describe_gpus")
    return ([], found) if isinstance(found, str) else (found[0], found[1])


def find_unused_providers() -> list[str]:
    """Return the execution providers of ONNX Runtime that tfexport does not use."""
    found = _call("tfexport.runtime.ort.backend", "unused_providers")
    return [] if isinstance(found, str) else list(found)


def describe_int8() -> str:
    """Describe how ONNX Runtime multiplies 8-bit integers on this CPU."""
    return str(_call("tfexport.runtime.ort.int8_products", "describe_int8_products"))


def _call(*argv: str) -> Any:
    try:
        done = subprocess.run(  # noqa: S603 - our own constant, our own interpreter
            [sys.executable, "-P", "-c", _CALL, *argv], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S} s"
    if done.returncode < 0:
        return f"crashed with signal {-done.returncode}"
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return json.loads(done.stdout.strip().rpartition("\n")[2])
