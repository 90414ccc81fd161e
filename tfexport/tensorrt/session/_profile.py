"""Record the time of each layer, in the format of ONNX Runtime's profiles."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tfexport._io.names import PROFILE_START


class LayerTimer:
    """An `IProfiler` of a context, whose runs then return when they have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[tuple[str, float]] = []  # of the current run, in milliseconds

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        """Receive the time of a layer."""
        self.layers.append((layer_name, ms))


class LayerProfile:
    """The layers of all runs, by plan, as events of a trace."""

    def __init__(self, folder: Path) -> None:
        """Create an empty profile, which `write` stores in new folders of `folder`."""
        self._folder, self._start_ns = folder, time.time_ns()
        self._events: dict[str, list[dict[str, Any]]] = {}

    def record(self, plan: str, timer: LayerTimer) -> None:
        """Add the layers of a run that has just ended; they ran one after the other."""
        layers, timer.layers = timer.layers, []
        at = (time.time_ns() - self._start_ns) / 1e3 - sum(ms for _, ms in layers) * 1e3
        for name, ms in layers:
            event = {"name": name, "cat": "Layer", "ph": "X", "ts": at, "dur": ms * 1e3}
            self._events.setdefault(plan, []).append(event)
            at += ms * 1e3

    def write(self) -> None:
        """Write a folder for each plan."""
        for number, (plan, events) in enumerate(self._events.items()):
            folder = self._folder / f"{number} {plan}"
            folder.mkdir()
            (folder / "events.json").write_text(json.dumps(events))
            (folder / PROFILE_START).write_text(str(self._start_ns))
