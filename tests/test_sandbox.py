"""Inspecting untrusted input in a subprocess gives the same results and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bundle.made import edit, make
from tests.command import refuses, run
from tests.conftest import DATES
from tfexport import sandbox
from tfexport._io.process import ProcessError
from tfexport.describe import inspect_path
from tfexport.errors import BackendError, BundleError, ConfigError, InputError
from tfexport.sandbox import inspect_untrusted


def test_the_answer_is_the_same(dates_bundle: Path, tmp_path: Path) -> None:
    for path in (dates_bundle, DATES, dates_bundle / "encoder.onnx", make(tmp_path / "café").path):
        assert inspect_untrusted(path) == json.loads(json.dumps(inspect_path(path)))
    for options in ((), ("--json",)):
        plain, inside = (run("inspect", dates_bundle, *options, *more) for more in ((), ("--untrusted",)))
        assert (inside.exit_code, inside.stdout) == (0, plain.stdout)


def test_an_error_is_the_same(tmp_path: Path) -> None:
    make(tmp_path / "bundle")
    edit(tmp_path / "bundle", lambda data: data.update(kind="encoder"))
    for path, kind in ((tmp_path / "bundle", BundleError), (tmp_path / "none", InputError), ("a\0b", ConfigError)):
        with pytest.raises(kind) as plain:
            inspect_path(path)
        with pytest.raises(kind) as inside:
            inspect_untrusted(path)
        assert str(inside.value) == str(plain.value)
    refuses(run("inspect", "--untrusted", tmp_path / "bundle"))


def test_a_process_that_dies_is_one_line(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> None:
        raise ProcessError("was ended by signal 11")

    monkeypatch.setattr(sandbox, "call_in_process", die)
    with pytest.raises(InputError, match=r": reading it was ended by signal 11; do not load it$"):
        inspect_untrusted(dates_bundle)


def test_without_a_limit_of_memory_nothing_is_read(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows and macOS."""
    monkeypatch.setattr(sandbox, "LIMITS_MEMORY", False)
    monkeypatch.setattr(sandbox, "call_in_process", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(BackendError):
        inspect_untrusted(dates_bundle)
