"""CUDA's libraries for ONNX Runtime: which ones its provider is linked to, and where Python's packages keep them."""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Where wheels put them in a folder of Python's path: NVIDIA's, which PyTorch's ask for as well, and PyTorch's own.
PLACES = ("nvidia/*/lib", "torch/lib")

# https://refspecs.linuxfoundation.org/elf/elf.pdf, with the sizes of 64 bits
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB = 1, 5


def needed(library: Path) -> list[str]:
    """Read from a shared library of Linux the names of those that it does not load without.

    Args:
        library: ELF, 64 bits, little-endian.
    """
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (table,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        segments = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
        ((start, length),) = [(offset, size) for kind, _, offset, _, _, size in segments if kind == _PT_DYNAMIC]
        entries = list(struct.iter_unpack("<qQ", data[start : start + length]))
        address = dict(entries)[_DT_STRTAB]
        (strings,) = [
            offset + address - begin
            for kind, _, offset, begin, _, size in segments
            if kind == _PT_LOAD and begin <= address < begin + size
        ]
        names = [strings + value for tag, value in entries if tag == _DT_NEEDED]
        return [data[name : data.find(b"\0", name)].decode() for name in names]


def load_libraries(names: Sequence[str]) -> list[str]:
    """Load libraries where the system has them, else from Python's packages; what is loaded later finds them.

    Returns:
        Those that do not load.
    """
    missing = list(names)
    while left := [name for name in missing if not any(map(_loads, (name, *_found(name))))]:
        if left == missing:
            break
        missing = left  # once more: one may have needed another
    return left


def where_looked() -> str:
    """Say in words where `load_libraries` looks."""
    roots = [str(root) for root in _roots() if any(True for place in PLACES for _ in root.glob(place))]
    beside = f"{' and '.join(PLACES)} of {', '.join(roots)}" if roots else f"no {' or '.join(PLACES)} on Python's path"
    return f"looked in LD_LIBRARY_PATH, the system's folders and {beside}"


def _roots() -> list[Path]:
    return [Path(entry) for entry in dict.fromkeys(sys.path) if entry]


def _found(name: str) -> Iterator[str]:
    return (str(path) for root in _roots() for place in PLACES for path in sorted(root.glob(f"{place}/{name}")))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
