"""The progress of a build, and its cancellation by an exception."""

from __future__ import annotations

from tfexport.tensorrt.build.builder import Monitor


def test_nested_phases_become_one_number_that_never_falls() -> None:
    shown: list[float] = []
    monitor = Monitor(shown.append)
    monitor.phase_start("build", None, 4)
    monitor.step_complete("build", 0)
    assert shown[-1] == 1 / 4
    monitor.phase_start("inner", "build", 2)
    monitor.step_complete("inner", 0)
    assert shown[-1] == (1 + 1 / 2) / 4
    monitor.phase_finish("inner")
    monitor.step_complete("build", 1)
    assert shown[-1] == 2 / 4
    monitor.step_complete("never begun", 3)
    monitor.phase_start("empty", "build", 0)
    monitor.step_complete("empty", 0)
    monitor.step_complete("build", 3)
    assert shown[-1] == 1
    assert shown == sorted(shown)


def test_an_exception_stops_the_build() -> None:
    def fail(part: float) -> None:
        raise KeyboardInterrupt

    broken, sound = Monitor(fail), Monitor(lambda part: None)
    for monitor in (broken, sound):
        monitor.phase_start("building", None, 3)
    assert broken.step_complete("building", 0) is False
    assert sound.step_complete("building", 0) is True
    assert isinstance(broken.error, KeyboardInterrupt)
