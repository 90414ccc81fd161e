"""The comparison with other systems: outputs, rounds and ratios, missing peers, resuming, the converted model."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report
import side_by_side
import torch
from click.testing import CliRunner
from converters import Canonical, write_ctranslate2
from runner import CTRANSLATE2, OURS, REVISION, ResultFile, Weights, agreement, read_result
from side_by_side import PRECISIONS, SCHEMA, Setting, compare, matrix, taking_part
from timing import Effort

from tests.conftest import DATES, ROOT
from tests.tiny import config, randomise
from tfexport.errors import BenchError
from tfexport.nn.directory import save_model
from tfexport.nn.presets import preset
from tfexport.nn.transformer import Transformer

SMALL = Setting(model="dates", is_quantised=False, source_length=6, batch_size=2, num_beams=1, target_length=5)


@pytest.fixture
def weights(dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Weights:
    """The bundle of models/dates for both sides; CTranslate2 has no environment."""
    monkeypatch.setattr(side_by_side, "PAUSE_S", 0.0)
    monkeypatch.setattr(side_by_side, "TURN", Effort(least_runs=1))
    monkeypatch.setattr(side_by_side, "STARTS", 1)
    (tmp_path / "work" / "dates").mkdir(parents=True)
    (tmp_path / "work" / "dates" / "weights").symlink_to(DATES)
    for name in ("bundle-fp32", "revision-fp32"):
        (tmp_path / "work" / "dates" / name).symlink_to(dates_bundle)
    nowhere = tmp_path / "nowhere" / "python"
    return Weights(tmp_path / "work", {REVISION: Path(sys.executable), CTRANSLATE2: nowhere})


def run(weights: Weights, path: Path, *sizes: Setting, resume: bool = False) -> dict[str, Any]:
    found = ResultFile(path, SCHEMA, {}, resume=resume, loads=[], not_measured=[])
    compare(sizes, [REVISION, CTRANSLATE2], ["fp32"], 3, weights, found, lambda line: None)
    return read_result(path, SCHEMA)


def test_two_revisions_without_the_other_peer(weights: Weights, tmp_path: Path) -> None:
    document = run(weights, tmp_path / "found.json", SMALL)
    (cell,) = document["cells"]
    assert [(run["system"], run["equal"]) for run in cell["runs"]] == [(OURS, 1.0), (REVISION, 1.0)]
    assert all(len(run["seconds"]) == 3 for run in cell["runs"])
    (ratio,) = cell["ratios"]
    assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert {row["system"] for row in document["not_measured"]} == {CTRANSLATE2}
    assert all(20e6 < load["peak_bytes"][0] < 2e9 for load in document["loads"])
    assert "### Ratio to the other revision" in report.render(document)
    with pytest.raises(BenchError):
        run(weights, tmp_path / "found.json", SMALL)
    resumed = run(weights, tmp_path / "found.json", SMALL, replace(SMALL, batch_size=1), resume=True)
    assert resumed["cells"][0] == cell
    assert len(resumed["cells"]) == 2


def test_ratios_are_medians_over_rounds_of_the_faster_thread_setting() -> None:
    def timed(system: str, precision: str, threads: int | None, *seconds: list[float]) -> dict[str, Any]:
        median = sorted(turn[len(turn) // 2] for turn in seconds)[len(seconds) // 2] if seconds else 9
        about = {"system": system, "precision": precision, "threads": threads}
        return {**about, "seconds": seconds, "median_s": median}

    runs = [
        timed(OURS, "int8", None, [1, 1, 4], [2.0], [1.0]),
        timed(OURS, "int4", None, [0.5], [0.5], [0.5]),
        timed(CTRANSLATE2, "int8", 1, [2, 3, 4], [2.0], [2.0]),
        timed(CTRANSLATE2, "int8", 2, [9.0], [9.0], [9.0]),
        timed(CTRANSLATE2, "int8", 4),
    ]
    int8, int4 = report.ratios(runs)
    assert (int8["peer_threads"], int8["ratio"], int8["low"], int8["high"]) == (1, 2.0, 1.0, 3.0)
    assert (int4["peer_precision"], int4["ratio"], int4["high"]) == ("int8", 4.0, 6.0)


def test_outputs_agree_up_to_the_first_difference() -> None:
    found = agreement([[1, 2, 3], [1, 9, 3]], [[1, 2, 3], [1, 2, 3]])
    assert found == {"equal": 0.5, "equal_prefix": pytest.approx(4 / 6)}


def test_variants_of_a_setting() -> None:
    parts = map(str, taking_part(SMALL, [CTRANSLATE2], PRECISIONS, 2))
    assert [*parts] == ["tfexport fp32", "ctranslate2 fp32, 1 thread", "ctranslate2 fp32, 2 threads"]
    parts = map(str, taking_part(replace(SMALL, is_quantised=True), [REVISION], PRECISIONS, 2))
    assert [*parts] == ["tfexport int8, throughput", "tfexport int4, latency", "revision int8, throughput"]
    assert len(matrix(["tiny", "dates"], PRECISIONS, [32, 128], [1, 8, 32], [1, 4])) == 48


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("epyc*.json")), ids=lambda path: path.stem
)
def test_recorded_results_are_rendered_with_a_plot(path: Path, tmp_path: Path) -> None:
    (tmp_path / "found.json").write_bytes(path.read_bytes())
    done = CliRunner().invoke(report.main, [str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    recorded = path.with_suffix(".md").read_text(encoding="utf-8")
    found = (tmp_path / "found.md").read_text(encoding="utf-8")
    tables = [line for line in recorded.splitlines() if line.startswith("|")]
    assert [line for line in found.splitlines() if line.startswith("|")] == tables
    assert (tmp_path / "found.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_a_ctranslate2_model_gives_the_same_tokens(tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    ours = Transformer(replace(config(), embedding_scale=math.sqrt(32), tokens=preset("tiny").tokens)).eval()
    randomise(ours)
    save_model(ours, tmp_path / "model")
    write_ctranslate2(tmp_path / "model", tmp_path / "ctranslate2", None)
    translator = ctranslate2.Translator(str(tmp_path / "ctranslate2"), intra_threads=1)
    source, target = [5, 9, 14, 23], [ours.config.tokens.start]
    found = translator.translate_batch(
        [list(map(str, source))], beam_size=1, min_decoding_length=8, max_decoding_length=8
    )
    with torch.no_grad():
        for _ in range(8):
            logits = ours(torch.tensor([source]), torch.ones(1, 4, dtype=torch.bool), torch.tensor([target]))[0, -1]
            logits[ours.config.tokens.eos] = -torch.inf
            target.append(int(logits.argmax()))
    assert [*map(int, found[0].hypotheses[0])] == target[1:]


def test_other_models_are_not_converted() -> None:
    with pytest.raises(ValueError, match="post-norm"):
        Canonical.read(DATES)


@pytest.mark.parametrize("arguments", [["--models", "huge"], ["--python", "ctranslate2=/nowhere/python"]])
def test_wrong_arguments_are_refused_before_anything_runs(arguments: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(side_by_side.main, ["--output", str(tmp_path / "found.json"), *arguments])
    assert done.exit_code == 2
    assert not list(tmp_path.iterdir())
