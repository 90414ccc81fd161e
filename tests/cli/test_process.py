"""What a shell does to a process: closed streams, broken pipes, signals, and names of every kind."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tfexport.bundle.bundle import open_bundle
from tfexport.cli import main

TFEXPORT = str(Path(sys.executable).with_name("tfexport"))
TINY = ("onnx", "preset:tiny", "--forms", "concat", "--max-source-length", "12", "--no-verify")


def shell(*arguments: object, redirect: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """Run tfexport from a shell that redirects its streams."""
    command = f"{shlex.join([TFEXPORT, *map(str, arguments)])} {redirect}"
    return subprocess.run(command, shell=True, capture_output=True, text=True, errors="surrogateescape", **options)


def one_line(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


@pytest.fixture
def copy(dates_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dates_bundle, tmp_path / "bundle"))


# ---- streams


def test_standard_input_that_is_closed(dates_bundle: Path) -> None:
    for more in ((), ("--input", "-")):
        done = shell("generate", dates_bundle, *more, redirect="<&-")
        one_line(done, "No text was given, and standard input is closed; add TEXT, or --input FILE.")
    assert shell("generate", dates_bundle, "3. März 2026", redirect="<&-").stdout == "2026-03-03\n"


@pytest.mark.parametrize("command", [("doctor",), ("--help",), (*TINY, "--output", "{}/out")])
def test_standard_output_that_is_closed_is_known_before_the_work(command: tuple[str, ...], tmp_path: Path) -> None:
    done = shell(*(word.format(tmp_path) for word in command), redirect=">&-")
    one_line(done, "standard output is closed; redirect it, for example to /dev/null")
    assert list(tmp_path.iterdir()) == []


def test_without_a_standard_error_the_exit_code_says_it(tmp_path: Path) -> None:
    assert shell("inspect", tmp_path / "nothing", redirect="2>&-").returncode == 1
    assert shell("inspect", tmp_path / "nothing", redirect="2>/dev/full").returncode == 1


def test_no_file_gets_the_number_of_a_stream() -> None:
    """Whatever a library writes to its standard error would go into the file."""
    program = "from tfexport.cli.process import check_streams; check_streams(); print(open('/dev/zero').fileno())"
    command = f"{sys.executable} -c {shlex.quote(program)} <&- 2>&-"
    assert int(subprocess.run(command, shell=True, capture_output=True, text=True).stdout) > 2


def test_a_pipe_whose_reader_has_gone(dates_bundle: Path) -> None:
    with subprocess.Popen(
        [TFEXPORT, "inspect", dates_bundle], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (1, "")


# ---- signals


@pytest.mark.parametrize(
    ("number", "is_there", "code", "said"),
    [(signal.SIGTERM, True, 143, "terminated"), (signal.SIGINT, False, 130, "interrupted")],
)
def test_a_signal_during_an_export(number: int, is_there: bool, code: int, said: str, copy: Path) -> None:
    before = open_bundle(copy)
    output = copy if is_there else copy.with_name("new")
    with subprocess.Popen(
        [TFEXPORT, *TINY, "--output", output, "--force"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if line.startswith("tracing"):
                break
        process.send_signal(number)
        stdout, stderr = process.communicate()
    told = f"{said}; {output} is {'as it was' if is_there else 'not written'}"
    assert (process.returncode, stdout, stderr.splitlines()[-1]) == (code, "", told)
    assert "Traceback" not in stderr
    assert open_bundle(copy) == before
    assert [path.name for path in copy.parent.iterdir()] == ["bundle"]


# ---- names


def test_names_of_250_bytes(copy: Path, dates_bundle: Path) -> None:
    bundle = copy.rename(copy.with_name("b" * 250))
    done = shell(*TINY, "--output", bundle, "--force")
    assert done.returncode == 0, done.stderr
    open_bundle(bundle)
    output = copy.with_name("o" * 250)
    assert shell("generate", dates_bundle, "3. März 2026", "--output", output).returncode == 0
    assert output.read_text().count("\n") == 1
    assert sorted(path.name for path in copy.parent.iterdir()) == [bundle.name, output.name]


# ---- places


@pytest.fixture
def read_only(copy: Path) -> Iterator[Path]:
    """A folder with a bundle that may be read and not written."""
    subprocess.run(["chmod", "-R", "a-w", copy.parent], check=True)
    yield copy.parent
    subprocess.run(["chmod", "-R", "u+w", copy.parent], check=True)


def without_privilege() -> None:
    """Let root, who may write everywhere, have to keep to permissions: CAP_DAC_OVERRIDE is gone with the next exec."""
    if os.geteuid() == 0:
        pr_capbset_drop, cap_dac_override = 24, 1
        assert ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override, 0, 0, 0) == 0


def test_a_folder_that_is_read_only(read_only: Path) -> None:
    done = shell(*TINY, "--output", read_only / "bundle", "--force", preexec_fn=without_privilege)
    assert done.returncode == 1
    assert f"error: cannot write bundle {read_only}/bundle: Permission denied" in done.stderr
    done = shell("generate", read_only / "bundle", "x", "--output", read_only / "out", preexec_fn=without_privilege)
    one_line(done, f"{read_only}/out: cannot be written (Permission denied); choose another place")
    assert [path.name for path in read_only.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("file/below", "cannot write bundle {}: "),
        ("to-file", "output {} is a file, expected a new directory; choose another name"),
    ],
)
def test_outputs_that_cannot_be(output: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "to-file").symlink_to("file")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = CliRunner().invoke(main, [*TINY, "--output", str(tmp_path / output), "--force"])
    assert (done.exit_code, done.stdout) == (1, ""), done.stderr
    *progress, error = done.stderr.splitlines()
    assert all(re.match("(loading|tracing|writing) ", line) for line in progress)
    assert message.format(tmp_path / output) in error
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_output_behind_a_link(copy: Path) -> None:
    (copy.parent / "current").symlink_to("bundle")
    done = shell(*TINY, "--output", copy.parent / "current", "--force")
    assert done.returncode == 0, done.stderr
    assert (copy.parent / "current").readlink() == Path("bundle")
    open_bundle(copy)
    assert sorted(path.name for path in copy.parent.iterdir()) == ["bundle", "current"]
