"""What a shell does to a process: closed streams, broken pipes, signals, and names of every kind."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.command import TFEXPORT, refuses
from tfexport.bundle.bundle import open_bundle

TINY = ("onnx", "preset:tiny", "--variants", "concat", "--max-source-length", "12", "--no-verify")


def shell(*arguments: object, redirect: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """Run tfexport from a shell that redirects its streams."""
    command = f"{shlex.join([TFEXPORT, *map(str, arguments)])} {redirect}"
    return subprocess.run(command, shell=True, capture_output=True, text=True, errors="surrogateescape", **options)


@pytest.fixture
def copy(dates_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dates_bundle, tmp_path / "bundle"))


# ---- streams


def test_standard_input_that_is_closed(dates_bundle: Path) -> None:
    for more in ((), ("--input", "-")):
        done = shell("generate", dates_bundle, *more, redirect="<&-")
        refuses(done, "No text was given, and standard input is closed; add TEXT, or --input FILE")
    assert shell("generate", dates_bundle, "3. März 2026", redirect="<&-").stdout == "2026-03-03\n"


@pytest.mark.parametrize("command", [("doctor",), ("--help",), (*TINY, "--output", "{}/out")])
def test_closed_standard_output_is_reported_before_any_work(command: tuple[str, ...], tmp_path: Path) -> None:
    done = shell(*(word.format(tmp_path) for word in command), redirect=">&-")
    refuses(done, "standard output is closed; redirect it, for example to /dev/null")
    assert list(tmp_path.iterdir()) == []


def test_without_standard_error_the_exit_status_shows_the_failure(tmp_path: Path) -> None:
    assert shell("inspect", tmp_path / "nothing", redirect="2>&-").returncode == 1
    assert shell("inspect", tmp_path / "nothing", redirect="2>/dev/full").returncode == 1


def test_no_file_gets_the_descriptor_of_a_standard_stream() -> None:
    """Whatever a library writes to its standard error would go into the file."""
    program = "from tfexport.cli.commands import check_streams; check_streams(); print(open('/dev/zero').fileno())"
    command = f"{sys.executable} -c {shlex.quote(program)} <&- 2>&-"
    assert int(subprocess.run(command, shell=True, capture_output=True, text=True).stdout) > 2


def test_a_pipe_whose_reader_has_gone(dates_bundle: Path) -> None:
    with subprocess.Popen([TFEXPORT, "inspect", dates_bundle], stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        printed = process.stderr.read()
    assert (process.returncode, printed) == (1, "")


# ---- signals


@pytest.mark.parametrize(
    ("number", "is_there", "code", "message"),
    [(signal.SIGTERM, True, 143, "terminated"), (signal.SIGINT, False, 130, "interrupted")],
)
def test_a_signal_during_an_export(number: int, is_there: bool, code: int, message: str, copy: Path) -> None:
    before = open_bundle(copy)
    output = copy if is_there else copy.with_name("new")
    command = [TFEXPORT, *TINY, "--output", output, "--force"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if line.startswith("tracing"):
                break
        process.send_signal(number)
        stdout, stderr = process.communicate()
    expected = f"{message}; {output} is {'unchanged' if is_there else 'not written'}"
    assert (process.returncode, stdout, stderr.splitlines()[-1]) == (code, "", expected)
    assert "Traceback" not in stderr
    assert open_bundle(copy) == before
    assert [path.name for path in copy.parent.iterdir()] == ["bundle"]


def test_ctrl_c_while_modules_are_imported() -> None:
    code = "from tfexport._start import main; main()"
    command = [sys.executable, "-X", "importtime", "-c", code, "doctor"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if line.endswith(" click.core\n"):
                break
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in stderr


# ---- names and places


def without_privilege() -> None:
    """Make root, who may write everywhere, subject to permissions: drop CAP_DAC_OVERRIDE with the next exec."""
    if os.geteuid() == 0:
        pr_capbset_drop, cap_dac_override = 24, 1
        assert ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override, 0, 0, 0) == 0


def test_a_folder_that_is_read_only(dates_bundle: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        done = shell("generate", dates_bundle, "x", "--output", tmp_path / "out", preexec_fn=without_privilege)
    finally:
        tmp_path.chmod(0o755)
    refuses(done, "out: cannot be written (Permission denied); choose another")
    assert not list(tmp_path.iterdir())
