"""Compile the sources once for each set of instructions, into a library of its own.

Each library holds the whole program, so that no function is compiled for more instructions than its caller may use.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
_AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mprefer-vector-width=512"
_X86 = {"avx512": _AVX512, "avx2": "-mavx2 -mfma", "baseline": "-mssse3"}
FLAGS: dict[str, str] = _X86 if platform.machine() in ("x86_64", "AMD64") else {"baseline": ""}
_COMMON = "-std=c++17 -pthread -shared -fvisibility=hidden -Wall -Wextra -Wno-psabi"
_STATIC = "-static-libstdc++ -static-libgcc"
# By `sys.platform`: the ending of a library's name, and flags.
SYSTEMS = {
    "linux": (".so", f"-fPIC {_STATIC} -Wl,--version-script={SOURCES / 'exports.map'}"),
    "darwin": (".dylib", "-fPIC"),
    # GCC does not align the stack for vectors there (bug 54412), so they are moved as unaligned ones.
    "win32": (".dll", f"{_STATIC} -static -Wa,-muse-unaligned-vector-move"),
}


def compiler() -> str | None:
    """Return the C++ compiler, GCC or Clang; None if there is none."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def library_name(kernels: str, system: str = sys.platform) -> str:
    """Return the file name of the library of one set of instructions."""
    return kernels + SYSTEMS[system][0]


def compile_library(
    kernels: str, folder: Path, options: Sequence[str] = ("-O3", "-s"), system: str = sys.platform
) -> Path:
    """Compile the library of one set of instructions into a folder."""
    found, target = compiler(), folder / library_name(kernels, system)
    if found is None:
        sys.exit("no C++ compiler: install GCC or Clang, or set CXX")
    if sys.platform == "darwin":  # its linker has no -s
        options = [option for option in options if option != "-s"]
    flags = [*_COMMON.split(), *FLAGS[kernels].split(), *options, *SYSTEMS[system][1].split()]
    subprocess.run([found, *flags, *sorted(SOURCES.glob("*.cpp")), "-o", target], check=True)
    return target
