"""Compare the memory that a model needs with what is free on its GPU."""

from __future__ import annotations

from tfexport.errors import BackendError


def check_fits(subject: str, device: str, needed: int, memory: tuple[int, int], remedy: str) -> None:
    """Raise `BackendError` if `needed` bytes exceed the free ones of (free, total)."""
    free, total = memory
    if needed > free:
        raise BackendError(
            f"{subject}: needs at least {needed / 1e6:,.0f} MB for its weights, and {device} has {free / 1e6:,.0f} of "
            f"{total / 1e6:,.0f} MB free; stop other processes on this GPU, choose another with --device, or {remedy}"
        )
