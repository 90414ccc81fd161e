"""Read Marian's model.npz and .bin without running code stored in them.

The binary format is that of `src/common/binary.cpp` in Marian: a version, headers of 4 numbers, names, shapes, and the
data of each item in turn. Matrices of type intgemm have whole numbers, and after them the factor that they were
multiplied by; all but embeddings are stored transposed.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tfexport.errors import CheckpointError, shortened

OPTIONS = "special:model.yml"
_VERSION = struct.pack("<Q", 1)
_MOST_ITEMS, _MOST_AXES = 100_000, 8
# Type numbers of Marian, and of its branch that Firefox and Bergamot use.
_TYPES: dict[int, str] = {0x101: "<i1", 0x402: "<f2", 0x404: "<f4", 0x408: "<f8"}
_QUANTIZED: dict[int, str] = {0x10001: "<i1", 0x4101: "<i1", 0x10002: "<i2", 0x4102: "<i2"}
_PACKED = "is packed for one kind of processor, expected float32 or intgemm8; convert model.npz again with --gemm-type"


def is_marian(path: Path) -> bool:
    """Return whether a file is a model of Marian."""
    try:
        with path.open("rb") as file:
            if file.read(len(_VERSION)) == _VERSION:
                return True
        with zipfile.ZipFile(path) as archive:
            return f"{OPTIONS}.npy" in archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def read_marian(copy: Path, path: Path) -> tuple[str, dict[str, Tensor]]:
    """Return the options of a model as YAML, and its tensors in floating point."""
    with copy.open("rb") as file:
        try:
            is_binary = file.read(len(_VERSION)) == _VERSION
            num_bytes = copy.stat().st_size
            arrays = _read_binary(file, num_bytes) if is_binary else _read_archive(file, num_bytes)
            options = bytes(arrays.pop(OPTIONS).view(np.uint8)).partition(b"\0")[0].decode()
        except (ValueError, KeyError, EOFError, OverflowError, struct.error, zipfile.BadZipFile) as error:
            reason = f"{OPTIONS} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{path}: is damaged, or not a model of Marian ({reason}); copy it again") from error
    return options, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _read_archive(file: BinaryIO, num_bytes: int) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > 20 * num_bytes:
            raise ValueError("it unpacks to more than 20 times its size")
        arrays = {}
        for member in members:
            with archive.open(member) as stored:
                arrays[member.filename.removesuffix(".npy")] = np.lib.format.read_array(stored, allow_pickle=False)
    if wrong := [name for name, array in arrays.items() if name != OPTIONS and array.dtype.kind != "f"]:
        raise ValueError(f"{shortened(wrong[0])} is {arrays[wrong[0]].dtype}, expected floating point")
    return arrays


def _read_binary(file: BinaryIO, num_bytes: int) -> dict[str, NDArray[Any]]:
    def read(size: int) -> bytes:
        if size > num_bytes - file.tell():
            raise EOFError("it was cut short")
        return file.read(size)

    def numbers(count: int, kind: str = "Q") -> tuple[int, ...]:
        return cast("tuple[int, ...]", struct.unpack(f"<{count}{kind}", read(struct.calcsize(f"<{count}{kind}"))))

    (count,) = numbers(1)
    if count > _MOST_ITEMS:
        raise ValueError(f"it has {count} items, expected at most {_MOST_ITEMS}")
    headers = [numbers(4) for _ in range(count)]
    if any(length > 1000 or axes > _MOST_AXES for length, _, axes, _ in headers):
        raise ValueError(f"an item has a name of more than 1,000 characters, or more than {_MOST_AXES} axes")
    names = [read(length).rstrip(b"\0").decode() for length, *_ in headers]
    shapes = [numbers(axes, "i") for _, _, axes, _ in headers]
    read(*numbers(1))
    return {
        name: _array(name, kind, shape, read, size)
        for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True)
    }


def _array(name: str, kind: int, shape: tuple[int, ...], read: Callable[[int], bytes], size: int) -> NDArray[Any]:
    dtype = np.dtype(_TYPES.get(kind) or _QUANTIZED.get(kind) or "V")
    count = int(np.prod(shape, dtype=object))
    if dtype.kind == "V":
        raise ValueError(f"{shortened(name)} {_PACKED} float32")
    if min(shape, default=1) < 0 or count * dtype.itemsize + 4 * (kind in _QUANTIZED) > size:
        raise ValueError(f"{shortened(name)} has {size} bytes, too few for its shape {list(shape)}")
    raw = read(size)
    array = np.frombuffer(raw, dtype, count)
    if kind in _TYPES:
        return array.reshape(shape).copy()
    (factor,) = struct.unpack_from("<f", raw, count * dtype.itemsize)
    whole = array.reshape(shape) if "Wemb" in name else array.reshape(shape[::-1]).T
    return np.ascontiguousarray(whole / np.float32(factor), np.float32)
