"""The process of one contender: it opens one model and decodes batches of it; see `comparison.workers.protocol`.

Requests:

    {"op": "open", "contender", "model", "precision", "device", "max_batch", "work"}
                                            → {"weight_bytes", "bandwidth", "cache_bytes"} (of one row)
    {"op": "tokens", "batch"}               → {"tokens"}
    {"op": "turn", "batch"}                 → {"step_ms", "cpu_ms"}
    {"op": "trace", "batch"}                → {"trace"}
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from comparison.workers.protocol import answer_requests

from stepwise.bandwidth import bandwidth
from stepwise.cells import cache_bytes
from stepwise.contenders import CONTENDERS, Opened, Opening
from stepwise.steps import timed, tokens
from stepwise.trace import traced


class Server:
    """Answers requests for one contender."""

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._opened: Opened | None = None

    def open(self, contender: str, work: str, **opening: Any) -> dict[str, Any]:
        """Open a model, and measure the bandwidth of what it runs on."""
        self._device = opening["device"]
        self._opened = CONTENDERS[contender](Opening(work=Path(work), **opening))
        read = self._opened.weight_bytes
        return {
            "weight_bytes": read,
            "cache_bytes": cache_bytes(self._opened.session.spec, 1),
            "bandwidth": bandwidth(self._device, read),
        }

    def tokens(self, batch: int) -> dict[str, Any]:
        """Decode a batch, which also warms up."""
        return {"tokens": tokens(self._session, batch)}

    def turn(self, batch: int) -> dict[str, Any]:
        """Time a decode."""
        return asdict(timed(self._session, batch))

    def trace(self, batch: int) -> dict[str, Any]:
        """Trace a decode."""
        return {"trace": traced(self._session, batch, self._device)}

    @property
    def _session(self) -> Any:
        assert self._opened is not None, "open comes first"
        return self._opened.session


if __name__ == "__main__":
    answer_requests(Server())
