"""How many bytes of weights one step of the decoder reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tfexport.bundle.bundle import Bundle
from tfexport.contract import WEIGHTS

# A step looks up one row of the embedding and of the positions; the encoder computes the source's keys and values.
_NOT_READ = re.compile(r"dec\.(embed\.|pos$|layers\.\d+\.cross\.[kv]\.)")
_MAX_HEADER_BYTES = 100_000_000


def step_weight_bytes(bundle: Bundle) -> int | None:
    """Return the bytes of weights that every step of the decoder reads, for any batch size.

    None for a user's own module, whose weights have other names.
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
    # Quantized for throughput there are two tables: one to look up rows in, and one to multiply with.
    multiplied = {name: size for name, size in tied.items() if ".int8_columns." in name} or tied
    return read + sum(multiplied.values()) + sizes.get("out.bias", 0)


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Return the size of each tensor of a safetensors file; empty for a damaged file, which loading refuses.

    A deployment machine has no safetensors library, and only the number of threads depends on these sizes.
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
