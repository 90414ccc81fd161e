"""How far a build is: the library's progress monitor, and one number for several builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfexport.tensorrt.library import Library

# Called with the phase, the step reached and the steps of the phase; what it raises cancels the build.
OnStep = Callable[[str, int, int], None]


class Monitor:
    """Calls `on_step(phase, step, total)` while a build goes on; phases nest, the outermost comes first.

    What `on_step` raises, Ctrl-C included, cancels the build and is kept in `error`:
    an exception must not travel through the library.
    """

    def __init__(self, on_step: OnStep) -> None:
        """Call `on_step` from the thread that builds or one of the library's."""
        super().__init__()
        self._on_step = on_step
        self._total: dict[str, int] = {}
        self.error: BaseException | None = None

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Begin a phase of `num_steps`; the library calls this."""
        self._total[phase_name] = num_steps
        self._step(phase_name, 0)

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Count a step, from 0, and say whether to go on; the library calls this."""
        self._step(phase_name, step + 1)
        return self.error is None

    def phase_finish(self, phase_name: str) -> None:
        """End a phase, possibly before its last step; the library calls this."""
        self._step(phase_name, self._total.get(phase_name, 0))

    def _step(self, phase: str, step: int) -> None:
        if self.error is None:
            try:
                self._on_step(phase, step, self._total.get(phase, step))
            except BaseException as error:  # noqa: BLE001 - raised again outside of the library
                self.error = error


def attach_monitor(library: Library, config: Any, on_step: OnStep) -> Monitor:
    """Let an `IBuilderConfig` call `on_step`; keep the result for as long as the build goes on."""
    monitor: Monitor = type("TensorRTProgress", (Monitor, library.trt.IProgressMonitor), {})(on_step)
    config.progress_monitor = monitor
    return monitor


class Progress:
    """Turns the nested phases of several builds into one number that never falls."""

    def __init__(self, builds: int, on_progress: Callable[[float], None]) -> None:
        """Tell `on_progress` the part that is done, 0 to 1, of so many builds."""
        self._builds = builds
        self._on_progress = on_progress
        self._finished = 0
        self._done = 0.0
        self._open: list[tuple[str, int, int]] = []

    def step(self, phase: str, step: int, total: int) -> None:
        """Take a step of a phase; step 0 begins one within those that are open."""
        if step == 0:
            self._open.append((phase, 0, total))
            return
        names = [name for name, _, _ in self._open]
        if phase not in names:
            return
        while self._open[-1][0] != phase:
            self._open.pop()
        self._open[-1] = (phase, step, total)
        part = 0.0
        for _, reached, steps in reversed(self._open):
            part = min(1.0, (reached + part) / steps) if steps else 0.0
        self._advance(self._finished + part)

    def finish_build(self) -> None:
        """Count a build as done."""
        self._open.clear()
        self._finished += 1
        self._advance(self._finished)

    def _advance(self, builds: float) -> None:
        self._done = max(self._done, builds / self._builds)
        self._on_progress(self._done)
