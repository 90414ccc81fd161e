"""Ctrl-C and SIGTERM: held back where they would be lost or do harm, and raised afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tfexport._io.atomic import interrupts_held


class Ended(BaseException):
    """What the handler of SIGTERM raises."""


@pytest.fixture
def _terminable() -> Iterator[None]:
    def end(_number: int, _frame: object) -> None:
        raise Ended

    former = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.mark.usefixtures("_terminable")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Ended)])
def test_a_signal_is_held_back_and_not_lost(number: signal.Signals, error: type[BaseException]) -> None:
    """Where a library calls back, an exception would be printed and forgotten."""
    reached = False
    handler = signal.getsignal(number)
    with pytest.raises(error), interrupts_held() as check:
        os.kill(os.getpid(), number)
        reached = True
        check()
        pytest.fail("not raised")
    assert reached
    with pytest.raises(error), interrupts_held():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is handler


def test_blocks_inside_one_another_wait_for_the_last() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
        reached = True
    assert reached


def test_a_signal_that_ends_the_process_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_gets_no_signals() -> None:
    done = []

    def work() -> None:
        with interrupts_held() as check:
            check()
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
