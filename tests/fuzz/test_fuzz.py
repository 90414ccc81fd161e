"""Every kind of file, options, requests: what is wrong in them is refused in one line, and nothing crashes or hangs.

The short run uses a few inputs, always the same, and all of the corpus. The long one (`-m slow`) uses 2,000 of each
kind in a process whose memory is limited; what it finds is kept in `corpus/KIND`.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.fuzz.child import MOST_MORE_BYTES
from tests.fuzz.kind import Kind, judge
from tests.fuzz.kinds import KINDS, prepare
from tests.fuzz.mutations import mutated, mutated_json
from tfexport.errors import InputError

CORPUS = Path(__file__).parent / "corpus"
FEW, MANY = 20, 2000


@pytest.fixture(scope="session")
def originals(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Make what is mutated; not to be changed."""
    return once("fuzz-originals", prepare)


@pytest.mark.parametrize("name", KINDS)
def test_a_few(name: str, originals: Path, tmp_path: Path) -> None:
    kind = KINDS[name](originals, tmp_path)

    @given(kind.examples)
    @settings(
        max_examples=FEW,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    def use(raw: bytes) -> None:
        judge(kind, raw)

    try:
        for path in sorted((CORPUS / name).glob("*")):
            judge(kind, path.read_bytes())
        use()
    finally:
        kind.close()


@pytest.mark.slow
def test_many(originals: Path, tmp_path: Path) -> None:
    arguments = [str(originals), str(tmp_path), str(MANY), os.environ.get("FUZZ_SEED", "0"), *KINDS]
    few_arenas = {**os.environ, "MALLOC_ARENA_MAX": "2"}  # each takes addresses that it does not use
    subprocess.run([sys.executable, "-m", "tests.fuzz.child", *arguments], cwd=ROOT, env=few_arenas, check=True)
    problems = []
    for name in KINDS:
        folder = tmp_path / name
        if (folder / "exit").read_text() != "0":
            raw = (folder / "current").read_bytes()[:50_000] if (folder / "current").exists() else b""
            said = (folder / "error").read_text(errors="replace")[-3000:]
            problems.append(f"{name} was killed by {base64.b64encode(raw).decode()}\n{said}")
            continue
        found = json.loads((folder / "report.json").read_text())
        print(name, found["counts"], f"slowest {found['slowest_s']:.2f} s, peak {found['peak_mb']:.0f} MB")
        problems += [f"{name} failed with {one['example']}\n{one['trace']}" for one in found["failures"]]
    assert not problems, "\n".join(problems)


def test_the_corpus_belongs_to_kinds() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(KINDS)
    assert all(list(path.iterdir()) for path in CORPUS.iterdir())


# The net itself


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


@given(raw=mutated(bytes(range(256)) * 4))
@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@example(b"")
def test_bytes_stay_of_bounded_size(raw: bytes) -> None:
    assert len(raw) <= 4 * 1024 + 3 * 5001


def test_mutations_reach_values_keys_and_places() -> None:
    document = {"a": {"b": [1, 2, {"c": "text"}]}, "d": None}
    found: set[bytes] = set()

    # So many, because what is drawn depends on which modules the process has loaded, in spite of derandomize.
    @given(mutated_json(document))
    @settings(max_examples=2000, deadline=None, database=None, derandomize=True)
    def draw(raw: bytes) -> None:
        found.add(raw)

    draw()
    whole = json.dumps(document, separators=(",", ":")).encode()
    for part in (b"1e999", b'"d":null,"d":null', b'{"d":null}', b'"c":["text"]', b"\\ud800"):
        assert any(part in raw for raw in found), part
    assert any(raw == whole for raw in found) or len(found) > 300


def test_an_input_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    program = (
        "import pathlib, tests.fuzz.child as child\n"
        "from tests.fuzz.kind import Kind\n"
        "from hypothesis import strategies as st\n"
        "child.KINDS = {'busy': lambda *_: Kind(st.just(b'1'), lambda raw: sum(range(10**12)))}\n"
        "child.MOST_CPU_S = 0.1\n"
        f"child.run(pathlib.Path('.'), 'busy', 1, 0, pathlib.Path({str(tmp_path)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGPROF, done.stderr
    assert "in <lambda>" in done.stderr
    assert (tmp_path / "current").read_bytes() == b"1"


def test_an_input_that_kills_is_told(tmp_path: Path, originals: Path) -> None:
    """Memory beyond the limit is refused to whoever asks for it."""
    program = (
        "import resource, tests.fuzz.child as child\n"
        "from tests.fuzz.kind import Kind\n"
        "from hypothesis import strategies as st\n"
        "child.KINDS = {'greedy': lambda *_: Kind(st.just(b'1'), lambda raw: bytearray(3 * 10**9))}\n"
        "import pathlib, json\n"
        f"found = child.run(pathlib.Path('.'), 'greedy', 1, 0, pathlib.Path({str(tmp_path)!r}))\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert MOST_MORE_BYTES < 3 * 10**9
    assert found["counts"] == {"failed": 1}
    assert "MemoryError" in found["failures"][0]["trace"]
