"""`tfexport generate` and `embed`: texts in, texts out, and what happens to bad input."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfexport
from tests.command import TFEXPORT, ran, refuses, run
from tests.conftest import DATES, ROOT
from tfexport.runtime.ort import backend as ort_backend
from tfexport.runtime.ort._contrib import ContribBatch
from tfexport.runtime.session import Candidates, GreedySteps, Ids

VOCAB = json.loads((DATES / "tokenizer.json").read_text())["model"]["vocab"]
TEXTS = ["Dienstag, 3. März 2026", "2026年3月3日火曜日", "30 июня 2019 г.", "15 de septiembre de 2001"]
ENCODER = ROOT / "tests" / "data" / "earlier" / "encoder"
ISO = ["2026-03-03", "2026-03-03", "2019-06-30", "2001-09-15"]


@pytest.mark.parametrize("variant", ["concat", "static", "contrib"])
def test_the_requested_variant_runs(variant: str, dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    take = ort_backend.OrtSession

    def note(graphs: Any, variant: Any, *more: Any, **settings: Any) -> Any:
        opened.append(variant)
        return take(graphs, variant, *more, **settings)

    monkeypatch.setattr(ort_backend, "OrtSession", note)
    result = run("generate", dates_bundle, TEXTS[0], "--variant", variant)
    assert (result.exit_code, result.stdout.splitlines(), opened) == (0, ISO[:1], [variant])


@pytest.mark.parametrize(
    ("command", "arguments"), [("generate", TEXTS[:1]), ("score", [f"{TEXTS[0]}\t{ISO[0]}"]), ("embed", ["w7"])]
)
def test_the_requested_number_of_threads_runs(
    command: str, arguments: list[str], dates_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = ENCODER if command == "embed" else dates_bundle
    with caplog.at_level(logging.INFO, "tfexport.model"):
        assert run(command, bundle, *arguments, "--threads", 3).exit_code == 0
    assert caplog.messages[-1].endswith("with 3 threads for the encoder, 3 for a step")
    assert run(command, bundle, *arguments, "--threads", "auto").exit_code == 0
    refused = run(command, bundle, *arguments, "--threads", 0)
    assert refused.exit_code != 0
    assert "--threads" in refused.stderr


@pytest.mark.parametrize("source", ["-", None, "file"])
def test_texts_from_a_file_or_standard_input(dates_bundle: Path, tmp_path: Path, source: str | None) -> None:
    data = "\r\n".join(TEXTS).encode("utf-8-sig")
    (tmp_path / "in").write_bytes(data)
    option = [] if source is None else ["--input", tmp_path / "in" if source == "file" else "-"]
    result = run("generate", dates_bundle, *option, "--output", tmp_path / "out", "--batch-size", 3, stdin=data)
    assert (result.exit_code, result.output) == (0, "")
    assert (tmp_path / "out").read_text().splitlines() == ISO


def test_json_output_has_all_fields_of_the_result(dates_bundle: Path) -> None:
    result = run("generate", dates_bundle, *TEXTS, "--json", "--num-beams", 4, "--num-return-sequences", 2)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    with tfexport.load(dates_bundle) as model:
        expected = model.generate(TEXTS, num_beams=4, num_return_sequences=2)
    assert [(row["index"], row["input"]) for row in rows] == [(i // 2, TEXTS[i // 2]) for i in range(8)]
    assert [(row["text"], row["token_ids"], row["score"], row["finish_reason"]) for row in rows] == [
        (best.text, list(best.token_ids), best.score, best.finish_reason) for best in expected
    ]


def test_only_lines_with_scores_need_them(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, multi_step = list[bool](), ContribBatch.multi_step

    def noted(batch: ContribBatch, target_ids: Ids, steps: GreedySteps) -> Candidates:
        asked.append(steps.needs_scores)
        return multi_step(batch, target_ids, steps)

    monkeypatch.setattr(ContribBatch, "multi_step", noted)
    for options, wanted in ((), False), (("--json",), True), (("--json", "--no-return-scores"), False):
        result = run("generate", dates_bundle, TEXTS[0], *options, "--backend", "ort")
        assert set(asked) == {wanted}
        assert not options or (json.loads(result.stdout)["score"] is not None) == wanted
        asked.clear()


def test_several_texts_an_input_are_numbered_and_scored(dates_bundle: Path) -> None:
    result = run("generate", dates_bundle, *TEXTS[:2], "--num-beams", 3, "--num-return-sequences", 3)
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "1", "2", "2", "2"]
    assert [rows[0][2], rows[3][2]] == ISO[:2]
    assert float(rows[0][1]) > float(rows[1][1]) >= float(rows[2][1])


def test_fewer_outputs_than_requested_stay_with_their_input(dates_bundle: Path) -> None:
    """Two tokens may be said, so that there are two alternatives of the three that are asked for."""
    left = [VOCAB["1"], VOCAB["2"]]
    banned = ",".join(str(token) for token in VOCAB.values() if token not in left)
    command = ["generate", dates_bundle, *TEXTS, "--suppress-tokens", banned, "--max-new-tokens", 3]
    command += ["--return-alternatives", "--num-return-sequences", 3]
    rows = [line.split("\t") for line in run(*command).stdout.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "2", "3", "3", "4", "4"]
    rows = [json.loads(line) for line in run(*command, "--json").stdout.splitlines()]
    assert [(row["index"], row["input"]) for row in rows] == [(i // 2, TEXTS[i // 2]) for i in range(8)]


def test_every_option_reaches_the_decoder(dates_bundle: Path) -> None:
    dash = VOCAB["-"]
    assert run("generate", dates_bundle, TEXTS[0], "--max-new-tokens", 4).stdout == "2026\n"
    assert run("generate", dates_bundle, TEXTS[0], "--prefix", "1999-").stdout.startswith("1999-")
    biased = ["generate", dates_bundle, TEXTS[0], "--prefix", "1999-", "--prefix-bias-beta"]
    assert [run(*biased, beta).stdout for beta in ("0.01", "0.999")] == [f"{ISO[0]}\n", run(*biased, 0).stdout]
    assert "-" not in run("generate", dates_bundle, TEXTS[0], "--suppress-tokens", f"{dash}, 1").stdout
    biased = f"{VOCAB['2']},{VOCAB['0']}=-99"
    assert "20" not in run("generate", dates_bundle, TEXTS[0], "--sequence-bias", biased).stdout
    hurried = run("generate", dates_bundle, TEXTS[0], "--exponential-decay-length-penalty", "3,1000")
    assert hurried.stdout == "2026\n"
    drawn = ["generate", dates_bundle, TEXTS[0], "--do-sample", "--temperature", 3, "--num-return-sequences", 4]
    assert run(*drawn, "--seed", 1).stdout == run(*drawn, "--seed", 1).stdout != run(*drawn, "--seed", 2).stdout
    for value in ("true", "false", "never"):
        result = run("generate", dates_bundle, TEXTS[0], "--num-beams", 2, "--early-stopping", value)
        assert result.stdout == f"{ISO[0]}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "Missing argument 'BUNDLE'"),
        (["generate", "b", "x", "--input", "-"], "TEXT and --input are both given"),
        (["generate", "b", "--input", "/no/such/file"], "/no/such/file"),
        (["generate", "b", "x", "--backend", "tpu"], "'tpu' is not one of"),
        (["generate", "b", "x", "--suppress-tokens", "1,a"], "'a' is not a valid integer"),
    ],
)
def test_wrong_usage_exits_with_1_too(arguments: list[str], message: str) -> None:
    result = ran(*arguments, code=1)
    assert message in result.stderr


def test_an_interrupt_exits_with_130_and_leaves_nothing(dates_bundle: Path, tmp_path: Path) -> None:
    """Ctrl-C arrives while the input is awaited."""
    pipe = tmp_path / "in"
    os.mkfifo(pipe)
    command = [TFEXPORT, "generate", str(dates_bundle), "--input", str(pipe), "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, pipe.open("wb"):  # once it is read
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate()
    assert (process.returncode, stderr.strip()) == (130, "interrupted")
    assert list(tmp_path.iterdir()) == [pipe]


def test_embed_writes_the_vectors_of_the_library() -> None:
    variants = (({}, []), ({"pooling": "cls"}, ["--pooling", "cls"]), ({"normalize": False}, ["--no-normalize"]))
    for options, arguments in variants:
        result = run("embed", ENCODER, "w7 w8", "w9", *arguments)
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert [row["input"] for row in rows] == ["w7 w8", "w9"]
        with tfexport.load(ENCODER) as model:
            expected = model.embed(["w7 w8", "w9"], **options)  # type: ignore[arg-type]
        np.testing.assert_allclose([row["embedding"] for row in rows], expected, rtol=1e-5, atol=1e-6)


def test_generate_and_embed_refer_to_each_other(dates_bundle: Path) -> None:
    refuses(run("generate", ENCODER, "x"), f"generates no text; use tfexport embed {ENCODER}")
    refuses(run("embed", dates_bundle, "x"), "generate")
    refuses(run("score", ENCODER, "x\ty"), "encoder-only and reads no target; use embed")
    refuses(run("triton", ENCODER, "--output", "build/models"), "generates no text")
