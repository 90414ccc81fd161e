"""Run `tfexport` in this process, and check how it reports an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from tfexport.cli import main

TFEXPORT = str(Path(sys.executable).with_name("tfexport"))
PROGRESS = re.compile("(loading|tracing|writing|verifying|comparing|decoding|measuring|names|layout|searching)\\b")


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def ran(*arguments: object, code: int = 0) -> Result:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    return result


def says_error(code: int, stdout: str, stderr: str, *messages: str) -> None:
    """Expect exit code 1, no output and, after lines of progress, one short line of error with every message in it."""
    *progress, error = stderr.splitlines()
    assert (code, stdout) == (1, ""), stdout + stderr
    assert all(PROGRESS.match(line) for line in progress), stderr
    assert error.startswith("error: ")
    assert error.isprintable()
    assert len(error) < 2500
    for message in messages:
        assert message in error


def refuses(result: Result, *messages: str) -> None:
    says_error(result.exit_code, result.stdout, result.stderr, *messages)
