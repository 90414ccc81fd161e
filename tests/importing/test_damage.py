"""Damaged checkpoints: one line whatever was changed, and never other numbers where the file has checksums."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.from_scratch.notebook_002 import Notebook002
from tfexport.errors import CheckpointError, TfexportError
from tfexport.importing import _files as files
from tfexport.importing._files import read_checkpoint
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.reference.golden import record

LAYOUT = ImportConfig(layout="notebook-002", heads=4)
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


def says(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


# Every kind of damage, through the import


def mutations(content: bytes, number: int, seed: int) -> Iterator[bytes]:
    """Bytes and bits that are others, holes of zeros, parts that moved or are missing, at random places."""
    draw = random.Random(seed)
    size = len(content)
    for _ in range(number):
        changed = bytearray(content)
        # What describes the tensors lies at the ends; in between is a long row of numbers.
        place = draw.choice((draw.randrange(size), draw.randrange(min(size, 2000)), size - 1 - draw.randrange(2000)))
        end = min(size, place + draw.choice((2, 8, 64, 512)))
        match draw.randrange(6):
            case 0:
                changed[place] ^= 1 << draw.randrange(8)
            case 1:
                changed[place] = draw.randrange(256)
            case 2:
                changed[place:end] = bytes(end - place)
            case 3:
                changed[place:end] = draw.randbytes(end - place)
            case 4:
                del changed[place:]
            case 5:
                del changed[place:end]
        yield bytes(changed)


def count_mutations(kind: str, number: int, seed: int, folder: Path) -> dict[str, int]:
    """Import mutated files; whatever is imported is the original, or has another sum where the format has none."""
    whole = saved(kind, folder / "whole").read_bytes()
    import_checkpoint(folder / "whole", folder / "original", LAYOUT)
    original = load_file(folder / "original" / "model.safetensors")
    counts = {"same bytes": 0, "refused": 0, "imported as it was": 0, "imported with other numbers and another sum": 0}
    path, output = folder / "mutated", folder / "model"
    for content in mutations(whole, number, seed):
        if content == whole:
            counts["same bytes"] += 1
            continue
        path.write_bytes(content)
        try:
            imported = import_checkpoint(path, output, LAYOUT, force=True)
        except TfexportError:
            counts["refused"] += 1
            continue
        (found,) = imported.certificate.checkpoint.values()
        assert found.sha256 == hashlib.sha256(content).hexdigest() != hashlib.sha256(whole).hexdigest()
        numbers = load_file(output / "model.safetensors")
        is_same = numbers.keys() == original.keys() and all(torch.equal(numbers[n], original[n]) for n in numbers)
        counts["imported as it was" if is_same else "imported with other numbers and another sum"] += 1
    return counts


@pytest.mark.parametrize("kind", SAVE)
def test_mutations_are_refused_in_one_line_or_change_nothing(kind: str, tmp_path: Path) -> None:
    counts = count_mutations(kind, 60, 0, tmp_path)
    assert counts["refused"] > 10
    if kind == "zip":
        assert counts["imported with other numbers and another sum"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVE)
def test_thousands_of_mutations(kind: str, tmp_path: Path) -> None:
    counts = count_mutations(kind, 3000, 1, tmp_path)
    print(kind, counts)
    assert kind != "zip" or counts["imported with other numbers and another sum"] == 0


# The zip archive


def test_a_flipped_bit_in_any_record_is_refused(tmp_path: Path) -> None:
    """Also in the lowest bits of a weight, which nothing else would show."""
    path = saved("zip", tmp_path / "a.pt")
    whole = path.read_bytes()
    for name, tensor in weights().items():
        place = whole.index(tensor.numpy().tobytes())
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "has another checksum" in says(path), name


def test_a_hole_of_zeros_and_a_record_that_is_cut_short_are_refused(tmp_path: Path) -> None:
    path = saved("zip", tmp_path / "a.pt")
    whole = path.read_bytes()
    place = whole.index(weights()["embedding.weight"].numpy().tobytes())
    path.write_bytes(whole[: place + 64] + bytes(64) + whole[place + 128 :])
    assert "record 'a/data/0' has another checksum" in says(path)
    path.write_bytes(whole[: place + 64] + whole[place + 128 :])
    assert "is damaged or cut short" in says(path)


@pytest.mark.parametrize(("offset", "value"), [(8, b"\x01\x00"), (8, b"\x20\x00"), (8, b"\x40\x00"), (6, b"\xff\xff")])
def test_flags_and_versions_that_no_reader_knows_are_one_line(offset: int, value: bytes, tmp_path: Path) -> None:
    """As of archives that are encrypted, patched, or newer than their reader."""
    path = saved("zip", tmp_path / "a.pt")
    whole = path.read_bytes()
    entry = whole.index(b"PK\x01\x02")
    path.write_bytes(whole[: entry + offset] + value + whole[entry + offset + len(value) :])
    with contextlib.suppress(CheckpointError):
        found = read_checkpoint(path).tensors
        assert all(torch.equal(found[name], tensor) for name, tensor in weights().items())


def test_names_in_the_archive_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    path = saved("zip", tmp_path / "a.pt")
    whole = path.read_bytes()
    entry = whole.index(b"PK\x01\x02")
    # The flag for UTF-8, and a byte that is none.
    changed = whole[: entry + 8] + b"\x00\x08" + whole[entry + 10 : entry + 46] + b"\xff" + whole[entry + 47 :]
    path.write_bytes(changed)
    assert "is damaged or cut short" in says(path)


def test_a_record_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    import warnings
    import zipfile

    path = saved("zip", tmp_path / "a.pt")
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        warnings.simplefilter("ignore", UserWarning)  # of zipfile, about the name
        archive.writestr("a/data/0", bytes(7 * 8 * 4))
    assert "'a/data/0' is there twice" in says(path)


def test_an_archive_that_was_saved_without_checksums_is_refused(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved("zip", tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert "has no checksums, expected those that torch.save writes; save it again with " in says(path)


# Files that others change


USE_AFTER_CUT = """
import sys
from pathlib import Path
from tfexport.importing._files import read_checkpoint
from tfexport.importing.reference.golden import read_golden
for path in map(Path, sys.argv[1:]):
    tensors = read_golden(path).state if path.name == "golden" else read_checkpoint(path).tensors
    path.open("r+b").truncate(0)
    print(sum(float(tensors[name].double().sum()) for name in sorted(tensors)))
"""


def test_a_file_that_is_cut_short_after_it_was_read_changes_nothing(tmp_path: Path) -> None:
    """In a process of its own: a mapped file would end it with a bus error."""
    paths = [saved(kind, tmp_path / kind) for kind in SAVE]
    golden = record(small(), Notebook002.forward, tmp_path / "golden", source_vocab=7, heads=4)
    done = subprocess.run(
        [sys.executable, "-c", USE_AFTER_CUT, *paths, tmp_path / "golden"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * 4
    wanted = [*(weights() for _ in paths), golden.state]
    sums = [sum(float(tensors[name].double().sum()) for name in sorted(tensors)) for tensors in wanted]
    assert [float(line) for line in done.stdout.split()] == sums


@pytest.mark.parametrize("kind", SAVE)
def test_what_is_summed_up_is_what_is_used(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "was changed while it was read" in says(path)


def test_a_file_larger_than_the_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.truncate(2**42)
    assert f"has {2**42} bytes, more than this machine's memory of " in says(path)


# What an import says of the file


def test_the_sums_of_what_was_read_are_said_and_kept(tmp_path: Path) -> None:
    path = saved("safetensors", tmp_path / "mine.safetensors")
    lines: list[str] = []
    import_checkpoint(path, tmp_path / "m", LAYOUT, report=lines.append)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    assert f"read mine.safetensors: {size} bytes, sha256 {sha256}" in lines
    certificate = json.loads((tmp_path / "m" / "certificate.json").read_text())
    assert certificate["checkpoint"] == {"mine.safetensors": {"bytes": size, "sha256": sha256}}
    assert certificate["golden"] is None
