"""What a build would need, counted by hand."""

from __future__ import annotations

from tests.bundle.made import FACTS
from tfexport.tensorrt.config import EngineLimits
from tfexport.tensorrt.pipeline import cache_bytes


def test_the_memory_of_the_caches() -> None:
    """32 rows, 2 layers of 2 heads with keys and values of 4 floats; 16 target and 16 source tokens."""
    spec = FACTS["spec"]
    sizes = EngineLimits(max_batch=32, max_source_length=16, max_target_length=16, max_candidates=10)
    token = 2 * 2 * (4 + 4) * 4
    scratch = 32 * 2 * 4 * 4 * 16
    assert cache_bytes(spec, sizes) == 32 * token * (2 * 16 + 16) + scratch
