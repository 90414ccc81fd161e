"""Dates in files of every format, with columns that are hard to carry."""

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
    "Dienstag, 3. März 2026", "1.1.2000", "30 июня 2019 г.", "2026年3月3日火曜日", "15 de septiembre de 2001",
    "le 14 juillet 1989", "Παρασκευή 13 Αυγούστου 2004", "5/11/1955", "2088년 9월 17일 금요일", "3 Mar 2026",
    "31.12.1999",
]  # fmt: skip
NOTES = ['a "quoted" note', "with a comma, and\na line break", "", "  spaces  ", *"007 NULL ü 1e5 true - '".split()]
COLUMNS = ["output", "output_score", "output_finish_reason", "output_error"]


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


def write(path: Path, texts: list[str] = TEXTS) -> Path:
    """Write texts in the format of the suffix: .txt, .csv, .jsonl or .parquet."""
    if path.suffix == ".txt":
        path.write_bytes("".join(f"{text}\r\n" for text in texts).encode("utf-8-sig"))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as stream:
            csv.writer(stream).writerows([["id", "text", "note"], *zip(range(len(texts)), texts, NOTES, strict=False)])
    elif path.suffix == ".jsonl":  # numbers and spaces are written in an unusual way, which the output has to keep
        more = '"big": 1234567890123456789,  "more": {"a":[1 ,null]}'
        lines = [f'{{ "id":{number}.50, {more}, "text": {json.dumps(text)} }}\n' for number, text in enumerate(texts)]
        path.write_text("".join(lines), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(table(texts), path, row_group_size=5)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Read an output with other code than that which wrote it."""
    if path.suffix == ".parquet":
        return list(pyarrow.parquet.read_table(path).to_pylist())
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    if path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(2**26)
        with path.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream, delimiter="," if path.suffix == ".csv" else "\t"))
    return [{"output": line} for line in path.read_bytes().decode().split("\n")[:-1]]


def expected(model: Model) -> list[tuple[Any, ...]]:
    """Return the outputs of one call for all texts: text, score, finish reason, and no error."""
    return [(result.text, result.score, result.finish_reason, None) for result in model.generate(TEXTS)]


def outputs(path: Path) -> list[tuple[Any, ...]]:
    """Return the outputs in a file, like `expected`."""
    found = [tuple(row[name] for name in COLUMNS) for row in read(path)]
    if path.suffix in (".csv", ".tsv"):
        return [(text, float(score), end, error or None) for text, score, end, error in found]
    return found


def check_files(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def check_outputs(found: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> None:
    """Compare outputs; scores of other batches may differ in their last digits."""
    assert [(row[0], *row[2:]) for row in found] == [(row[0], *row[2:]) for row in wanted]
    assert [row[1] for row in found] == pytest.approx([row[1] for row in wanted], rel=1e-3, abs=1e-5)
