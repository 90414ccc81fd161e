"""Ctrl-C during a build: held back where it would be lost, and raised afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tfexport.trt.build.interrupt import interruptible


def test_ctrl_c_is_held_back_and_not_lost() -> None:
    """Where the library calls back, an exception would be printed and forgotten."""
    reached = False
    with pytest.raises(KeyboardInterrupt), interruptible() as check:
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
        check()
        pytest.fail("not raised")
    assert reached
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_gets_no_signals() -> None:
    done = []

    def work() -> None:
        with interruptible() as check:
            check()
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
