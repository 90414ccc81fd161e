"""The group of all commands: the one place where an error becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from tfexport.errors import ParityError, TfexportError, printable
from tfexport.install import install_command

EXIT_ERROR, EXIT_PARITY, EXIT_INTERRUPTED = 1, 2, 130
# `tfexport` alone shows its help; before click 8.2 that is no error.
_NO_COMMAND: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


class Commands(click.Group):
    """All commands, and the one place where an error becomes one line and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit: 0, 1 for an error, 2 when parity fails and for nothing else, 130 on Ctrl-C."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except TfexportError as error:
            click.echo(f"error: {error}", err=True)
            code = EXIT_PARITY if isinstance(error, ParityError) else EXIT_ERROR
        except ModuleNotFoundError as error:
            command = install_command((error.name or "").partition(".")[0])
            if not command:
                raise
            click.echo(f"error: this needs {error.name}, which is not installed; {command}", err=True)
            code = EXIT_ERROR
        except click.ClickException as error:
            if isinstance(error, _NO_COMMAND):
                error.show()
            else:
                click.echo(f"error: {_one_line(error)}", err=True)
            code = EXIT_ERROR
        except OSError as error:
            if error.filename is not None:
                raise
            # What is left in the buffer would fail once more, with a trace, when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(f"error: standard output cannot be written: {error.strerror}; redirect it elsewhere", err=True)
            code = EXIT_ERROR
        except click.Abort:
            click.echo("interrupted", err=True)
            code = EXIT_INTERRUPTED
        sys.exit(code)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name, which may be two words."""
        two = " ".join(args[:2])
        return (two, self.commands[two], args[2:]) if two in self.commands else super().resolve_command(ctx, args)


def _one_line(error: click.ClickException) -> str:
    """Spell wrong usage, and where the right one is written."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    advice = f" See {context.command_path} --help." if context else ""
    return printable(" ".join(error.format_message().split()) + advice)
