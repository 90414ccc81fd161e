"""The group of all commands, which handles streams, signals and errors."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from tfexport._io.extras import install_command
from tfexport.errors import ParityError, TfexportError, printable

EXIT_ERROR, EXIT_PARITY, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
# `tfexport` without a command shows its help; before click 8.2 that was not an error.
_NO_COMMAND: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
_FORMER = {"golden": "reference", "form": "variant", "forms": "variants"}  # earlier names of options


class Commands(click.Group):
    """The group of all commands, which turns errors into one line and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit.

        The code is 0, 1 for an error, 2 only if compared outputs differ, 3 if rows of the written file have errors,
        130 on Ctrl-C and 143 on SIGTERM.
        """
        try:
            check_streams()
            with terminable():
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except TfexportError as error:
            _print_error(f"error: {error}")
            code = EXIT_PARITY if isinstance(error, ParityError) else EXIT_ERROR
        except ModuleNotFoundError as error:
            command = install_command((error.name or "").partition(".")[0])
            if not command:
                raise
            _print_error(f"error: this needs {error.name}, which is not installed; {command}")
            code = EXIT_ERROR
        except click.ClickException as error:
            if isinstance(error, _NO_COMMAND):
                error.show()
            else:
                _print_error(f"error: {_one_line(error)}")
            code = EXIT_ERROR
        except OSError as error:
            if not (_was_printing(error) or _stdout_fails()):
                raise
            # Flushing the buffer at exit would fail again, with a trace.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _print_error(f"error: standard output cannot be written: {error.strerror}; redirect it elsewhere")
            code = EXIT_ERROR
        except (click.Abort, KeyboardInterrupt) as error:
            _print_error(_with_notes("interrupted", error.__cause__ or error))
            code = EXIT_INTERRUPTED
        except Terminated as error:
            _print_error(_with_notes("terminated", error))
            code = EXIT_TERMINATED
        sys.exit(code)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find a command by its name, which may be two words."""
        name = " ".join(args[:2])
        return (name, self.commands[name], args[2:]) if name in self.commands else super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    context_settings={
        "show_default": True,
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: _FORMER.get(name, name),
    },
)
@click.version_option(package_name="tfexport")
def main() -> None:
    """Take a from-scratch encoder-decoder transformer from PyTorch to production."""


def _print_error(line: str) -> None:
    with suppress(OSError):
        click.echo(line, err=True)


def _with_notes(what: str, error: BaseException) -> str:
    return printable("; ".join([what, *getattr(error, "__notes__", ())]))


def _was_printing(error: OSError) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == "click.utils"


def _stdout_fails() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _one_line(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    message = " ".join(error.format_message().split()).rstrip(".")
    return printable(f"{message}; see {context.command_path} --help" if context else message)


class Terminated(SystemExit):
    """Raised in the main thread on SIGTERM."""


def check_streams() -> None:
    """Replace closed standard streams by /dev/null; raises if it is standard output.

    Otherwise a file would get the number of a closed stream, and libraries would write their messages into it. Texts
    are written in UTF-8, as they are read; otherwise Windows writes files in the code page of the machine.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:  # Python's value for a closed stream
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for as long as the process runs
    if sys.stdout is None:
        raise click.ClickException("standard output is closed; redirect it, for example to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=stream.errors)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, unless SIGTERM has a handler already."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # do not interrupt the cleanup
        raise Terminated(EXIT_TERMINATED)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def reports_whether_written(output: Path) -> Iterator[None]:
    """On Ctrl-C and SIGTERM, note whether the directory `output` was written."""
    before = _content(output)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        unchanged = "unchanged" if before else "not written"
        stop.add_note(f"{output} is {unchanged if _content(output) == before else 'complete'}")
        raise


def _content(folder: Path) -> frozenset[tuple[str, int]]:
    try:
        return frozenset((entry.name, entry.inode()) for entry in os.scandir(folder) if not entry.name.startswith("."))
    except OSError:
        return frozenset()
