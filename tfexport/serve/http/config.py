"""What the HTTP app takes and offers."""

from __future__ import annotations

from collections.abc import Iterator

from tfexport.serve.protocol.limits import Limits


class HttpConfig(Limits, subject="http"):
    """Limits of a request, and which endpoints there are.

    Attributes:
        max_send_s: seconds that an event of a stream may wait for its reader.
        ui: whether there is a page at `/`.
        metrics: whether there is `/metrics`.
        completions: whether there is `/v1/completions`, as OpenAI has it.
        translate: whether there is `/translate`, as LibreTranslate has it.
    """

    max_send_s: float = 30.0
    ui: bool = True
    metrics: bool = True
    completions: bool = False
    translate: bool = False

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if not 0.001 <= self.max_send_s <= 86_400:
            yield f"max_send_s is {self.max_send_s}, expected 0.001 to 86400"
