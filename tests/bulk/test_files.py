"""Columns of paths or of the content of files, for models of audio."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.bulk.corpus import check_outputs, outputs, read
from tests.command import run
from tests.features.signals import wav
from tests.test_inputs import samples
from tfexport.bulk.config import BulkConfig
from tfexport.bulk.run import generate_file
from tfexport.cli.generate import EXIT_ROWS
from tfexport.errors import InputError
from tfexport.model.model import Model

SMALL = BulkConfig(rows_per_part=7, batch_size=1, input_column="audio")
FILES = [wav(samples(0.1 + 0.13 * number, number)) for number in range(11)]
SAMPLING: dict[str, Any] = {"do_sample": True, "seed": 3, "max_new_tokens": 6}


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    for number, file in enumerate(FILES):
        (tmp_path / f"{number}.wav").write_bytes(file)
    return [str(tmp_path / f"{number}.wav") for number in range(len(FILES))]


def expected(model: Model, **options: Any) -> list[tuple[Any, ...]]:
    return [(one.text, one.score, one.finish_reason, None) for one in model.generate(FILES, **options)]


def write(path: Path, values: list[Any]) -> Path:
    if path.suffix == ".txt":
        path.write_text("".join(f"{value}\n" for value in values), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 1, "audio": value}) + "\n" for value in values), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows([["id", "audio"], *([1, value] for value in values)])
    else:
        pyarrow.parquet.write_table(pyarrow.table({"audio": values}), path)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".parquet"])
def test_paths_in_every_format(suffix: str, speech: Model, paths: list[str], tmp_path: Path) -> None:
    source = write(tmp_path / f"in{suffix}", paths)
    config = BulkConfig(rows_per_part=7, batch_size=1) if suffix == ".txt" else SMALL
    summary = generate_file(speech, source, tmp_path / "out.jsonl", config, **SAMPLING)
    assert (summary.num_rows, summary.num_errors) == (len(FILES), 0)
    check_outputs(outputs(tmp_path / "out.jsonl"), expected(speech, **SAMPLING))
    generate_file(speech, source, tmp_path / "out.txt", config, max_new_tokens=4)
    texts = [row["output"] for row in read(tmp_path / "out.txt")]
    assert texts == [one[0] for one in expected(speech, max_new_tokens=4)]


@pytest.mark.parametrize("is_nested", [False, True])
def test_content_of_files_in_parquet(speech: Model, is_nested: bool, tmp_path: Path) -> None:
    values: list[Any] = [{"bytes": file, "path": "missing.wav"} for file in FILES] if is_nested else FILES
    source = write(tmp_path / "in.parquet", values)
    for suffix in (".parquet", ".jsonl", ".csv"):
        generate_file(speech, source, tmp_path / f"out{suffix}", BulkConfig(rows_per_part=7), **SAMPLING)
        check_outputs(outputs(tmp_path / f"out{suffix}"), expected(speech, **SAMPLING))
        kept = [row["audio"] for row in read(tmp_path / f"out{suffix}")]
        assert kept == {".parquet": values, ".jsonl": [None] * 11, ".csv": [""] * 11}[suffix]


def test_wrong_files_are_errors_of_their_rows(
    speech_bundle: Path, speech: Model, model: Model, paths: list[str], tmp_path: Path
) -> None:
    (tmp_path / "text.wav").write_text("hello")
    (tmp_path / "long.wav").write_bytes(wav(samples(5)))
    wrong = {1: "missing.wav", 4: str(tmp_path), 5: str(tmp_path / "text.wav"), 6: None, 9: str(tmp_path / "long.wav")}
    values = [wrong.get(number, path) for number, path in enumerate(paths)]
    source, out = write(tmp_path / "in.parquet", values), tmp_path / "out.jsonl"
    done = run("generate", speech_bundle, "--input", source, "--output", out, "--input-column", "audio")
    assert done.exit_code == EXIT_ROWS
    wanted = expected(speech)
    for number, row in enumerate(outputs(out)):
        assert row[:3] == (None, None, None) if number in wrong else row[0] == wanted[number][0]
        assert bool(row[3]) == (number in wrong)
    with pytest.raises(InputError) as error:
        generate_file(speech, source, tmp_path / "out.txt", SMALL)
    assert len(error.value.problems) == len(wrong)
    pyarrow.parquet.write_table(pyarrow.table({"audio": FILES}), source)
    with pytest.raises(InputError):  # the content of files is no text
        generate_file(model, source, tmp_path / "texts.jsonl", SMALL)
