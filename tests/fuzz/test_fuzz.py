"""Damaged files, options and requests are refused in one line, and nothing crashes or hangs.

The short run uses a few inputs of each kind, always the same, and the corpus. The long one (`-m slow`) uses 2,000; add
inputs that fail to `corpus/KIND`.
"""

from __future__ import annotations

import base64
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.kinds import KINDS, Kind, prepare
from tfexport.errors import InputError, TfexportError

CORPUS = Path(__file__).parent / "corpus"
MAX_BYTES, MAX_CPU_S, MAX_MESSAGE = 10**9, 30, 30_000


@pytest.fixture(scope="session")
def originals(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Write what is changed; read-only."""
    return once("fuzz-originals", prepare)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def judge(kind: Kind, raw: bytes) -> None:
    """Use an input; fail if it is refused in more than one short line, or accepted with other content."""
    try:
        found = kind.use(raw)
    except TfexportError as error:
        message = str(error)
        assert "Traceback" not in message
        assert 0 < len(message) <= MAX_MESSAGE, message[:300]
    else:
        assert not kind.is_summed or found == kind.original, "another content was accepted, despite its checksums"


@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_damaged_input_is_refused(name: str, count: int, originals: Path, tmp_path: Path) -> None:
    kind = KINDS[name](originals, tmp_path)
    before = peak_bytes()

    def use(raw: bytes) -> None:
        started = time.process_time()
        try:
            judge(kind, raw)
        except BaseException as error:  # a panic of a library is not an Exception
            error.add_note(f"input in base 64: {base64.b64encode(raw).decode()[:50_000]}")
            raise
        assert time.process_time() - started < MAX_CPU_S
        assert peak_bytes() - before < MAX_BYTES

    drawn = settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )(given(kind.examples)(use))
    try:
        for path in sorted((CORPUS / name).glob("*")):
            use(path.read_bytes())
        seed(int(os.environ.get("FUZZ_SEED", "0")))(drawn)()
    finally:
        kind.close()


def test_the_corpus_belongs_to_kinds() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(KINDS)


def test_the_judge_finds_wrong_results() -> None:
    def refuse(raw: bytes) -> None:
        raise InputError(raw.decode())

    same, refused = Kind(st.binary(), bytes, b"original", is_summed=True), Kind(st.binary(), refuse)
    judge(same, b"original")
    judge(refused, b"no such text")
    judge(Kind(st.binary(), bytes, b"original"), b"other")
    with pytest.raises(AssertionError, match="another content was accepted"):
        judge(same, b"other")
    for message in (b"", b"Traceback (most recent call last)", b"x" * 40_000):
        with pytest.raises(AssertionError):
            judge(refused, message)
    with pytest.raises(ValueError, match="invalid literal"):
        judge(Kind(st.binary(), int), b"x")
