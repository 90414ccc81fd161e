"""The application with faults: slow steps, and steps that fail."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfexport.decode.loop import Loop
from tfexport.integrations.ray import Arguments
from tfexport.integrations.ray._replica import Replica, deployment_of


class Faulty(Replica):
    """A replica whose steps take `step_s`, and fail while the file `fault` exists."""

    async def __init__(self, arguments: Arguments, step_s: float, fault: str) -> None:
        step = Loop.step

        def slow(loop: Loop, most: int | None = None) -> Any:
            time.sleep(step_s)
            if Path(fault).exists():
                raise RuntimeError("a fault was planted")
            return step(loop, most)

        await super().__init__(arguments)
        Loop.step = slow  # type: ignore[method-assign]


def app(arguments: Mapping[str, Any]) -> Any:
    """Build the application from its arguments, `step_s` and `fault`."""
    given = dict(arguments)
    step_s, fault = given.pop("step_s", 0.0), given.pop("fault", "/nonexistent")
    found = Arguments.read(given)
    return deployment_of(found).options(func_or_class=Faulty).bind(found, step_s, fault)
