"""How libraries load: those of CUDA from Python's packages, ONNX Runtime without telemetry."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from tfexport.runtime.ort._providers import load_libraries, needed, where_looked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads libraries of Linux")


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_needed_libraries_equal_those_of_readelf() -> None:
    (library,) = Path(tokenizers.__file__).parent.glob("*.so")
    listed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert needed(library) == re.findall(r"\(NEEDED\).*\[(.+)\]", listed) != []


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize("place", ["nvidia/cu13/lib", "nvidia/cublas/lib", "torch/lib"])
def test_libraries_are_found_where_wheels_put_them(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is asked for first needs the other, and does not know where it lies."""
    folder, name = tmp_path / "site-packages" / place, place.replace("/", "-")
    folder.mkdir(parents=True)
    first, second = f"lib{name}-first.so.9", f"lib{name}-second.so.9"
    for library, more in ((second, ()), (first, ("-Wl,--no-as-needed", f"-L{folder}", f"-l:{second}"))):
        link = ("gcc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{library}", *more, "-o", folder / library)
        subprocess.run(link, check=True)
    assert load_libraries([first, second]) == [first, second]
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site-packages")])
    assert load_libraries([first, "libnobody.so.9", second]) == ["libnobody.so.9"]
    assert str(tmp_path / "site-packages") in where_looked()
    ctypes.CDLL(first)  # by its name alone, as what is linked to it asks for it


def test_missing_libraries_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert where_looked() == (
        "looked in LD_LIBRARY_PATH, the system's folders and no nvidia/*/lib or torch/lib on Python's path"
    )


def test_telemetry_is_off_before_onnxruntime_is_loaded() -> None:
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
