"""Which libraries an import and a first text load, and the public names; import-linter checks all other imports."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

import tfexport
from tests.conftest import ROOT

HEAVY = set(
    "click cryptography numpy onnx onnx_ir onnxruntime onnxscript safetensors tensorrt tokenizers torch".split()
)


def test_every_library_has_a_fence() -> None:
    """A library without a contract of its own in pyproject.toml may not be imported anywhere."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    fenced = {module for contract in settings["contracts"] for module in contract.get("protected_modules", ())}
    modules = grimp.build_graph("tfexport", include_external_packages=True).modules
    imported = {name.partition(".")[0] for name in modules}
    assert imported - set(sys.stdlib_module_names) - {"tfexport"} == fenced


def loaded_by(statement: str) -> set[str]:
    code = f"import sys, json; {statement}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_no_heavy_library() -> None:
    assert not loaded_by("import tfexport") & HEAVY


def test_importing_the_command_line_loads_only_click() -> None:
    assert loaded_by("import tfexport.cli") & HEAVY == {"click"}


def test_a_deployment_machine_needs_neither_torch_nor_onnx() -> None:
    loaded = loaded_by("import tfexport; tfexport.load; import tfexport.describe, tfexport.runtime.ort.backend")
    assert "onnxruntime" in loaded
    assert not loaded & {"torch", "onnx", "onnx_ir", "onnxscript", "safetensors"}


def test_a_first_text_loads_only_needed_modules(random_bundle: Path) -> None:
    load = f"tfexport.load({str(random_bundle)!r}, backend='ort', threads=1)"
    loaded = loaded_by(f"import tfexport; {load}.generate_ids([[4, 5, 6]], max_new_tokens=2)")
    packages = {"bulk", "export", "importing", "runtime.eager", "serve", "tensorrt", "verify"}
    assert "tfexport.runtime.ort._contrib" in loaded
    assert not loaded & (HEAVY - {"numpy", "onnxruntime", "tokenizers"} | {f"tfexport.{name}" for name in packages})
    # They take memory and time that few processes need; older versions of NumPy import the first one themselves.
    assert not loaded - loaded_by("import numpy, onnxruntime") & {"numpy.random", "html"}


def test_public_names_can_be_imported() -> None:
    values = {name: getattr(tfexport, name) for name in tfexport.__all__ if name != "__version__"}
    assert all(value.__name__ == name for name, value in values.items())
    assert tfexport.__version__ == importlib.metadata.version("tfexport")
    assert {"load", "Model", "TfexportError"} <= set(tfexport.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = tfexport.laod
