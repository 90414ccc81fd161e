"""Run `tfexport` in this process, and check how it reports an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

from click.testing import CliRunner, Result

from tfexport.cli import main

TFEXPORT = str(Path(sys.executable).with_name("tfexport"))
PROGRESS = re.compile(
    "(loading|tracing|calibrating|writing|verifying|comparing|decoding|measuring|names|layout|searching)\\b"
)


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def ran(*arguments: object, code: int = 0) -> Result:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    return result


def refuses(result: Result | CompletedProcess[str], *messages: str) -> None:
    """Expect exit code 1, no output and, after lines of progress, one short error line with every message."""
    *progress, error = result.stderr.splitlines()
    code = result.returncode if isinstance(result, CompletedProcess) else result.exit_code
    assert (code, result.stdout or "") == (1, ""), result
    assert all(PROGRESS.match(line) for line in progress), result.stderr
    assert error.startswith("error: ")
    assert error.isprintable()
    assert len(error) < 2500
    for message in messages:
        assert message in error
