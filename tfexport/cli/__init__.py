"""Define the command line; each command makes one call into the library."""

from tfexport.cli import generate, make, score, serve, tools  # noqa: F401 - they add their commands
from tfexport.cli.commands import main

__all__ = ["main"]
