"""Dates in files of every format, with columns beside them that are hard to carry."""

from __future__ import annotations

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tfexport.model.model import Model

# Of different lengths, so that the order of decoding is not that of the rows.
TEXTS = [
    "Dienstag, 3. März 2026",
    "1.1.2000",
    "30 июня 2019 г.",
    "2026年3月3日火曜日",
    "15 de septiembre de 2001",
    "le 14 juillet 1989",
    "Παρασκευή 13 Αυγούστου 2004",
    "5/11/1955",
    "2088년 9월 17일 금요일",
    "3 Mar 2026",
    "31.12.1999",
]
NOTES = [
    'a "quoted" note',
    "with a comma, and\na line break",
    "",
    "  spaces  ",
    "007",
    "NULL",
    "ü",
    "1e5",
    "true",
    "-",
    "'",
]
ANSWERS = ["output", "output_score", "output_finish_reason", "output_error"]


def write_txt(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_bytes("".join(f"{text}\r\n" for text in texts).encode("utf-8-sig"))
    return path


def write_csv(path: Path, texts: list[str] = TEXTS) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        csv.writer(stream).writerows([["id", "text", "note"], *zip(range(len(texts)), texts, NOTES, strict=False)])
    return path


def write_jsonl(path: Path, texts: list[str] = TEXTS) -> Path:
    """Numbers and spaces are spelled as no writer of JSON would spell them again."""
    more = '"big": 1234567890123456789,  "more": {"a":[1 ,null]}'
    lines = [f'{{ "id":{number}.50, {more}, "text": {json.dumps(text)} }}\n' for number, text in enumerate(texts)]
    path.write_text("".join(lines))
    return path


def table(texts: list[str] = TEXTS) -> pyarrow.Table:
    count = len(texts)
    columns: dict[str, Any] = {
        "id": pyarrow.array(range(count), pyarrow.int16()),
        "when": pyarrow.array([datetime.datetime(2020, 1, 2, 3, 4, 5, 6)] * count, pyarrow.timestamp("us", "UTC")),
        "price": pyarrow.array([Decimal("1.50")] * count, pyarrow.decimal128(5, 2)),
        "kind": pyarrow.array(["a"] * count, pyarrow.string()).dictionary_encode(),
        "rate": pyarrow.array([float("nan"), *[0.5] * count][:count], pyarrow.float64()),
        "more": [{"list": [1, None]}] * count,
        "text": pyarrow.array(texts, pyarrow.large_string()),
    }
    return pyarrow.table(columns).replace_schema_metadata({"made by": "somebody"})


def write_parquet(path: Path, texts: list[str] = TEXTS) -> Path:
    pyarrow.parquet.write_table(table(texts), path, row_group_size=5)
    return path


WRITERS = {".txt": write_txt, ".csv": write_csv, ".jsonl": write_jsonl, ".parquet": write_parquet}


def read(path: Path) -> list[dict[str, Any]]:
    """Read an output by other code than that which wrote it."""
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return rows
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    if path.suffix in (".csv", ".tsv"):
        with path.open(newline="") as stream:
            return list(csv.DictReader(stream, delimiter="," if path.suffix == ".csv" else "\t"))
    return [{"output": line} for line in path.read_bytes().decode().split("\n")[:-1]]


def expected(model: Model, texts: list[str] = TEXTS, **options: Any) -> list[tuple[Any, ...]]:
    """Return what one call over all texts answers: text, score, reason of the end, and no error."""
    return [(result.text, result.score, result.finish_reason, None) for result in model.generate(texts, **options)]


def answers(path: Path) -> list[tuple[Any, ...]]:
    """Return the same of an output; of CSV, texts as what they spell."""
    found = [tuple(row[name] for name in ANSWERS) for row in read(path)]
    if path.suffix in (".csv", ".tsv"):
        return [(text, float(score), end, error or None) for text, score, end, error in found]
    return found


def no_litter(folder: Path, *names: str) -> None:
    """Expect these files in a folder, and nothing else."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def near(found: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> None:
    """Expect the same answers; scores of other batches may differ in their last digits."""
    assert [(row[0], *row[2:]) for row in found] == [(row[0], *row[2:]) for row in wanted]
    assert [row[1] for row in found] == pytest.approx([row[1] for row in wanted], rel=1e-3, abs=1e-5)
