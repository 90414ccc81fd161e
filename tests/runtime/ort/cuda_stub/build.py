"""Build stub CUDA libraries for a wheel of ONNX Runtime: those that its CUDA provider names, with what it calls."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

STUB = Path(__file__).with_name("stub.c")
CORE = "libcudastub.so"
# What the stub counts, in the order of its enum.
NAMES = ("kernels", "products", "uploads", "downloads", "device_copies", "host_copies", "fills", "waits", "on_second")
PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
_NVIDIA = re.compile(r"lib(cu|nv)\w+\.so\.\d+")
_FUNCTION = re.compile(r"_*cu\w+")


def needed(provider: Path) -> list[str]:
    """Return NVIDIA's libraries that a library does not load without."""
    listed = re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", str(provider)))
    return [name for name in listed if _NVIDIA.fullmatch(name)]


def build_stubs(wheel: Path, folder: Path) -> list[str]:
    """Build the stub libraries for a wheel.

    All functions are in one library, so that there is one set of counts; those that NVIDIA's are called hold nothing
    but their name, their version and that they need it.

    Args:
        wheel: folder that the wheel was installed into.
        folder: to write to.

    Returns:
        The names of the libraries.
    """
    provider = wheel / PROVIDER
    libraries = needed(provider)
    major = next(name.rpartition(".")[2] for name in libraries if name.startswith("libcudart"))
    undefined = re.findall(r"\sU (\w+)", _run("nm", "-D", "--undefined-only", str(provider)))
    core = folder / CORE
    defines = [f"-DCUDA_MAJOR={major}"]
    _compile(str(STUB), *defines, "-c", "-o", str(folder / "stub.o"))
    written = set(re.findall(r"\s[TDB] (\w+)", _run("nm", "--defined-only", str(folder / "stub.o"))))
    rest = [name for name in undefined if _FUNCTION.fullmatch(name) and name not in written]
    source = folder / "rest.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in rest))
    _compile(str(source), str(folder / "stub.o"), "-shared", f"-Wl,-soname,{CORE}", "-o", str(core))
    for name in {*libraries, "libcuda.so.1"}:
        versions = folder / f"{name}.map"
        versions.write_text(f"{name} {{ }};\n")
        _compile(
            *("-shared", "-x", "c", "/dev/null", f"-L{folder}", "-Wl,--no-as-needed", f"-l:{CORE}"),
            *(f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}", "-Wl,-rpath,$ORIGIN"),
            *("-o", str(folder / name)),
        )
    return libraries


def _compile(*arguments: str) -> None:
    _run("gcc", "-O1", "-fPIC", "-fno-builtin", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
