"""Show phases of decoding in NVIDIA's profilers, if the package nvtx is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_HAS_NVTX = importlib.util.find_spec("nvtx") is not None


def phase(name: str) -> Callable[[F], F]:
    """Return a decorator that makes calls NVTX ranges, or nothing without nvtx."""
    if not _HAS_NVTX:
        return lambda function: function
    import nvtx

    decorate: Callable[[F], F] = nvtx.annotate(name, domain="tfexport")
    return decorate
