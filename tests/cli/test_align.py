"""`tfexport align`: what each target token was read from, as numbers or with all weights; bad input is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tfexport
from tests.command import run

SOURCE, TARGET = "Dienstag, 3. März 2026", "2026-03-03"


@pytest.mark.parametrize("backend", ["ort", "eager"])
def test_digits_of_a_date_are_aligned_with_their_source(dates_aligned: Path, backend: str) -> None:
    with tfexport.load(dates_aligned, backend=backend, threads=1) as model:
        (found,) = model.align([SOURCE], [TARGET])
    assert ("".join(found.source_tokens), "".join(found.target_tokens)) == (SOURCE, TARGET)
    read = [slice(place, place + 1) for place in found.source_positions]
    assert [SOURCE[place] for place in read[:4]] == list("2026")
    month, day = SOURCE.index("März"), SOURCE.index("3.")
    assert found.source_positions[5] in range(month, month + 4)
    assert found.source_positions[6] in range(month, month + 4)
    assert found.weights[6, month : month + 4].sum() > 0.9
    assert found.source_positions[9] == day
    assert found.weights.sum(1) == pytest.approx(1, abs=1e-6)


def test_pairs_of_numbers(dates_aligned: Path, tmp_path: Path) -> None:
    lines = [f"{SOURCE}\t{TARGET}", "le 14 juillet 1989\t1989-07-14", "le 3\t2"]
    with tfexport.load(dates_aligned, threads=1) as model:
        found = model.align(*zip(*(line.split("\t") for line in lines), strict=True))
    expected = [" ".join(f"{s}-{t}" for t, s in enumerate(one.source_positions)) for one in found]
    assert expected[0].endswith("10-8 10-9")
    assert run("align", dates_aligned, *lines).stdout.splitlines() == expected
    options = ("--batch-size", 2, "--backend", "eager", "--output", tmp_path / "out")
    result = run("align", dates_aligned, *options, stdin="\n".join(lines).encode())
    assert (result.exit_code, result.output) == (0, "")
    assert (tmp_path / "out").read_text().splitlines() == expected


def test_the_output_of_generate_can_be_aligned(dates_aligned: Path) -> None:
    written = run("generate", dates_aligned, SOURCE, "le 14 juillet 1989", "--json").stdout
    rows = [
        json.loads(line) for line in run("align", dates_aligned, "--json", stdin=written.encode()).stdout.splitlines()
    ]
    assert [row["text"] for row in rows] == [TARGET, "1989-07-14"]
    for index, row in enumerate(rows):
        assert list(row) == [
            "index", "input", "text", "source_ids", "target_ids", "weights", "source_positions", "source_tokens",
            "target_tokens",
        ]  # fmt: skip
        assert (row["index"], "".join(row["source_tokens"])) == (index, row["input"])
        weights = np.array(row["weights"])
        assert weights.shape == (len(row["target_ids"]), len(row["source_ids"]))
        assert weights.argmax(1).tolist() == row["source_positions"]


def test_every_bad_line_is_named(dates_aligned: Path) -> None:
    result = run("align", dates_aligned, stdin=f"\t2026\nle 3\t{'1' * 200}".encode())
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(
        "error: align: pair 1: source is empty; leave it out; pair 2: target has 200 tokens"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("-3:9", "alignment: layer is -3, but the decoder has 2; give 0 to 1, or -1 for the last; heads has 9, but a "),
        ("1:-1", "alignment: heads is -1, expected numbers from 0, once each"),
        ("last", "'last' is not a layer and heads; write 1 for all heads of layer 1, or 1:0,2"),
    ],
)  # fmt: skip
def test_a_missing_model_feature_is_refused_before_tracing(given: str, message: str, tmp_path: Path) -> None:
    result = run("onnx", "models/dates", "--output", tmp_path / "out", "--alignment", given)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert "tracing" not in result.stderr
    assert not (tmp_path / "out").exists()
