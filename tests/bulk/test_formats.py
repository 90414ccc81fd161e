"""Every format into every other: one row for each, in order, with the answers of one call and all that was there."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

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
from tfexport.bulk.config import BulkConfig
from tfexport.bulk.progress import Progress
from tfexport.bulk.run import generate_file
from tfexport.errors import InputError
from tfexport.model.model import Model

SMALL = BulkConfig(rows_per_part=4, batch_size=3)


@pytest.mark.parametrize("target", WRITERS)
@pytest.mark.parametrize("source", WRITERS)
def test_answers_are_those_of_one_call_in_the_order_of_the_rows(
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
    assert [found.schema.field(name).type for name in ANSWERS] == [
        pyarrow.string(), pyarrow.float64(), pyarrow.string(), pyarrow.string()
    ]  # fmt: skip


def test_json_is_carried_as_it_is_spelled(model: Model, tmp_path: Path) -> None:
    generate_file(model, write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", SMALL)
    before, after = ((tmp_path / name).read_text().splitlines() for name in ("in.jsonl", "out.jsonl"))
    assert [line.startswith(old.removesuffix("}").rstrip()) for old, line in zip(before, after, strict=True)]
    assert [json.loads(line) | json.loads(old) for old, line in zip(before, after, strict=True)] == read(
        tmp_path / "out.jsonl"
    )


def test_cells_with_quotes_commas_and_line_breaks_stay(model: Model, tmp_path: Path) -> None:
    generate_file(model, write_csv(tmp_path / "in.csv"), tmp_path / "out.csv", SMALL)
    assert [row["note"] for row in read(tmp_path / "out.csv")] == NOTES
    generate_file(model, tmp_path / "in.csv", tmp_path / "out.parquet", SMALL)
    assert [row["note"] for row in read(tmp_path / "out.parquet")] == NOTES


def test_values_that_json_has_not_are_spelled_as_texts(model: Model, tmp_path: Path) -> None:
    generate_file(model, write_parquet(tmp_path / "in.parquet"), tmp_path / "out.jsonl", SMALL)
    row = read(tmp_path / "out.jsonl")[0]
    assert (row["when"], row["price"], row["kind"]) == ("2020-01-02 03:04:05.000006Z", "1.50", "a")
    assert (row["rate"], row["more"]) == (None, {"list": [1, None]})
    generate_file(model, tmp_path / "in.parquet", tmp_path / "out.csv", SMALL)
    row = read(tmp_path / "out.csv")[1]
    assert (row["id"], row["rate"], row["more"]) == ("1", "0.5", '{"list": [1, null]}')


def test_json_of_rows_with_other_keys_becomes_columns_of_one_type(model: Model, tmp_path: Path) -> None:
    rows = [
        {"text": text} | ({"a": number} if number % 2 else {"b": [number + 0.5]}) for number, text in enumerate(TEXTS)
    ]
    rows[9]["a"] = 1.5
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generate_file(model, tmp_path / "in.jsonl", tmp_path / "out.parquet", SMALL)
    found = read(tmp_path / "out.parquet")
    assert [{key: row[key] for key in ("text", "a", "b")} for row in found] == [
        {"a": None, "b": None} | row for row in rows
    ]
    rows[9]["a"] = "text"
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r'column "a" has values of no one type .*; write .jsonl'):
        generate_file(model, tmp_path / "in.jsonl", tmp_path / "out.parquet", SMALL)
    no_litter(tmp_path, "in.jsonl", "out.parquet")


def test_several_answers_are_lists(model: Model, tmp_path: Path) -> None:
    options = {"num_beams": 3, "num_return_sequences": 2}
    found = model.generate(TEXTS, **options)
    wanted = [[found[2 * row].text, found[2 * row + 1].text] for row in range(len(TEXTS))]
    write_jsonl(tmp_path / "in.jsonl")
    for suffix in (".jsonl", ".parquet"):
        generate_file(model, tmp_path / "in.jsonl", tmp_path / f"out{suffix}", SMALL, **options)
        assert [row["output"] for row in read(tmp_path / f"out{suffix}")] == wanted
        assert all(row["output_score"][0] >= row["output_score"][1] for row in read(tmp_path / f"out{suffix}"))
    with pytest.raises(InputError, match=r"a cell of \.csv holds one text; write \.jsonl"):
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
    write_jsonl(tmp_path / "in.jsonl")
    generate_file(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", SMALL, **options)
    assert [text for row in read(tmp_path / "out.jsonl") for text in row["output"]] == wanted


def test_progress_grows_to_all_rows(model: Model, tmp_path: Path) -> None:
    told: list[Progress] = []
    generate_file(model, WRITERS[".txt"](tmp_path / "in.txt"), tmp_path / "out.txt", SMALL, on_progress=told.append)
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert (told[-1].done, told[-1].num_rows, told[-1].left_s) == (len(TEXTS), len(TEXTS), 0)
    assert all(one.rows_per_s > 0 for one in told)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_without_rows_is_a_table_without_answers(suffix: str, model: Model, tmp_path: Path) -> None:
    WRITERS[suffix](tmp_path / f"in{suffix}", [])
    assert generate_file(model, tmp_path / f"in{suffix}", tmp_path / f"out{suffix}", SMALL).num_rows == 0
    assert read(tmp_path / f"out{suffix}") == []
    if suffix == ".parquet":
        assert pyarrow.parquet.read_schema(tmp_path / "out.parquet").names[-4:] == ANSWERS


def test_a_prefix_begins_every_answer(model: Model, tmp_path: Path) -> None:
    config = BulkConfig(prefix="1999-", output_column="iso", rows_per_part=4)
    generate_file(model, WRITERS[".txt"](tmp_path / "in.txt"), tmp_path / "out.jsonl", config)
    wanted = [result.text for result in model.generate(TEXTS, prefixes=["1999-"] * len(TEXTS))]
    assert [row["iso"] for row in read(tmp_path / "out.jsonl")] == wanted


def test_other_file_systems_do_the_same(model: Model, tmp_path: Path) -> None:
    """On the ways that a store takes, by a file system that pyarrow wraps in another."""
    from pyarrow import fs

    from tfexport.bulk.places import find

    def place(given: object) -> object:
        from tfexport.bulk.places.remote import RemotePlace

        return RemotePlace(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), Path(str(given)).name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfexport.bulk.task.find_place", place)
        generate_file(model, write_csv(tmp_path / "in.csv"), tmp_path / "out.parquet", SMALL)
    near(answers(tmp_path / "out.parquet"), expected(model))
    no_litter(tmp_path, "in.csv", "out.parquet")
    write_csv(tmp_path / "in.csv")
    generate_file(model, f"file://{tmp_path}/in.csv", f"file://{tmp_path}/out.csv", SMALL)
    near(answers(tmp_path / "out.csv"), expected(model))
    with pytest.raises(InputError, match=r"nowhere://…: no such place"):
        find.find_place("nowhere://key:secret@bucket/in.csv")
