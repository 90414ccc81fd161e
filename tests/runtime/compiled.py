"""The compiled library of the backend `native`, made once for all tests, and sessions on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.runtime.exported import Once, exported
from tfexport.contract import WEIGHTS
from tfexport.nn.transformer import Transformer
from tfexport.runtime.native._library import KERNELS, MODULE, Library
from tfexport.runtime.native._plan import config_problems
from tfexport.runtime.native.backend import NativeSession

# With the value "installed", tests run on the libraries of the installed distribution.
SOURCE = os.environ.get("TFEXPORT_TEST_NATIVE")
BUILD = ("-O3", "-Werror")
DISTRIBUTION = Path(__file__).resolve().parents[2] / "scripts" / "native"


def compiler() -> ModuleType:
    """Return `scripts/native/compile.py`; skip the test if there is no compiler."""
    spec = importlib.util.spec_from_file_location("native_compile", DISTRIBUTION / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.compiler() is None and SOURCE != "installed":
        pytest.skip("no C++ compiler")
    return module


def path_of(kernels: str, once: Once, options: Sequence[str] = BUILD) -> Path:
    """Compile one set of kernels; skip the test if this kind of machine has no such set."""
    module = compiler()
    if kernels not in module.FLAGS:
        pytest.skip(f"no {kernels} on this machine")
    if SOURCE == "installed" and options == BUILD:
        return Path(str(importlib.import_module(MODULE).__file__)).with_name(module.library_name(kernels))

    def make(path: Path) -> None:
        path.mkdir()
        module.compile_library(kernels, path, options)

    return once(f"native-{kernels}{''.join(options[:2])}", make) / module.library_name(kernels)


def library(kernels: str, once: Once) -> Library:
    """Compile one set of kernels; skip the test if this CPU cannot run it."""
    found = Library(path_of(kernels, once))
    if not found.is_supported:
        pytest.skip(f"this CPU has no {kernels}")
    return found


def sanitized(kernels: str, once: Once) -> tuple[Path, dict[str, str]]:
    """Compile with checks of memory and arithmetic; return the library and the environment of its process."""
    options = ("-O1", "-Werror", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    path, command = path_of(kernels, once, options), [str(compiler().compiler()), "-print-file-name=libasan.so"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("the compiler has no sanitizers")
    preloaded = f"{runtime} {runtime.replace('libasan', 'libubsan')}"
    return path, {**os.environ, "LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0"}


def fastest(once: Once) -> Library:
    """Return the fastest library that this machine can run."""
    flags = compiler().FLAGS
    for kernels in KERNELS:
        if kernels in flags and (found := library(kernels, once)).is_supported:
            return found
    raise AssertionError


def native_session(model: Transformer, once: Once, of: Callable[[Once], Library] = fastest) -> NativeSession:
    """Open a model, or skip the test if the library does not compute it."""
    if problems := config_problems(model.config):
        pytest.skip(f"native: {' and '.join(problems)}")
    graphs, _ = exported(model, once)
    return NativeSession(model.config, next(iter(graphs.values())).with_name(WEIGHTS), library=of(once))
