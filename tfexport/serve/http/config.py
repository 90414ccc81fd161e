"""What the HTTP app takes and offers."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.fields import Config

MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class HttpConfig(Config, subject="http"):
    """Limits of a request, and which endpoints there are.

    Attributes:
        max_body_bytes: of a request; more is 413.
        max_texts: of a request that takes several.
        max_timeout_s: seconds that a request takes at most, whatever it asks for.
        max_send_s: seconds that an event of a stream may wait for its reader.
        ui: whether there is a page at `/`.
        metrics: whether there is `/metrics`.
        completions: whether there is `/v1/completions`, as OpenAI has it.
        translate: whether there is `/translate`, as LibreTranslate has it.
    """

    max_body_bytes: int = 1024 * 1024
    max_texts: int = 64
    max_timeout_s: float = 60.0
    max_send_s: float = 30.0
    ui: bool = True
    metrics: bool = True
    completions: bool = False
    translate: bool = False

    def _problems(self) -> list[str]:
        between = {
            "max_body_bytes": (1024, MAX_BODY_BYTES),
            "max_texts": (1, 4096),
            "max_timeout_s": (0.001, 86_400),
            "max_send_s": (0.001, 86_400),
        }
        return [
            f"{name} is {value}, expected {low} to {high}"
            for name, (low, high) in between.items()
            if not low <= (value := getattr(self, name)) <= high
        ]
