"""Functions in a subprocess with limits: results and errors come back, and whatever ends the process is a reason."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tfexport._io.process import ProcessError, call_in_process
from tfexport.errors import BundleError, TfexportError

MEMORY = 2**30


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the subprocess, which does not search the working directory, import this module."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def echo(*values: object) -> object:
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def refuse() -> None:
    raise BundleError("a", "b", subject="s", remedy="r")


def allocate() -> None:
    bytearray(2 * MEMORY)


def write(path: str) -> str:
    try:
        Path(path).write_bytes(b"x")
    except OSError as error:
        return str(error.strerror)
    return "written"


def end(number: int) -> None:
    os.kill(os.getpid(), number)


def fail() -> None:
    raise ValueError("odd")


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(60)


def call(function: object, *arguments: object, memory_bytes: int | None = MEMORY, **options: object) -> object:
    name = f"{__name__}:{function.__name__}"  # type: ignore[attr-defined]
    limits = {"wall_s": 60.0, "cpu_s": 20, "memory_bytes": memory_bytes} | options
    return call_in_process(name, *arguments, **limits)  # type: ignore[arg-type]


def test_the_result_comes_back() -> None:
    assert call(echo, 1, "ä", None, data=b"raw") == [1, "ä", None, "raw"]


def test_an_error_comes_back_with_its_parts() -> None:
    with pytest.raises(TfexportError) as caught:
        call(refuse)
    assert type(caught.value) is BundleError
    assert (caught.value.subject, caught.value.problems, caught.value.remedy) == ("s", ("a", "b"), "r")


@pytest.mark.parametrize(
    ("function", "arguments", "options", "reason"),
    [
        (allocate, (), {}, rf"^needs more than {MEMORY} bytes of memory$"),
        (spin, (), {"cpu_s": 1}, r"^takes more than 1 s of CPU time$"),
        (sleep, (), {"wall_s": 0.5}, r"^takes more than 0.5 s$"),
        (end, (signal.SIGSEGV,), {}, r"^was ended by signal 11$"),
        (fail, (), {}, r"^failed \(ValueError: odd\)$"),
    ],
)
def test_the_error_gives_the_cause_of_the_end_of_the_process(
    function: object, arguments: tuple[object, ...], options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ProcessError, match=reason):
        call(function, *arguments, **options)


def test_with_a_limit_of_memory_nothing_is_written(tmp_path: Path) -> None:
    assert call(write, str(tmp_path / "a")) == "File too large"
    assert (tmp_path / "a").stat().st_size == 0
    assert call(write, str(tmp_path / "b"), memory_bytes=None) == "written"
