"""Inspecting what a stranger has sent: the same answer as without a box, and an end to what asks for too much."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bundle.made import edit, make
from tests.conftest import DATES
from tfexport import sandbox
from tfexport.cli import main
from tfexport.describe import inspect_path
from tfexport.errors import BundleError, ConfigError, InputError
from tfexport.sandbox import inspect_untrusted


def as_json(value: object) -> object:
    return json.loads(json.dumps(value))


def test_the_answer_is_the_same(dates_bundle: Path, bundle_of_nothing: Path) -> None:
    for path in (dates_bundle, DATES, dates_bundle / "encoder.onnx", bundle_of_nothing):
        assert inspect_untrusted(path) == as_json(inspect_path(path))
    for options in ((), ("--json",)):
        plain, inside = (
            CliRunner().invoke(main, ["inspect", str(dates_bundle), *options, *more]) for more in ((), ("--untrusted",))
        )
        assert (inside.exit_code, inside.stdout) == (0, plain.stdout)


@pytest.fixture
def bundle_of_nothing(tmp_path: Path) -> Path:
    """Return a bundle with a name that is not ASCII, so that the way to the process is tried."""
    return make(tmp_path / "café").path


def test_an_error_is_the_same(tmp_path: Path) -> None:
    make(tmp_path / "bundle")
    edit(tmp_path / "bundle", lambda data: data.update(kind="encoder"))
    for path, kind in ((tmp_path / "bundle", BundleError), (tmp_path / "none", InputError), ("a\0b", ConfigError)):
        with pytest.raises(kind) as plain:
            inspect_path(path)
        with pytest.raises(kind) as inside:
            inspect_untrusted(path)
        assert str(inside.value) == str(plain.value)
    done = CliRunner().invoke(main, ["inspect", "--untrusted", str(tmp_path / "bundle")])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)


LIMITED = """
import os, resource, sys
from tfexport.sandbox import MAX_CPU_S, MAX_MEMORY_BYTES, limit

limit()
assert resource.getrlimit(resource.RLIMIT_CPU) == (MAX_CPU_S, MAX_CPU_S)
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
try:
    bytearray(MAX_MEMORY_BYTES)
except MemoryError:
    print("no memory")
try:
    with open(sys.argv[1], "wb") as file:
        file.write(b"x")
except OSError as error:
    print(error.strerror)
try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
except ValueError as error:
    print(error)
"""


def test_the_process_has_little_memory_and_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[:2] == ["no memory", "File too large"]
    assert len(printed) == 3 or os.geteuid() == 0, "root may raise its limits again"
    assert (tmp_path / "out").stat().st_size == 0


def test_a_process_that_dies_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends it: here an interpreter that does nothing else."""
    interpreter = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(interpreter))
    for script, message in (
        ("kill -XCPU $$", "reading it takes more than 300 s of CPU time; do not load it"),
        ("kill -SEGV $$", "reading it was ended by signal 11; do not load it"),
        ("echo 'ValueError: odd' >&2; exit 1", r"reading it failed \(ValueError: odd\); do not load it"),
        ("exit 3", r"reading it failed \(no reason given\)"),
    ):
        interpreter.write_text(f"#!/bin/sh\n{script}\n")
        interpreter.chmod(0o755)
        with pytest.raises(InputError, match=f"^x: {message}"):
            inspect_untrusted("x")


@pytest.mark.slow
def test_a_graph_larger_than_the_memory_is_one_line(tmp_path: Path) -> None:
    make(tmp_path / "bundle")
    size = sandbox.MAX_MEMORY_BYTES + 1
    os.truncate(tmp_path / "bundle" / "decoder.onnx", size)
    digest = subprocess.run(
        ["sha256sum", tmp_path / "bundle" / "decoder.onnx"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    edit(tmp_path / "bundle", lambda data: data["files"].update({"decoder.onnx": {"bytes": size, "sha256": digest}}))
    with pytest.raises(InputError, match="needs more than 2147483648 bytes of memory to be read; do not load it"):
        inspect_untrusted(tmp_path / "bundle")
    shutil.rmtree(tmp_path / "bundle")
