"""How far a build is: the library's progress monitor, told to a plain function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfexport.trt.library import Library

Tell = Callable[[str, int, int], None]


class Progress:
    """Calls `tell(phase, step, total)` while a build goes on; phases lie in one another, the outermost comes first.

    What `tell` raises, Ctrl-C included, cancels the build and is kept in `error`:
    an exception must not travel through the library.
    """

    def __init__(self, tell: Tell) -> None:
        """Report to `tell`, from the thread that builds or one of the library's."""
        super().__init__()
        self._tell = tell
        self._total: dict[str, int] = {}
        self.error: BaseException | None = None

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Begin a phase of `num_steps`; the library calls this."""
        self._total[phase_name] = num_steps
        self._report(phase_name, 0)

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Count a step, from 0, and say whether to go on; the library calls this."""
        self._report(phase_name, step + 1)
        return self.error is None

    def phase_finish(self, phase_name: str) -> None:
        """End a phase, possibly before its last step; the library calls this."""
        self._report(phase_name, self._total.get(phase_name, 0))

    def _report(self, phase: str, step: int) -> None:
        if self.error is None:
            try:
                self._tell(phase, step, self._total.get(phase, step))
            except BaseException as error:  # noqa: BLE001 - raised again by `watch`'s caller, outside of the library
                self.error = error


def watch(library: Library, config: Any, tell: Tell) -> Progress:
    """Let an `IBuilderConfig` report to `tell`; keep the result for as long as the build goes on."""
    monitor: Progress = type("TensorRTProgress", (Progress, library.trt.IProgressMonitor), {})(tell)
    config.progress_monitor = monitor
    return monitor
