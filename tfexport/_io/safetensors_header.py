"""The header of a safetensors file: which tensors it holds, and where their bytes lie.

The format (https://huggingface.co/docs/safetensors) is an unsigned 64-bit
little-endian length, a JSON object of that length, then the tensors side by side.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tfexport._io.strict_json import parse_json
from tfexport.errors import CheckpointError

# What the safetensors library itself takes.
_MAX_BYTES = 100_000_000


class StoredTensor(NamedTuple):
    """One tensor: dtype in the format's spelling, like "F32", and where in the file its bytes lie."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read what a safetensors file holds, by name, in the order of its header.

    Args:
        path: of a plain file; nothing behind the header is read.

    Raises:
        CheckpointError: it is no safetensors file, or the tensors do not fill it from end to end.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length) if 0 < length <= min(size - 8, _MAX_BYTES) else b""
    try:
        header = parse_json(raw)
        header.pop("__metadata__", None)
        tensors = {name: _stored(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is not a safetensors file, or its header is cut off; copy it again") from error
    edges = sorted((tensor.offset, tensor.offset + tensor.num_bytes) for tensor in tensors.values())
    edges = [(0, 8 + length), *edges, (size, size)]
    if gap := next(((end, begin) for (_, end), (begin, _) in pairwise(edges) if end != begin), None):
        raise CheckpointError(
            f"{path}: has {size} bytes, which its header does not account for: "
            f"one part ends at {gap[0]}, the next begins at {gap[1]}; copy it again"
        )
    return tensors


def _stored(entry: Any, start: int) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end, end - begin)):
        raise ValueError("no tensor")
    return StoredTensor(dtype, tuple(shape), start + begin, end - begin)
