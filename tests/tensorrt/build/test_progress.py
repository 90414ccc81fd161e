"""How far a build is, and how what is raised on the way cancels it."""

from __future__ import annotations

from tfexport.tensorrt.build.progress import Monitor, Progress


def test_phases_that_lie_in_one_another_become_one_number() -> None:
    shown: list[float] = []
    progress = Progress(2, shown.append)
    progress.step("build", 0, 4)
    progress.step("build", 1, 4)
    assert shown[-1] == 1 / 8
    progress.step("inner", 0, 2)
    progress.step("inner", 1, 2)
    assert shown[-1] == (1 + 1 / 2) / 8
    progress.step("inner", 2, 2)
    progress.step("build", 2, 4)
    assert shown[-1] == 2 / 8
    progress.step("never begun", 3, 5)
    progress.step("build", 4, 4)
    assert shown[-1] == 1 / 2
    progress.finish_build()
    progress.step("build", 0, 0)
    progress.step("build", 1, 0)
    progress.finish_build()
    assert shown[-1] == 1
    assert shown == sorted(shown)


def test_the_library_is_told_to_stop_after_an_error_of_the_display() -> None:
    def fail(phase: str, step: int, total: int) -> None:
        raise KeyboardInterrupt

    broken, sound = Monitor(fail), Monitor(lambda phase, step, total: None)
    for monitor in (broken, sound):
        monitor.phase_start("building", None, 3)
    assert broken.step_complete("building", 0) is False
    assert sound.step_complete("building", 0) is True
    assert isinstance(broken.error, KeyboardInterrupt)
