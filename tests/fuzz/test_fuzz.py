"""Every kind of file, options, requests: what is wrong in them is refused in one line, and nothing crashes or hangs.

The short run uses a few inputs, always the same, and all of the corpus. The long one (`-m slow`) uses 2,000 of each
kind; what it finds is kept in `corpus/KIND`.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.kind import Kind, judge
from tests.fuzz.kinds import KINDS, prepare
from tfexport.errors import InputError

CORPUS = Path(__file__).parent / "corpus"
FEW, MANY = 20, 2000
MOST_MORE_BYTES, MOST_CPU_S = 10**9, 30


@pytest.fixture(scope="session")
def originals(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Make what is mutated; not to be changed."""
    return once("fuzz-originals", prepare)


def peak_bytes() -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def use_many(name: str, originals: Path, scratch: Path, count: int) -> None:
    """Use all of the corpus and so many inputs; each is refused or taken within limits of time and memory."""
    kind = KINDS[name](originals, scratch)
    before = peak_bytes()

    def use(raw: bytes) -> None:
        started = time.process_time()
        try:
            judge(kind, raw)
        except BaseException as error:  # a panic of a library is no Exception
            error.add_note(f"input in base 64: {base64.b64encode(raw).decode()[:50_000]}")
            raise
        assert time.process_time() - started < MOST_CPU_S
        assert peak_bytes() - before < MOST_MORE_BYTES

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
        seed(0)(drawn)()
    finally:
        kind.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_few(name: str, originals: Path, tmp_path: Path) -> None:
    use_many(name, originals, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many(name: str, originals: Path, tmp_path: Path) -> None:
    use_many(name, originals, tmp_path, MANY)


def test_the_corpus_belongs_to_kinds() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(KINDS)


def test_the_net_sees_what_is_wrong() -> None:
    def kind_of(use: Callable[[bytes], object], *, is_summed: bool = False) -> Kind:
        return Kind(st.binary(), use, b"original", is_summed)

    def refuse(raw: bytes) -> None:
        raise InputError(raw.decode())

    same = kind_of(bytes, is_summed=True)
    assert judge(same, b"original") == "same"
    with pytest.raises(AssertionError, match="another content was taken"):
        judge(same, b"other")
    assert judge(kind_of(bytes), b"other") == "other"
    assert judge(kind_of(refuse), b"no such text") == "refused"
    for message in (b"", b"Traceback (most recent call last)", b"x" * 40_000):
        with pytest.raises(AssertionError):
            judge(kind_of(refuse), message)
    with pytest.raises(ValueError, match="invalid literal"):
        judge(kind_of(int), b"x")
