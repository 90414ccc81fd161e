"""Compute how many bytes of weights one decode step reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tfexport.bundle.bundle import Bundle
from tfexport.contract import WEIGHTS

# A step reads only one row of the embeddings and positions; the encoder computes the source's keys and values.
_NOT_READ = re.compile(r"dec\.(embed\.|pos$|layers\.\d+\.cross\.[kv]\.)")
_MAX_HEADER_BYTES = 100_000_000


def step_weight_bytes(bundle: Bundle) -> int | None:
    """Return the bytes of weights that every decode step reads, for any batch size.

    Returns None for a user's own module, because its weights have other names.
    """
    config = bundle.manifest.config
    if config is None:
        return None
    sizes = _tensor_sizes(bundle.file(WEIGHTS))
    read = sum(size for name, size in sizes.items() if name.startswith("dec.") and not _NOT_READ.match(name))
    if not config.tie_output:
        return read + sum(size for name, size in sizes.items() if name.startswith("out."))
    table = "enc.embed.weight" if config.tie_embeddings else "dec.embed.weight"
    tied = {name: size for name, size in sizes.items() if name == table or name.startswith(f"{table}.")}
    # If quantized for throughput, there are two tables, and only the one with int8 columns is multiplied.
    multiplied = {name: size for name, size in tied.items() if ".int8_columns." in name} or tied
    return read + sum(multiplied.values()) + sizes.get("out.bias", 0)


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Return the size of each tensor of a safetensors file; empty if it is damaged.

    Parses the header itself, because a deployment machine has no safetensors library.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        return {
            name: int(end) - int(begin) for name, (begin, end) in ((n, t["data_offsets"]) for n, t in header.items())
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
