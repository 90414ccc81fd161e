"""The keys and values that the attention of a step reads."""

from __future__ import annotations

import math

from tfexport.contract import GraphSpec

_FLOAT = 4


def cache_bytes(contract: GraphSpec, *, sources: int, beams: int, source_length: int, filled: int) -> int:
    """Count the bytes of a step's caches: of every row its target, of every source its own keys and values.

    Args:
        contract: of a decoder in fp32.
        sources: decoded at once.
        beams: rows of each, which share its keys and values.
        source_length: tokens of each source.
        filled: tokens of each target so far.
    """
    sizes = {"rows": sources * beams, "batch": sources, "source_len": source_length, "capacity": filled}
    return sum(
        _FLOAT * math.prod(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
        for tensor in contract.inputs
        if tensor.name.startswith(("past_", "cross_"))
    )
