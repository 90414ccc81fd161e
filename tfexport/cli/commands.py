"""The group of all commands, which turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

import click

from tfexport._io.extras import install_command
from tfexport.cli.process import EXIT_TERMINATED, Terminated, check_streams, terminable
from tfexport.errors import ParityError, TfexportError, printable

EXIT_ERROR, EXIT_PARITY, EXIT_INTERRUPTED = 1, 2, 130
# `tfexport` without a command shows its help; before click 8.2 that was not an error.
_NO_COMMAND: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


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
            _tell(f"error: {error}")
            code = EXIT_PARITY if isinstance(error, ParityError) else EXIT_ERROR
        except ModuleNotFoundError as error:
            command = install_command((error.name or "").partition(".")[0])
            if not command:
                raise
            _tell(f"error: this needs {error.name}, which is not installed; {command}")
            code = EXIT_ERROR
        except click.ClickException as error:
            if isinstance(error, _NO_COMMAND):
                error.show()
            else:
                _tell(f"error: {_one_line(error)}")
            code = EXIT_ERROR
        except OSError as error:
            if not (_was_printing(error) or _stdout_fails()):
                raise
            # Otherwise flushing the buffer at exit would fail again, with a trace.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _tell(f"error: standard output cannot be written: {error.strerror}; redirect it elsewhere")
            code = EXIT_ERROR
        except (click.Abort, KeyboardInterrupt) as error:
            _tell(_with_notes("interrupted", error.__cause__ or error))
            code = EXIT_INTERRUPTED
        except Terminated as error:
            _tell(_with_notes("terminated", error))
            code = EXIT_TERMINATED
        sys.exit(code)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name, which may be two words."""
        two = " ".join(args[:2])
        return (two, self.commands[two], args[2:]) if two in self.commands else super().resolve_command(ctx, args)


def _tell(line: str) -> None:
    """Write a line to standard error, or do nothing if that fails."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def _with_notes(what: str, error: BaseException) -> str:
    return printable("; ".join([what, *getattr(error, "__notes__", ())]))


def _was_printing(error: OSError) -> bool:
    """Return whether click raised the error while printing without a buffer."""
    frames = traceback.walk_tb(error.__traceback__)
    return [frame.f_globals.get("__name__") for frame, _ in frames][-1] == "click.utils"


def _stdout_fails() -> bool:
    """Return whether buffered data cannot be written to standard output."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _one_line(error: click.ClickException) -> str:
    """Format a usage error with a hint to the help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    advice = f" See {context.command_path} --help." if context else ""
    return printable(" ".join(error.format_message().split()) + advice)
