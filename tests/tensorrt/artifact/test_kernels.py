"""Stored kernels are read if everything fits and compiled again otherwise, never an error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tensorrt.artifact.stored import L4, flip
from tfexport._io import atomic
from tfexport.tensorrt import _kernels as kernels
from tfexport.tensorrt._kernels import RuntimeCacheStore

SUMS = {"encoder": "1" * 64, "decoder_static": "2" * 64}
COMPILED = {"encoder": b"kernels of the encoder", "decoder_static": bytes(range(256)) * 99}
HERE = "1.7.1.116-NVIDIA-L4-13.0"


def store(engine: Path, version: str = "1.7.1.116", gpu: str = L4.name, driver: str = "13.0") -> RuntimeCacheStore:
    return RuntimeCacheStore(engine, SUMS, version, replace(L4, name=gpu, driver_version=driver))


def read_all(found: RuntimeCacheStore) -> dict[str, bytes | None]:
    return {plan: found.read(plan) for plan in SUMS}


NOTHING = dict.fromkeys(SUMS)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    store(tmp_path).write(COMPILED)
    return tmp_path


def test_another_process_reads_stored_kernels(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_all(store(engine)) == COMPILED
    assert sorted(path.name for path in (engine / "kernels").iterdir()) == [HERE]
    files = sorted(path.name for path in (engine / "kernels" / HERE).iterdir())
    assert files == ["decoder_static.kernels", "encoder.kernels", "kernels.json"]
    assert not caplog.records


def test_kernels_of_other_plans_stay(engine: Path) -> None:
    store(engine).write({"encoder": b"more"})
    assert read_all(store(engine)) == {**COMPILED, "encoder": b"more"}


def test_known_kernels_are_not_written_again(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "publish", lambda *_: pytest.fail("written again"))
    store(engine).write(COMPILED)
    store(engine).write({"encoder": COMPILED["encoder"]})


@pytest.mark.parametrize("other", [{"version": "1.8.0.1"}, {"gpu": "NVIDIA L40"}, {"driver": "13.1"}])
def test_another_gpu_driver_or_library_has_kernels_of_its_own(engine: Path, other: dict[str, str]) -> None:
    theirs = store(engine, **other)
    assert read_all(theirs) == NOTHING
    theirs.write({"encoder": b"theirs"})
    assert theirs.read("encoder") == b"theirs"
    assert read_all(store(engine)) == COMPILED


@pytest.mark.parametrize("other", [{"version": "1.8.0.1"}, {"gpu": "NVIDIA-L4"}, {"driver": "13.1"}])
def test_a_folder_name_is_not_trusted(engine: Path, other: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """The folder was renamed, or the name of another GPU gives the same one."""
    theirs = store(engine, **other)
    os.replace(engine / "kernels" / HERE, theirs._folder)
    assert read_all(theirs) == NOTHING
    assert not caplog.records, "they are complete, but of another machine"


def test_kernels_of_an_older_plan_are_dropped(engine: Path) -> None:
    rebuilt = RuntimeCacheStore(engine, {**SUMS, "encoder": "3" * 64}, "1.7.1.116", L4)
    assert read_all(rebuilt) == {**COMPILED, "encoder": None}
    rebuilt.write({"encoder": b"new"})
    assert read_all(rebuilt) == {**COMPILED, "encoder": b"new"}
    assert read_all(store(engine)) == {**COMPILED, "encoder": None}


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.rename(path.with_name("moved"))
    make(path)


DECODER, INDEX = "decoder_static.kernels", "kernels.json"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: flip(f / DECODER), "decoder_static.kernels was changed (its sha256 differs)"),
        (lambda f: os.truncate(f / DECODER, 25345), "has 25345 bytes, expected at most 25344"),
        (lambda f: replaced(f / DECODER, lambda path: path.symlink_to("moved")), "symbolic links"),
        (lambda f: replaced(f / DECODER, os.mkfifo), "is neither a file nor a directory, expected a plain file"),
        (lambda f: replace_bytes(f / INDEX, b'"13.0"', b'"13.1"'), "kernels.json was changed"),
        (lambda f: os.truncate(f / INDEX, 5 << 20), "kernels.json has 5242880 bytes, expected at most 4194304"),
        (lambda f: replaced(f, lambda path: path.symlink_to("moved")), "ot a directory"),
    ],
)
def test_damage_is_reported_once_and_kernels_are_compiled_again(
    engine: Path, damage: Callable[[Path], object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(engine / "kernels" / HERE)
    found = store(engine)
    for _ in range(2):
        assert found.read("decoder_static") is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()
    assert "kernels are compiled again" in record.getMessage()


@pytest.mark.parametrize("name", [DECODER, INDEX])
def test_damaged_kernels_are_replaced(engine: Path, name: str) -> None:
    flip(engine / "kernels" / HERE / name)
    store(engine).write(COMPILED)
    assert read_all(store(engine)) == COMPILED


def test_huge_kernels_are_neither_read_nor_stored(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "MAX_BYTES", 100)
    assert read_all(store(engine)) == {**COMPILED, "decoder_static": None}
    assert "decoder_static.kernels has 25344 bytes, the limit is 100" in caplog.text
    store(engine).write({"encoder": b"short", "decoder_static": b"x" * 101})
    assert read_all(store(engine)) == {"encoder": b"short", "decoder_static": None}


def test_kernels_are_not_stored_in_a_read_only_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plain file has the name of the folder, because root may write everywhere."""
    (tmp_path / "kernels").write_text("in the way")
    with caplog.at_level(logging.DEBUG):
        store(tmp_path).write(COMPILED)
        store(tmp_path / "gone").write(COMPILED)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 2
    assert "kernels are not stored" in caplog.text
    assert (tmp_path / "kernels").read_text() == "in the way"


WRITER = """
import sys
from pathlib import Path
from tests.tensorrt.artifact.test_kernels import store
plans = ("encoder", "decoder_static")
for i in range(40):
    store(Path(sys.argv[1])).write({plan: f"{plan} {sys.argv[2]} {i} ".encode() * 999 for plan in plans})
"""


def test_processes_that_write_at_once_leave_whole_kernels(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(engine)]
    writers = [subprocess.Popen([*command, name]) for name in "ab"]
    found = store(engine)
    seen: set[bytes] = set()
    while any(writer.poll() is None for writer in writers):
        for plan, first in COMPILED.items():
            raw = found.read(plan)
            assert raw in (None, first) or raw == raw[: len(raw) // 999] * 999
            seen.add(raw or b"")
    assert [writer.returncode for writer in writers] == [0, 0]
    assert not caplog.records, "a folder that is being replaced is not damaged"
    assert len(seen) > 2
    newest = read_all(found)
    assert {raw.split(b" ", 1)[0].decode(): True for raw in newest.values() if raw} == dict.fromkeys(SUMS, True)
