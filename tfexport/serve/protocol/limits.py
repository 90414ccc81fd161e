"""What a request may be and ask for at most."""

from __future__ import annotations

from collections.abc import Iterator

from tfexport.config import Config

MAX_BODY_BYTES = 64 * 1024 * 1024


class Limits(Config, subject="limits"):
    """Limits of a request.

    Attributes:
        max_body_bytes: of all that it sends.
        max_texts: of a request that takes several.
        max_timeout_s: seconds that it takes at most, whatever it asks for.
    """

    max_body_bytes: int = 1024 * 1024
    max_texts: int = 64
    max_timeout_s: float = 60.0

    def _problems(self) -> Iterator[str]:
        between = {
            "max_body_bytes": (1024, MAX_BODY_BYTES),
            "max_texts": (1, 4096),
            "max_timeout_s": (0.001, 86_400),
        }
        for name, (low, high) in between.items():
            if not low <= (value := getattr(self, name)) <= high:
                yield f"{name} is {value}, expected {low} to {high}"
