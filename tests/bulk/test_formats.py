"""Every format into every other: one row for each, in order, with the outputs of one call and all input columns."""

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

from tests.bulk.corpus import (
    ANSWERS,
    NOTES,
    TEXTS,
    WRITERS,
    answers,
    expected,
    near,
    no_litter,
    read,
    table,
    write_csv,
    write_jsonl,
    write_parquet,
)
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
@pytest.mark.parametrize("source", WRITERS)
def test_outputs_are_those_of_one_call_in_the_order_of_the_rows(
    source: str, target: str, model: Model, tmp_path: Path
) -> None:
    WRITERS[source](tmp_path / f"in{source}")
    summary = generate_file(model, tmp_path / f"in{source}", tmp_path / f"out{target}", SMALL)
    assert (summary.num_rows, summary.num_decoded, summary.num_errors) == (len(TEXTS), len(TEXTS), 0)
    if target == ".txt":
        assert [row["output"] for row in read(tmp_path / "out.txt")] == [row[0] for row in expected(model)]
    else:
        near(answers(tmp_path / f"out{target}"), expected(model))
        assert [row["text"] for row in read(tmp_path / f"out{target}")] == TEXTS
    no_litter(tmp_path, f"in{source}", f"out{target}")


def test_parquet_keeps_types_values_and_metadata(model: Model, tmp_path: Path) -> None:
    generate_file(model, write_parquet(tmp_path / "in.parquet"), tmp_path / "out.parquet", SMALL)
    found = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    carried = found.select(table().column_names)
    assert carried.schema.equals(table().schema, check_metadata=False)
    assert carried.drop_columns("rate").equals(table().drop_columns("rate"))
    assert str(carried["rate"].to_pylist()) == str(table()["rate"].to_pylist())
    assert found.schema.metadata[b"made by"] == b"somebody"
    kinds = [pyarrow.string(), pyarrow.float64(), pyarrow.string(), pyarrow.string()]
    assert [found.schema.field(name).type for name in ANSWERS] == kinds


def test_json_and_cells_are_kept(model: Model, tmp_path: Path) -> None:
    generate_file(model, write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", SMALL)
    before = [json.loads(line) for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    assert [old | row for old, row in zip(before, read(tmp_path / "out.jsonl"), strict=True)] == read(
        tmp_path / "out.jsonl"
    )
    write_csv(tmp_path / "in.csv")
    for suffix in (".csv", ".tsv", ".parquet"):
        generate_file(model, tmp_path / "in.csv", tmp_path / f"out{suffix}", SMALL)
        assert [row["note"] for row in read(tmp_path / f"out{suffix}")] == NOTES


def test_values_that_json_does_not_have_become_texts(model: Model, tmp_path: Path) -> None:
    generate_file(model, write_parquet(tmp_path / "in.parquet"), tmp_path / "out.jsonl", SMALL)
    row = read(tmp_path / "out.jsonl")[0]
    assert (row["when"], row["price"], row["kind"]) == ("2020-01-02 03:04:05.000006Z", "1.50", "a")
    assert (row["rate"], row["more"]) == (None, {"list": [1, None]})
    generate_file(model, tmp_path / "in.parquet", tmp_path / "out.csv", SMALL)
    row = read(tmp_path / "out.csv")[1]
    assert (row["id"], row["rate"], row["more"]) == ("1", "0.5", '{"list": [1, null]}')


NESTED = pyarrow.array([{"at": [datetime.datetime(2020, 1, 2)], "time": datetime.time(1, 2)}])
LONE = pyarrow.array([0], pyarrow.int64())
NOT_UTF8 = pyarrow.Array.from_buffers(
    pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (NESTED, {"at": ["2020-01-02 00:00:00.000000"], "time": "01:02:00.000000"}),
        (LONE.cast(pyarrow.time64("ns")), "00:00:00.000000000"),
        (pyarrow.array([["a"]]).cast(pyarrow.list_(pyarrow.large_string())), ["a"]),
        (LONE.cast(pyarrow.timestamp("us", "Nowhere/Land")), None),
        (NOT_UTF8, None),
        (pyarrow.array([b"\xff"]), None),
        (pyarrow.array([[b"\xff"]]), None),
        (pyarrow.array([b"\xff"]).dictionary_encode(), None),
    ],
    ids=["nested times", "time64", "list", "unknown zone", "not UTF-8", "bytes", "nested bytes", "dictionary of bytes"],
)
def test_hard_types_are_written_right_or_refused_before_decoding(
    column: pyarrow.Array, wanted: object, suffix: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:1], "it": column}), tmp_path / "in.parquet")
    target = tmp_path / f"out{suffix}"
    config = BulkConfig(input_column="text")
    if wanted is None:
        with monkeypatch.context() as patch, pytest.raises(InputError, match=rf"in.parquet: {suffix} cannot hold"):
            patch.setattr(Model, "generate", None)
            generate_file(model, tmp_path / "in.parquet", target, config)
        no_litter(tmp_path, "in.parquet")
        generate_file(model, tmp_path / "in.parquet", tmp_path / "out.parquet", config)
    else:
        generate_file(model, tmp_path / "in.parquet", target, config)
        found = read(target)[0]["it"]
        assert (json.loads(found) if suffix == ".csv" and not isinstance(wanted, str) else found) == wanted


def test_json_of_rows_with_other_keys_becomes_columns_of_one_type(model: Model, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": text} | ({"a": number} if number % 2 else {"b": [number + 0.5]}) for number, text in enumerate(TEXTS)
    ]
    rows[9]["a"] = 1.5

    def write() -> Path:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "in.jsonl"

    generate_file(model, write(), tmp_path / "out.parquet", SMALL)
    found = read(tmp_path / "out.parquet")
    assert [{key: row[key] for key in ("text", "a", "b")} for row in found] == [
        {"a": None, "b": None} | row for row in rows
    ]
    for wrong in ("text", {}, 2**70):
        rows[9]["a"] = wrong
        with pytest.raises(InputError, match=r"\.parquet"):
            generate_file(model, write(), tmp_path / "out.parquet", SMALL)
        no_litter(tmp_path, "in.jsonl", "out.parquet")
    (tmp_path / "in.jsonl").write_text('{"text": "1.1.2000", "m": {}}\n')
    with pytest.raises(InputError, match=r"\.parquet cannot hold"):
        generate_file(model, tmp_path / "in.jsonl", tmp_path / "out.parquet", SMALL)


@pytest.mark.parametrize("target", [".txt", ".csv", ".jsonl", ".parquet"])
def test_outputs_may_have_line_breaks_of_all_kinds(
    target: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(_: Model, texts: list[str], *, indices: list[int], **_options: Any) -> list[Result]:
        return [Result(BREAKS + f"\r\n\r{index}", (), -1.0, "eos", index) for index in indices]

    monkeypatch.setattr(Model, "generate", generate)
    out = tmp_path / f"out{target}"
    generate_file(model, write_jsonl(tmp_path / "in.jsonl"), out, SMALL)
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
    write_jsonl(tmp_path / "in.jsonl")
    for suffix in (".jsonl", ".parquet"):
        generate_file(model, tmp_path / "in.jsonl", tmp_path / f"out{suffix}", SMALL, **options)
        assert [row["output"] for row in read(tmp_path / f"out{suffix}")] == wanted
        assert all(row["output_score"][0] >= row["output_score"][1] for row in read(tmp_path / f"out{suffix}"))
    with pytest.raises(InputError, match="num_return_sequences"):
        generate_file(model, tmp_path / "in.jsonl", tmp_path / "out.csv", SMALL, **options)
    generate_file(model, tmp_path / "in.jsonl", tmp_path / "out.txt", SMALL, **options)
    rows = [line.split("\t") for line in (tmp_path / "out.txt").read_text().splitlines()]
    assert [(int(number), text) for number, _, text in rows] == [
        (row + 1, text) for row, texts in enumerate(wanted) for text in texts
    ]


def test_samples_are_those_of_one_call(model: Model, tmp_path: Path) -> None:
    options = {"do_sample": True, "temperature": 3.0, "seed": 5, "num_return_sequences": 2}
    wanted = [result.text for result in model.generate(TEXTS, **options)]
    assert wanted != [result.text for result in model.generate(TEXTS, **options | {"seed": 6})]
    generate_file(model, write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", SMALL, **options)
    assert [text for row in read(tmp_path / "out.jsonl") for text in row["output"]] == wanted


def test_progress_grows_to_all_rows(model: Model, tmp_path: Path) -> None:
    told: list[Progress] = []
    generate_file(model, WRITERS[".txt"](tmp_path / "in.txt"), tmp_path / "out.txt", SMALL, on_progress=told.append)
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert (told[-1].done, told[-1].num_rows, told[-1].left_s) == (len(TEXTS), len(TEXTS), 0)
    assert all(one.rows_per_s > 0 for one in told)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_without_rows_is_a_table_without_outputs(suffix: str, model: Model, tmp_path: Path) -> None:
    WRITERS[suffix](tmp_path / f"in{suffix}", [])
    assert generate_file(model, tmp_path / f"in{suffix}", tmp_path / f"out{suffix}", SMALL).num_rows == 0
    assert read(tmp_path / f"out{suffix}") == []
    header = (tmp_path / f"out{suffix}").read_bytes()
    assert b"output_finish_reason" in header


def test_a_prefix_begins_every_output(model: Model, tmp_path: Path) -> None:
    config = BulkConfig(prefix="1999-", output_column="iso", rows_per_part=4)
    generate_file(model, WRITERS[".txt"](tmp_path / "in.txt"), tmp_path / "out.jsonl", config)
    wanted = [result.text for result in model.generate(TEXTS, prefixes=["1999-"] * len(TEXTS))]
    assert [row["iso"] for row in read(tmp_path / "out.jsonl")] == wanted


@pytest.mark.parametrize("moved", [0, 2**40])
def test_other_file_systems_do_the_same(
    moved: int, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that pyarrow wraps in another, by a move and by a copy."""

    def place(given: object) -> Place:
        return Place(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), Path(str(given)).name)

    write_csv(tmp_path / "in.csv")
    with monkeypatch.context() as patch:
        patch.setattr("tfexport.bulk._job.find_place", place)
        patch.setattr("tfexport.bulk._files._MAX_MOVED", moved)
        generate_file(model, tmp_path / "in.csv", tmp_path / "out.parquet", SMALL)
        with pytest.raises(InputError, match="is also the input"):
            generate_file(model, tmp_path / "in.csv", tmp_path / "in.csv", SMALL)
    near(answers(tmp_path / "out.parquet"), expected(model))
    no_litter(tmp_path, "in.csv", "out.parquet")
    generate_file(model, f"file://{tmp_path}/in.csv", f"file://{tmp_path}/out.csv", SMALL)
    near(answers(tmp_path / "out.csv"), expected(model))
    with pytest.raises(InputError) as caught:
        find_place("nowhere://key:secret@bucket/in.csv")
    assert "secret" not in str(caught.value)


def test_memory_is_bounded_by_bytes_too(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are large are decoded in smaller parts, in the same order."""
    monkeypatch.setattr("tfexport.bulk._files._BATCH_BYTES", 1000)
    monkeypatch.setattr("tfexport.bulk._job._PART_BYTES", 3000)
    wide = table().append_column("wide", pyarrow.array(["x" * 1000] * len(TEXTS)))
    pyarrow.parquet.write_table(wide, tmp_path / "in.parquet")
    told: list[int] = []
    config = BulkConfig(input_column="text")
    generate_file(
        model,
        tmp_path / "in.parquet",
        tmp_path / "out.parquet",
        config,
        on_progress=lambda progress: told.append(len(list((tmp_path / "out.parquet.parts").glob("part-*")))),
    )
    near(answers(tmp_path / "out.parquet"), expected(model))
    assert max(told) > 2
