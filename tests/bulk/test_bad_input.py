"""Invalid input is refused before decoding, with all problems; rows that cannot be decoded have an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.bulk.corpus import TEXTS, check_files, check_outputs, outputs, read, write
from tests.command import run
from tfexport._io.atomic import locked
from tfexport.bulk.config import BulkConfig
from tfexport.bulk.run import generate_file
from tfexport.errors import BundleError, ConfigError, InputError
from tfexport.model.model import Model

SMALL = BulkConfig(rows_per_part=4, batch_size=3)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.txt", b"", "is empty"),
        ("in.jsonl", b"", "is empty"),
        ("in.csv", b"", "is empty"),
        ("in.parquet", b"", "in.parquet is not a complete Parquet file"),
        ("in.parquet", b"no Parquet at all", "in.parquet is not a complete Parquet file"),
        ("in.txt", b"1.1.2000\n\xff\n2.1.2000\n\xfe", "in.txt: line 2 is not UTF-8; .*; line 4 is not UTF-8"),
        ("in.jsonl", b'{"a": "1"}\n{"a": \n\n[1]', r"line 2 is not JSON .*; line 3 is empty, .*; line 4 is \[1\]"),
        ("in.jsonl", b'{"a": "1", "a": "2"}\n', "line 1 is not JSON .key a is given twice"),
        ("in.jsonl", b'{"a": 1}\n{"b": null}\n', "it has no column with texts"),
        ("in.csv", b'a,b\n1,2\n1,2,3\n1\n', "line 3 has 3 cells, expected 2 as in .*; line 4 has 1 cells"),
        ("in.csv", b'a,b\n1,"x\n\ny"\n"x"y,\xff\n1,\xff\n', "line 5 is not UTF-8"),
        ("in.csv", b'a,b\n1,"never closed\n\n2,3\n', "line 4 is not a row of cells"),
        ("in.csv", b'a,a\n1,2\n', "names 'a' twice"),
        ("in.csv", b'a,b\n1,2\n', "in.csv: its columns with texts are a, b; choose one with --input-column"),
        ("in.csv", b'text,output\n1,2\n', "in.csv already has the column output"),
        ("in.txt", b"x" * 70_000_000, "line 1 has more than 67108864 bytes"),
    ],
    ids=lambda value: str(value[:30]),
)  # fmt: skip
def test_a_broken_file_is_refused(name: str, data: bytes, message: str, model: Model, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        generate_file(model, tmp_path / name, tmp_path / "out.jsonl", SMALL)
    check_files(tmp_path, name)


def test_damaged_parquet_files_are_refused(model: Model, tmp_path: Path) -> None:
    """Files that were cut off, and pages whose checksums are wrong."""
    source = tmp_path / "in.parquet"
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), source, **options)
    raw = source.read_bytes()
    cut = [(raw[: int(len(raw) * share)], "is not a complete Parquet file") for share in (0.1, 0.5, 0.99)]
    for content, message in [*cut, (raw.replace(b"juillet", b"fevrier"), "Parquet file .*(CRC|checksum)")]:
        source.write_bytes(content)
        with pytest.raises(InputError, match=message):
            generate_file(model, source, tmp_path / "out.jsonl", SMALL)
        check_files(tmp_path, "in.parquet")


ROWS: list[Any] = ["1.1.2000", None, "", "  ", "2" * 65, "3.1.2000", 7, "x" * 1_000_000, "4.1.2000"]
WRONG = {
    1: "the row has no text",
    2: "the text is empty; leave it out",
    3: "the text is white space only; leave it out",
    4: "the text has 65 tokens, the limit is 64; shorten it",
    6: "the row has no text",
    7: "the text has 1000000 characters, the limit is 10000; split it",
}


def test_rows_that_cannot_be_decoded_have_an_error(model: Model, tmp_path: Path) -> None:
    lines = [json.dumps({"id": number, "date": text}) for number, text in enumerate(ROWS)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    summary = generate_file(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", SMALL)
    assert (summary.num_rows, summary.num_errors) == (9, 6)
    found = read(tmp_path / "out.jsonl")
    assert [(row["id"], row["date"]) for row in found] == list(enumerate(ROWS))
    assert {row["id"]: row["output_error"] for row in found if row["output"] is None} == WRONG
    assert [row["output"] for row in found if row["output_error"] is None] == ["2000-01-01", "2000-01-03", "2000-01-04"]
    check_files(tmp_path, "in.jsonl", "out.jsonl")

    texts = [text if isinstance(text, str) else None for text in ROWS]
    pyarrow.parquet.write_table(pyarrow.table({"date": texts}), tmp_path / "in.parquet")
    for suffix in (".csv", ".parquet"):
        generate_file(model, tmp_path / "in.parquet", tmp_path / f"out{suffix}", SMALL)
        found = read(tmp_path / f"out{suffix}")
        assert [row["output_error"] or None for row in found] == [WRONG.get(number) for number in range(9)]


def test_a_row_without_an_allowed_token_has_an_error(model: Model, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("1.1.2000\n22.02.2000\n")
    vocab = model.spec.vocab
    assert model.tokenizer
    banned = tuple(token for token in range(vocab) if model.tokenizer.decode([token]) not in tuple("120-"))
    options = {"suppress_tokens": banned, "no_repeat_ngram_size": 1, "max_new_tokens": 6}
    generate_file(model, tmp_path / "in.txt", tmp_path / "out.jsonl", SMALL, **options)
    assert {row["output"] for row in read(tmp_path / "out.jsonl")} == {None}
    assert all("has no token to choose from" in row["output_error"] for row in read(tmp_path / "out.jsonl"))


def test_a_txt_output_cannot_hold_errors(model: Model, tmp_path: Path) -> None:
    """Such an input is refused before anything is decoded."""
    (tmp_path / "in.txt").write_bytes(b"1.1.2000\n\n" + b"2" * 65 + b"\n")
    (tmp_path / "out.txt").write_text("old")
    with pytest.raises(InputError, match=r"row 2: the text is empty.*; row 3: the text has 65 "):
        generate_file(model, tmp_path / "in.txt", tmp_path / "out.txt", BulkConfig(rows_per_part=1))
    assert (tmp_path / "out.txt").read_text() == "old"
    check_files(tmp_path, "in.txt", "out.txt")


def test_the_column_is_chosen_or_required(model: Model, tmp_path: Path) -> None:
    table = pyarrow.table({"a": TEXTS, "b": TEXTS[::-1], "n": range(len(TEXTS))})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    for column, message in [
        (None, "in.parquet: its columns with texts are a, b; choose one with --input-column"),
        ("c", "there is no column c, its columns with texts are a, b"),
        ("n", "in.parquet: column n has no texts, its columns with texts are a, b"),
    ]:
        with pytest.raises(InputError, match=message):
            generate_file(model, tmp_path / "in.parquet", tmp_path / "out.jsonl", BulkConfig(input_column=column))
    generate_file(model, tmp_path / "in.parquet", tmp_path / "out.jsonl", BulkConfig(input_column="b"))
    wanted = [(result.text, result.score, "eos", None) for result in model.generate(TEXTS[::-1])]
    check_outputs(outputs(tmp_path / "out.jsonl"), wanted)


def test_invalid_places_are_refused(model: Model, tmp_path: Path) -> None:
    source = write(tmp_path / "in.txt")
    (tmp_path / "folder.txt").mkdir()
    for target, message in [
        (tmp_path / "nowhere" / "out.txt", r"out.txt: cannot be written \(No such file or directory\)"),
        (tmp_path / "folder.txt", "folder.txt: is a directory"),
        (tmp_path / "out.xlsx", r"its suffix is not one of \.parquet, "),
        (f"{'x' * 250}.txt", "File name too long"),
    ]:
        with pytest.raises(InputError, match=message):
            generate_file(model, source, target, SMALL)
    with pytest.raises(InputError, match=r"missing\.txt: is missing"):
        generate_file(model, tmp_path / "missing.txt", tmp_path / "out.txt", SMALL)
    for wrong in ({"rows_per_part": 0}, {"batch_size": 0}, {"output_column": ""}, {"input_column": ""}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            BulkConfig(**wrong)  # type: ignore[arg-type]
    check_files(tmp_path, "in.txt", "folder.txt")


def test_input_columns_are_copied_to_the_output(
    model: Model, dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("1.1.2000\n")
    (tmp_path / "link.txt").symlink_to("in.txt")
    (tmp_path / "hard.txt").hardlink_to(tmp_path / "in.txt")
    (tmp_path / "sub").mkdir()
    same = [
        "in.txt",
        "./in.txt",
        "sub/../in.txt",
        tmp_path / "in.txt",
        "link.txt",
        "hard.txt",
        f"file://{tmp_path}/in.txt",
    ]
    for source, target in [*((one, "in.txt") for one in same), *(("in.txt", one) for one in same)]:
        with pytest.raises(InputError, match="is also the input"):
            generate_file(model, source, target, SMALL)
    for path in ("in.txt", "link.txt", "hard.txt"):
        (tmp_path / path).rename(tmp_path / path.removesuffix(".txt"))
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("in")
    for target in ("in", "sub/../in", "link", "hard"):
        done = run("generate", dates_bundle, "--input", tmp_path / "in", "--output", target)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "is also the input" in done.stderr
    assert (tmp_path / "in").read_text() == "1.1.2000\n"


def test_invalid_settings_are_refused_before_decoding(model: Model, tmp_path: Path) -> None:
    source, prefix = write(tmp_path / "in.txt"), BulkConfig(prefix="1" * 99)
    wrong = {"max_new_tokens": 99}, {"num_beams": 0}, {"nothing": 1}, {"config": prefix}, {"replace_unknowns": True}
    for options in wrong:
        with pytest.raises((InputError, ConfigError)):
            generate_file(model, source, tmp_path / "out.jsonl", **options)
    with locked(tmp_path / "out.jsonl"), pytest.raises(BundleError, match=r"out\.jsonl is being written by another"):
        generate_file(model, source, tmp_path / "out.jsonl", SMALL)
    check_files(tmp_path, "in.txt")


def test_an_output_is_replaced_through_its_link(model: Model, tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "out.txt").symlink_to("real.txt")
    generate_file(model, write(tmp_path / "in.txt"), tmp_path / "out.txt", SMALL)
    assert (tmp_path / "out.txt").is_symlink()
    assert len((tmp_path / "real.txt").read_text().splitlines()) == len(TEXTS)
    check_files(tmp_path, "in.txt", "out.txt", "real.txt")


def test_the_command_line_counts_rows_with_errors(dates_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("day,other\n1.1.2000,x\n,y\n")
    options = ["--input", tmp_path / "in.csv", "--output", tmp_path / "out.csv"]
    done = run("generate", dates_bundle, *options, "--input-column", "day", "--output-column", "iso")
    assert (done.exit_code, done.stdout) == (3, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("1 of 2 rows could not be decoded; ")
    assert last.endswith(f"for the reasons see column iso_error of {tmp_path / 'out.csv'}")
    found = [(row["iso"], row["iso_error"]) for row in read(tmp_path / "out.csv")]
    assert found == [("2000-01-01", ""), ("", "the text is empty; leave it out")]


def test_options_of_bulk_runs_need_files(dates_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("day\n1.1.2000\n")
    for arguments in (
        ["--input", tmp_path / "in.csv", "--input-column", "day"],
        ["--input", tmp_path / "in.csv"],
        ["--input", tmp_path / "in.csv", "--output", tmp_path / "out.xlsx"],
        ["--input", tmp_path / "in.csv", "--output", tmp_path / "out.csv", "--json"],
        ["1.1.2000", "--output-column", "iso"],
        ["--input", "s3://bucket/in.csv"],
        ["--input", "s3://bucket/in.csv", "--output", tmp_path / "out"],
        ["--input", tmp_path / "in.csv", "--output", "s3://bucket/out.jsonl", "--json"],
    ):
        done = run("generate", dates_bundle, *arguments)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "needs --input and --output that end with .parquet, .jsonl, .csv, .tsv or .txt" in done.stderr
        assert not (tmp_path / "out.xlsx").exists()
    missing = run("generate", dates_bundle, "--input", tmp_path / "no.csv", "--output", tmp_path / "out.csv")
    assert (missing.exit_code, "does not exist" in missing.stderr) == (1, True)
