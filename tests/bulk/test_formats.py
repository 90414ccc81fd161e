"""Every format into every other one: all rows in order, with the outputs of one call and all input columns."""

from __future__ import annotations

import csv
import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pyarrow import fs

from tests.bulk.corpus import COLUMNS, NOTES, TEXTS, check_files, check_outputs, expected, outputs, read, table, write
from tfexport.bulk._files import Place, find_place
from tfexport.bulk.config import BulkConfig, Progress
from tfexport.bulk.run import generate_file
from tfexport.errors import InputError
from tfexport.model.model import Model
from tfexport.model.result import Result

SMALL = BulkConfig(rows_per_part=4, batch_size=3)
# Characters at which `str.splitlines` splits a text and a reader of lines does not.
BREAKS = "a\u2028b\u2029c\u0085d"


@pytest.mark.parametrize("target", [".txt", ".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("source", [".txt", ".csv", ".jsonl", ".parquet"])
def test_outputs_equal_those_of_one_call(source: str, target: str, model: Model, tmp_path: Path) -> None:
    seen: list[Progress] = []
    out = tmp_path / f"out{target}"
    summary = generate_file(model, write(tmp_path / f"in{source}"), out, SMALL, on_progress=seen.append)
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert (seen[-1].done, seen[-1].num_rows, seen[-1].left_s) == (len(TEXTS), len(TEXTS), 0)
    assert (summary.num_rows, summary.num_decoded, summary.num_errors) == (len(TEXTS), len(TEXTS), 0)
    if target == ".txt":
        assert [row["output"] for row in read(tmp_path / "out.txt")] == [row[0] for row in expected(model)]
    else:
        check_outputs(outputs(tmp_path / f"out{target}"), expected(model))
        assert [row["text"] for row in read(tmp_path / f"out{target}")] == TEXTS
    check_files(tmp_path, f"in{source}", f"out{target}")


def test_values_of_parquet_keep_their_type_or_become_texts(model: Model, tmp_path: Path) -> None:
    generate_file(model, write(tmp_path / "in.parquet"), tmp_path / "out.parquet", SMALL)
    found = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    carried = found.select(table().column_names)
    assert carried.schema.equals(table().schema, check_metadata=False)
    assert carried.drop_columns("rate").equals(table().drop_columns("rate"))
    assert str(carried["rate"].to_pylist()) == str(table()["rate"].to_pylist())
    assert found.schema.metadata[b"made by"] == b"somebody"
    types = [pyarrow.string(), pyarrow.float64(), pyarrow.string(), pyarrow.string()]
    assert [found.schema.field(name).type for name in COLUMNS] == types
    for suffix in (".jsonl", ".csv"):
        generate_file(model, tmp_path / "in.parquet", tmp_path / f"out{suffix}", SMALL)
    row = read(tmp_path / "out.jsonl")[0]
    assert (row["when"], row["price"], row["kind"]) == ("2020-01-02 03:04:05.000006Z", "1.50", "a")
    assert (row["rate"], row["more"]) == (None, {"list": [1, None]})
    row = read(tmp_path / "out.csv")[1]
    assert (row["id"], row["rate"], row["more"]) == ("1", "0.5", '{"list": [1, null]}')


def test_json_values_and_cells_are_unchanged(model: Model, tmp_path: Path) -> None:
    generate_file(model, write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", SMALL)
    before = [json.loads(line) for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    after = read(tmp_path / "out.jsonl")
    assert [old | row for old, row in zip(before, after, strict=True)] == after
    for suffix in (".csv", ".tsv", ".parquet"):
        generate_file(model, write(tmp_path / "in.csv"), tmp_path / f"out{suffix}", SMALL)
        assert [row["note"] for row in read(tmp_path / f"out{suffix}")] == NOTES


NESTED = pyarrow.array([{"at": [datetime.datetime(2020, 1, 2)], "time": datetime.time(1, 2)}])
LONE = pyarrow.array([0], pyarrow.int64())
NOT_UTF8 = pyarrow.Array.from_buffers(
    pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
)


SPECIAL = {
    "nested times": (NESTED, {"at": ["2020-01-02 00:00:00.000000"], "time": "01:02:00.000000"}),
    "time64": (LONE.cast(pyarrow.time64("ns")), "00:00:00.000000000"),
    "list": (pyarrow.array([["a"]]).cast(pyarrow.list_(pyarrow.large_string())), ["a"]),
    "unknown zone": (LONE.cast(pyarrow.timestamp("us", "Nowhere/Land")), None),
    "beyond year 9999": (pyarrow.array([[2**50]], pyarrow.list_(pyarrow.timestamp("ms"))), None),
    "not UTF-8": (NOT_UTF8, None),
    "bytes": (pyarrow.array([b"\xff"]), None),
    "nested bytes": (pyarrow.array([[b"\xff"]]), None),
    "dictionary of bytes": (pyarrow.array([b"\xff"]).dictionary_encode(), None),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_types_are_converted_or_refused_before_decoding(
    name: str, suffix: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (column, wanted), source, target = SPECIAL[name], tmp_path / "in.parquet", tmp_path / f"out{suffix}"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:1], "it": column}), source)
    config = BulkConfig(input_column="text")
    if wanted is None:
        with monkeypatch.context() as patch, pytest.raises(InputError, match=rf"in.parquet: {suffix} cannot hold"):
            patch.setattr(Model, "generate", None)
            generate_file(model, source, target, config)
        check_files(tmp_path, "in.parquet")
        generate_file(model, source, tmp_path / "out.parquet", config)
    else:
        generate_file(model, source, target, config)
        found = read(target)[0]["it"]
        assert (json.loads(found) if suffix == ".csv" and not isinstance(wanted, str) else found) == wanted


def test_json_rows_with_different_keys_become_typed_columns(model: Model, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    rows: list[dict[str, Any]] = [
        {"text": text} | ({"a": number} if number % 2 else {"b": [number + 0.5]}) for number, text in enumerate(TEXTS)
    ]
    for value in (1.5, "text", {}, 2**70):
        rows[9]["a"] = value
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if value == 1.5:
            generate_file(model, source, target, SMALL)
            found = [{key: row[key] for key in ("text", "a", "b")} for row in read(target)]
            assert found == [{"a": None, "b": None} | row for row in rows]
        else:
            with pytest.raises(InputError, match=r"in\.jsonl as \.parquet: a column has values without a common type"):
                generate_file(model, source, target, SMALL)
            check_files(tmp_path, "in.jsonl", "out.parquet")
    source.write_text('{"text": "1.1.2000", "m": {}}\n')
    with pytest.raises(InputError, match=r"\.parquet cannot hold"):
        generate_file(model, source, target, SMALL)


@pytest.mark.parametrize("target", [".txt", ".csv", ".jsonl", ".parquet"])
def test_outputs_may_have_line_breaks_of_all_kinds(
    target: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(_: Model, texts: list[str], *, indices: list[int], **_options: Any) -> list[Result]:
        return [Result(BREAKS + f"\r\n\r{index}", (), -1.0, "eos", index) for index in indices]

    monkeypatch.setattr(Model, "generate", generate)
    out = tmp_path / f"out{target}"
    generate_file(model, write(tmp_path / "in.jsonl"), out, SMALL)
    end = "  " if target == ".txt" else "\r\n\r"
    assert [row["output"] for row in read(out)] == [f"{BREAKS}{end}{index}" for index in range(len(TEXTS))]


def test_a_carriage_return_in_a_cell_is_quoted(model: Model, tmp_path: Path) -> None:
    rows = [["text", "note"], ["1.1.2000", "a\rb"], ["2.1.2000", "\r"]]
    with (tmp_path / "in.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
        stream.write("\r\n\r\n")  # trailing blank lines are skipped
    for source, target in (("in.csv", "a.csv"), ("a.csv", "b.csv")):
        config = BulkConfig(input_column="text", output_column=target[0])
        assert generate_file(model, tmp_path / source, tmp_path / target, config).num_rows == 2
        assert [[row["text"], row["note"]] for row in read(tmp_path / target)] == rows[1:]


def test_several_outputs_are_lists(model: Model, tmp_path: Path) -> None:
    options = {"num_beams": 3, "num_return_sequences": 2}
    found = model.generate(TEXTS, **options)
    wanted = [[found[2 * row].text, found[2 * row + 1].text] for row in range(len(TEXTS))]
    for suffix in (".jsonl", ".parquet"):
        generate_file(model, write(tmp_path / "in.jsonl"), tmp_path / f"out{suffix}", SMALL, **options)
        assert [row["output"] for row in read(tmp_path / f"out{suffix}")] == wanted
        assert all(row["output_score"][0] >= row["output_score"][1] for row in read(tmp_path / f"out{suffix}"))
    with pytest.raises(InputError, match="num_return_sequences"):
        generate_file(model, tmp_path / "in.jsonl", tmp_path / "out.csv", SMALL, **options)
    generate_file(model, tmp_path / "in.jsonl", tmp_path / "out.txt", SMALL, **options)
    lines = [line.split("\t") for line in (tmp_path / "out.txt").read_text().splitlines()]
    expected_lines = [(str(row), text) for row, texts in enumerate(wanted, 1) for text in texts]
    assert [(number, text) for number, _, text in lines] == expected_lines


def test_samples_and_prefixes_equal_those_of_one_call(model: Model, tmp_path: Path) -> None:
    options = {"do_sample": True, "temperature": 3.0, "seed": 5, "num_return_sequences": 2}
    config = BulkConfig(prefix="19", output_column="iso", rows_per_part=4, batch_size=3)
    prefixes = ["19"] * len(TEXTS)
    wanted = [result.text for result in model.generate(TEXTS, prefixes=prefixes, **options)]
    assert wanted != [result.text for result in model.generate(TEXTS, prefixes=prefixes, **options | {"seed": 6})]
    generate_file(model, write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", config, **options)
    assert [text for row in read(tmp_path / "out.jsonl") for text in row["iso"]] == wanted


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_without_rows_has_columns_for_outputs(suffix: str, model: Model, tmp_path: Path) -> None:
    assert generate_file(model, write(tmp_path / f"in{suffix}", []), tmp_path / f"out{suffix}", SMALL).num_rows == 0
    assert read(tmp_path / f"out{suffix}") == []
    assert b"output_finish_reason" in (tmp_path / f"out{suffix}").read_bytes()


@pytest.mark.parametrize("moved", [0, 2**40])
def test_other_file_systems(moved: int, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of pyarrow around another one, with a move and with a copy."""

    def place(given: object) -> Place:
        return Place(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), Path(str(given)).name)

    write(tmp_path / "in.csv")
    with monkeypatch.context() as patch:
        patch.setattr("tfexport.bulk._job.find_place", place)
        patch.setattr("tfexport.bulk._files._MAX_MOVED", moved)
        generate_file(model, tmp_path / "in.csv", tmp_path / "out.parquet", SMALL)
        with pytest.raises(InputError, match="is also the input"):
            generate_file(model, tmp_path / "in.csv", tmp_path / "in.csv", SMALL)
    check_outputs(outputs(tmp_path / "out.parquet"), expected(model))
    check_files(tmp_path, "in.csv", "out.parquet")
    generate_file(model, f"file://{tmp_path}/in.csv", f"file://{tmp_path}/out.csv", SMALL)
    check_outputs(outputs(tmp_path / "out.csv"), expected(model))
    with pytest.raises(InputError) as caught:
        find_place("nowhere://key:secret@bucket/in.csv")
    assert "secret" not in str(caught.value)


def test_memory_is_bounded_by_bytes_too(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large rows are decoded in smaller parts, in the same order."""
    monkeypatch.setattr("tfexport.bulk._files._BATCH_BYTES", 1000)
    monkeypatch.setattr("tfexport.bulk._job._PART_BYTES", 3000)
    wide = table().append_column("wide", pyarrow.array(["x" * 1000] * len(TEXTS)))
    pyarrow.parquet.write_table(wide, tmp_path / "in.parquet")
    parts = set()

    def collect(_progress: object) -> None:
        parts.update((tmp_path / "out.parquet.parts").glob("part-*"))

    config = BulkConfig(input_column="text")
    generate_file(model, tmp_path / "in.parquet", tmp_path / "out.parquet", config, on_progress=collect)
    check_outputs(outputs(tmp_path / "out.parquet"), expected(model))
    assert len(parts) > 2
