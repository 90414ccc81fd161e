"""`tfexport score`: pairs in as lines or JSON, sums or everything out; bad input is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tfexport
from tests.command import run
from tfexport.decode.score import Score

PAIRS = [("Dienstag, 3. März 2026", "2026-03-03"), ("le 14 juillet 1989", "1989-07-14"), ("le 14 juillet 1989", "1990")]


@pytest.fixture(scope="module")
def scores(dates_bundle: Path) -> list[Score]:
    with tfexport.load(dates_bundle, threads=1) as model:
        return model.score(*zip(*PAIRS, strict=True))


def test_sums_of_tab_separated_pairs(dates_bundle: Path, scores: list[Score], tmp_path: Path) -> None:
    lines = ["\t".join(pair) for pair in PAIRS]
    expected = [f"{one.log_prob:z.4f}" for one in scores]
    assert scores[0].log_prob > -0.01 > -5 > scores[2].log_prob
    assert run("score", dates_bundle, *lines).stdout.splitlines() == expected
    data = "\r\n".join(lines).encode("utf-8-sig")
    (tmp_path / "in").write_bytes(data)
    assert run("score", dates_bundle, stdin=data).stdout.splitlines() == expected
    result = run("score", dates_bundle, "--input", tmp_path / "in", "--output", tmp_path / "out", "--batch-size", 2)
    assert (result.exit_code, result.output) == (0, "")
    assert (tmp_path / "out").read_text().splitlines() == expected


def test_the_output_of_generate_can_be_scored(dates_bundle: Path) -> None:
    given = [source for source, _ in PAIRS[:2]]
    generated = run("generate", dates_bundle, *given, "--num-beams", 2, "--json").stdout
    result = run("score", dates_bundle, "--json", stdin=generated.encode())
    rows, written = ([json.loads(line) for line in text.splitlines()] for text in (result.stdout, generated))
    for index, (row, other) in enumerate(zip(rows, written, strict=True)):
        assert list(row) == ["index", "input", "text", "token_ids", "log_probs", "log_prob"]
        assert (row["index"], row["input"], row["text"]) == (index, other["input"], other["text"])
        assert row["token_ids"] == other["token_ids"]
        assert row["log_prob"] == pytest.approx(other["score"] * len(row["token_ids"]), rel=1e-4, abs=1e-6)


def test_the_end_can_be_left_out(dates_bundle: Path, scores: list[Score]) -> None:
    result = run("score", dates_bundle, "\t".join(PAIRS[2]), "--no-add-eos", "--json")
    row = json.loads(result.stdout)
    assert row["token_ids"] == list(scores[2].token_ids[:-1])
    assert row["log_prob"] == pytest.approx(sum(scores[2].log_probs[:-1]), abs=1e-4)


def test_every_bad_line_is_named(dates_bundle: Path) -> None:
    lines = ["no tab", "a\tb", "a\tb\tc", "{broken", '{"input": "a"}', '{"input": "a", "text": 3}', "[1]"]
    result = run("score", dates_bundle, stdin="\n".join(lines).encode())
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(
        "error: input: pair 1 has 0 tabs, expected source, one tab and target; pair 3 has 2"
    )
    for number in (4, 5, 6, 7):
        assert f"; pair {number} " in result.stderr
    assert "pair 2" not in result.stderr
