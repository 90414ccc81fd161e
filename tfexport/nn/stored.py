"""Read names, types and positions of the tensors in a safetensors file."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from tfexport.errors import CheckpointError


class StoredTensor(NamedTuple):
    """A tensor in a file; its dtype is spelled as in safetensors, such as "F32"."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, in the order of their bytes."""
    path.open("rb").close()  # the library reports a file without read permission as missing
    found = {}
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            shapes = [(name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()]
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or cut short ({error}); copy or convert it again") from error
    sizes = [math.prod(shape) * _bits(dtype) // 8 for _, dtype, shape in shapes]
    offset = path.stat().st_size - sum(sizes)  # the tensors fill the end of the file, without gaps
    for (name, dtype, shape), size in zip(shapes, sizes, strict=True):
        found[name] = StoredTensor(dtype, shape, offset, size)
        offset += size
    return found


def _bits(dtype: str) -> int:
    return int(digits[0]) if (digits := re.search(r"\d+", dtype)) else 8
