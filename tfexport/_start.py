"""The entry point of the command `tfexport`."""

import signal


def main() -> None:
    """Run the command line.

    Ctrl-C while its modules are imported ends the process at once, without a trace.
    """
    if is_usual := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tfexport.cli import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
