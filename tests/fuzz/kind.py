"""One kind of input: what it is made of, what is done with it, and what may come of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import strategies as st

from tfexport.errors import TfexportError

Verdict = Literal["refused", "same", "other"]
MAX_MESSAGE = 30_000


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        examples: with something wrong in them.
        use: does with one what a user would, and returns what it holds; raises TfexportError where it is refused.
        original: what `use` returns for one with nothing wrong; None where there is none.
        is_summed: every byte is covered by a sum, so that nothing but the original may be taken.
        close: frees what `use` needs.
    """

    examples: st.SearchStrategy[bytes]
    use: Callable[[bytes], Any]
    original: Any = None
    is_summed: bool = False
    close: Callable[[], object] = lambda: None


def judge(kind: Kind, raw: bytes) -> Verdict:
    """Use an input.

    Raises:
        AssertionError: it was refused at length or in several lines, or taken for what it is not.
        BaseException: anything that is no TfexportError.
    """
    try:
        found = kind.use(raw)
    except TfexportError as error:
        _check_message(error)
        return "refused"
    if found == kind.original:
        return "same"
    assert not kind.is_summed, "another content was taken, though every byte has a sum"
    return "other"


def _check_message(error: TfexportError) -> None:
    message = str(error)
    assert message, f"{type(error).__name__} says nothing"
    assert "\n" not in message
    assert "Traceback" not in message
    assert len(message) <= MAX_MESSAGE, f"{len(message)} characters: {message[:300]}"
