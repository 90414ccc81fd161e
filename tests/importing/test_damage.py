"""Damaged checkpoints and files that change while they are read; `tests/fuzz` damages them at random places."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.from_scratch.notebook_002 import Notebook002
from tests.importing.test_files import message_of
from tfexport.importing import _files as files
from tfexport.importing._files import read_checkpoint
from tfexport.importing.reference.outputs import record_reference

SAVE: dict[str, Callable[[dict[str, Tensor], Path], object]] = {
    "zip": torch.save,
    "old": partial(torch.save, _use_new_zipfile_serialization=False),
    "safetensors": save_file,
}


def small() -> Notebook002:
    torch.manual_seed(0)
    return Notebook002(vocab=7, d_model=8, d_k=4, heads=4, layers=1).eval()


def weights() -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in small().state_dict().items()}


def saved(kind: str, path: Path) -> Path:
    SAVE[kind](weights(), path)
    return path


def test_a_flipped_bit_in_any_record_is_refused(tmp_path: Path) -> None:
    """Also in the lowest bits of a weight, which nothing else would show."""
    path = saved("zip", tmp_path / "a.pt")
    whole = path.read_bytes()
    for name, tensor in weights().items():
        place = whole.index(tensor.numpy().tobytes())
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "does not match its checksum" in message_of(path), name


def test_a_record_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = saved("zip", tmp_path / "a.pt")
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        warnings.simplefilter("ignore", UserWarning)  # of zipfile, about the name
        archive.writestr("a/data/0", bytes(7 * 8 * 4))
    assert "'a/data/0' is there twice" in message_of(path)


def test_an_archive_that_was_saved_without_checksums_is_refused(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved("zip", tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert "has no checksums, expected those that torch.save writes; save it again with " in message_of(path)


USE_AFTER_CUT = """
import sys
from pathlib import Path
from tfexport.importing._files import read_checkpoint
from tfexport.importing.reference.outputs import read_reference
for path in map(Path, sys.argv[1:]):
    tensors = read_reference(path).state if path.name == "reference" else read_checkpoint(path).tensors
    path.open("r+b").truncate(0)
    print(sum(float(tensors[name].double().sum()) for name in sorted(tensors)))
"""


def test_a_file_that_is_cut_short_after_it_was_read_changes_nothing(tmp_path: Path) -> None:
    """In a process of its own: a mapped file would end it with a bus error."""
    paths = [saved(kind, tmp_path / kind) for kind in SAVE]
    reference = record_reference(small(), Notebook002.forward, tmp_path / "reference", source_vocab=7, heads=4)
    done = subprocess.run(
        [sys.executable, "-c", USE_AFTER_CUT, *paths, tmp_path / "reference"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * 4
    wanted = [*(weights() for _ in paths), reference.state]
    sums = [sum(float(tensors[name].double().sum()) for name in sorted(tensors)) for tensors in wanted]
    assert [float(line) for line in done.stdout.split()] == sums


@pytest.mark.parametrize("kind", SAVE)
def test_the_checksum_covers_the_bytes_that_are_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody writes other weights into the file while it is imported."""
    path = saved(kind, tmp_path / "a")
    content, use = path.read_bytes(), files._read_content

    def late(*words: Any) -> Any:
        path.write_bytes(bytes(len(content)))
        return use(*words)

    monkeypatch.setattr(files, "_read_content", late)
    found = read_checkpoint(path)
    assert found.files["a"].sha256 == hashlib.sha256(content).hexdigest()
    assert found.files["a"].bytes == len(content)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in weights().items())


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("zip", tmp_path / "a")
    sha256 = hashlib.sha256

    def growing(*words: Any) -> Any:
        with path.open("ab") as file:
            file.write(b"more")
        return sha256(*words)

    monkeypatch.setattr("tfexport.importing._files.hashlib.sha256", growing)
    assert "was changed while it was read" in message_of(path)


def test_a_file_larger_than_the_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.truncate(2**42)
    assert f"has {2**42} bytes, more than this machine's memory of " in message_of(path)
