"""How many bytes of weights one step of the decoder reads."""

from __future__ import annotations

import re

from tfexport._io.safetensors_header import read_header
from tfexport.bundle.bundle import Bundle
from tfexport.contract import WEIGHTS

# A step looks up one row of the embedding and of the positions; the source's keys and values are the encoder's work.
_NOT_READ = re.compile(r"dec\.(embed\.|pos$|layers\.\d+\.cross\.[kv]\.)")


def step_weight_bytes(bundle: Bundle) -> int | None:
    """Add up the weights that every step of the decoder reads, whatever the batch.

    Returns:
        Bytes; None for a module of the user's own, whose weights have names of its own.
    """
    config = bundle.manifest.config
    if config is None:
        return None
    sizes = {name: tensor.num_bytes for name, tensor in read_header(bundle.file(WEIGHTS)).items()}
    read = sum(size for name, size in sizes.items() if name.startswith("dec.") and not _NOT_READ.match(name))
    if not config.tie_output:
        return read + sum(size for name, size in sizes.items() if name.startswith("out."))
    table = "enc.embed.weight" if config.tie_embeddings else "dec.embed.weight"
    tied = {name: size for name, size in sizes.items() if name == table or name.startswith(f"{table}.")}
    # Quantised for throughput there are two tables: one to look up rows in, and one to multiply with.
    multiplied = {name: size for name, size in tied.items() if ".int8_columns." in name} or tied
    return read + sum(multiplied.values()) + sizes.get("out.bias", 0)
