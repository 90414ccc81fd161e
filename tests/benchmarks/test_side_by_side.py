"""The comparison with other systems: rounds and ratios, what is missing or dies, resuming, weights, the report."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

from tests.conftest import DATES, ROOT
from tests.tiny import batch, config, randomise
from tfexport.bench.timing import Effort
from tfexport.errors import BenchError
from tfexport.models.directory import save_model
from tfexport.models.presets import preset
from tfexport.models.transformer import Transformer

sys.path.insert(0, str(ROOT / "benchmarks"))

import report
import side_by_side
from comparison import markdown, picture, result, rounds, systems
from comparison.converters import Canonical, write_ctranslate2, write_marian
from comparison.run import Selection, compare
from comparison.systems import (
    FOREIGN,
    OURS,
    PRECISIONS,
    REVISION,
    SYSTEMS,
    Setting,
    System,
    Variant,
    matrix,
    taking_part,
)
from comparison.weights import ConvertedWeights

SMALL = Setting(model="dates", is_quantised=False, source_length=6, batch_size=2, num_beams=1, target_length=5)
# A system of the standard library alone, whose words and misfortunes the name of its weights' folder chooses.
SCRIPTED = """
import os, sys, time
from comparison.workers import protocol

class Scripted(protocol.System):
    libraries = ("click",)

    def convert(self, weights, target, precision):
        if "unwilling" in sys.argv[0] or "unwilling" in str(target):
            raise ValueError("cannot\\n  convert")
        target.mkdir()

    def import_library(self):
        pass

    def load(self, folder, precision, threads):
        print("what libraries say")
        self.folder = str(folder)

    def call(self, sources, num_beams, new_tokens):
        if "mortal" in self.folder and len(sources) > 1:
            print("last words", file=sys.stderr)
            os._exit(3)
        shift = 1 if "other" in self.folder else 0
        return lambda: time.sleep(0.002) or [[source[0]] * (new_tokens - 1) + [source[0] + shift] for source in sources]

    def tokens(self, found):
        return found

protocol.serve(Scripted())
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PAUSE_S", 0.0)
    monkeypatch.setattr(rounds, "TURN", Effort(least_runs=3))
    monkeypatch.setattr(rounds, "STARTS", 2)


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConvertedWeights:
    """Scripted systems, ours among them; the folder of ours is there already."""
    (tmp_path / "scripted.py").write_text(SCRIPTED, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in (OURS, "same", "other", "mortal", "unwilling"):
        files = "bundle" if name == OURS else name
        monkeypatch.setitem(SYSTEMS, name, System(module="scripted", environment=OURS, files=files))
    absent = System(module="scripted", environment="absent", files="absent")
    monkeypatch.setitem(SYSTEMS, "absent", absent)
    monkeypatch.setitem(SYSTEMS, "slow", replace(SYSTEMS["same"], is_slow=True))
    bare = System(module="comparison.workers.nothing", environment=OURS, files="bare")
    monkeypatch.setitem(SYSTEMS, "bare", bare)
    for model in ("dates", "tiny"):
        weights = tmp_path / model / "weights"
        weights.mkdir(parents=True)
        (weights / "config.json").write_text('{"source_vocab": 40}', encoding="utf-8")
        (tmp_path / model / "bundle-fp32").mkdir()
    nowhere = tmp_path / "nowhere" / "python"
    return ConvertedWeights(tmp_path, {OURS: Path(sys.executable), "absent": nowhere, REVISION: nowhere})


def selection(*peers: str, rounds: int = 4) -> Selection:
    return Selection(peers=peers, precisions=["fp32"], cores=2, rounds=rounds)


def run(
    weights: ConvertedWeights, path: Path, peers: Sequence[str], sizes: Sequence[Setting] = (SMALL,)
) -> dict[str, Any]:
    found = result.Result(path, {}, resume=False)
    compare(sizes, selection(*peers), weights, found, lambda line: None)
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert document == found.document
    return document


def reasons(document: dict[str, Any]) -> dict[str, str]:
    return {row["system"]: row["reason"] for row in document["not_measured"]}


def test_a_bundle_beside_that_of_another_revision(
    dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real worker: outputs are those of the library, each has its turn in every round, and starting is measured."""
    monkeypatch.setattr(rounds, "STARTS", 1)
    (tmp_path / "work" / "dates").mkdir(parents=True)
    (tmp_path / "work" / "dates" / "weights").symlink_to(DATES)
    for files in ("bundle-fp32", "revision-fp32"):
        (tmp_path / "work" / "dates" / files).symlink_to(dates_bundle)
    weights = ConvertedWeights(tmp_path / "work", dict.fromkeys((OURS, REVISION), Path(sys.executable)))
    document = run(weights, tmp_path / "found.json", [REVISION])
    (cell,) = document["cells"]
    assert [(run["system"], run["equal"], run["equal_prefix"]) for run in cell["runs"]] == [
        (OURS, 1.0, 1.0),
        (REVISION, 1.0, 1.0),
    ]
    assert all(len(run["seconds"]) == 4 and min(map(len, run["seconds"])) >= 1 for run in cell["runs"])
    (ratio,) = cell["ratios"]
    assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
    for load in document["loads"]:
        assert load["load_s"][0] > 0
        assert 20e6 < load["peak_bytes"][0] < 2e9
        assert load["versions"]["onnxruntime"]
    assert "### Ratio to the other revision" in markdown.render(document)
    assert document["environment"]["cpu"]
    assert document["schema"] == "tfexport.side_by_side/1"


def test_outputs_are_compared_and_all_have_their_turns(scripted: ConvertedWeights, tmp_path: Path) -> None:
    document = run(scripted, tmp_path / "found.json", ["same", "other", "slow"])
    runs = {run["system"]: run for run in document["cells"][0]["runs"]}
    assert {name: (run["equal"], run["equal_prefix"]) for name, run in runs.items()} == {
        OURS: (1.0, 1.0),
        "same": (1.0, 1.0),
        "other": (0.0, 0.8),
        "slow": (1.0, 1.0),
    }
    assert {name: len(run["seconds"]) for name, run in runs.items()} == {OURS: 4, "same": 4, "other": 4, "slow": 3}
    assert all(len(turn) >= 3 and min(turn) >= 0.002 for run in runs.values() for turn in run["seconds"])
    for run_of in runs.values():
        assert run_of["tokens_per_second"] == pytest.approx(10 / run_of["median_s"])
    starts = {load["system"]: len(load["load_s"]) for load in document["loads"]}
    assert starts == {OURS: 2, "same": 2, "other": 2, "slow": 1}
    assert "other | fp32 | dates | 0.0 % (differs) | 80.0 %" in markdown.render(document)


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        ("absent", r"absent fp32: no Python at .*nowhere/python \(.*\); run benchmarks/environments or give --python"),
        (REVISION, r"revision fp32: tfexport onnx: no Python at .*nowhere/python \(.*\); give --python"),
        ("bare", r"bare fp32: the process ended with exit code 1 during convert \(.*No module named .*nothing.*\)"),
        ("mortal", r"mortal fp32: the process ended with exit code 3 during call \(last words\)"),
        ("unwilling", r"unwilling fp32: convert failed: ValueError: cannot convert"),
    ],
)
def test_who_cannot_take_part_is_listed_with_the_reason(
    peer: str, reason: str, scripted: ConvertedWeights, tmp_path: Path
) -> None:
    larger = replace(SMALL, batch_size=3)
    document = run(scripted, tmp_path / "found.json", [peer, "same"], [SMALL, larger])
    assert set(reasons(document)) == {peer}
    assert re.fullmatch(reason, reasons(document)[peer])
    for cell in document["cells"]:
        assert [ratio["peer"] for ratio in cell["ratios"]] == ["same"]
    assert reasons(document)[peer] in markdown.render(document)


def test_when_our_own_fails_what_was_measured_stays(scripted: ConvertedWeights, tmp_path: Path) -> None:
    (tmp_path / "dates" / "bundle-fp32").rename(tmp_path / "mortal")
    (tmp_path / "dates" / "bundle-fp32").symlink_to(tmp_path / "mortal")
    with pytest.raises(BenchError, match=r"tfexport fp32: the process ended with exit code 3 during call"):
        run(scripted, tmp_path / "found.json", ["same"], [replace(SMALL, batch_size=1), SMALL])
    document = result.read(tmp_path / "found.json")
    assert [cell["setting"]["batch_size"] for cell in document["cells"]] == [1]


def test_a_run_is_resumed_where_it_ended(scripted: ConvertedWeights, tmp_path: Path) -> None:
    path, larger = tmp_path / "found.json", replace(SMALL, batch_size=3)
    before = run(scripted, path, ["same"])
    lines: list[str] = []
    found = result.Result(path, {}, resume=True)
    compare([SMALL, larger], selection("same"), scripted, found, lines.append)
    after = result.read(path)
    assert after["cells"][0] == before["cells"][0]
    assert [cell["setting"]["batch_size"] for cell in after["cells"]] == [2, 3]
    assert lines[0] == "1 of 2 settings are measured already"
    assert lines[1].startswith("[1/1, 0 min left] dates fp32, source 6, batch 3, greedy: fp32 ")
    assert [load["system"] for load in after["loads"]] == [OURS, "same"]


def test_what_cannot_be_resumed_is_refused(scripted: ConvertedWeights, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    run(scripted, path, ["same"])
    with pytest.raises(BenchError, match=r"is there already; go on with it by --resume, or choose another --output"):
        result.Result(path, {}, resume=False)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["environment"]["cpu"] = "Z80"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(BenchError, match=r"cannot be resumed: cpu was Z80 and is .*; options was {} and is {'a': 1}"):
        result.Result(path, {"a": 1}, resume=True)
    for text, problem in (("{", "is not JSON"), ("{}", "expected schema"), ("[]", "expected schema")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(BenchError, match=problem):
            result.Result(path, {}, resume=True)
    with pytest.raises(BenchError, match="No such file"):
        result.read(tmp_path / "missing.json")


def timed(system: str, precision: str, threads: int | None, *turn_seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "system": system,
        "precision": precision,
        "threads": threads,
        "seconds": [list(turn) for turn in turn_seconds],
        "median_s": sorted(turn[len(turn) // 2] for turn in turn_seconds)[len(turn_seconds) // 2]
        if turn_seconds
        else 9,
    }


def test_a_ratio_is_the_median_over_rounds_of_the_faster_thread_setting() -> None:
    runs = [
        timed(OURS, "int8", None, [1, 1, 4], [2.0], [1.0]),
        timed(OURS, "int4", None, [0.5], [0.5], [0.5]),
        timed("ctranslate2", "int8", 1, [2, 3, 4], [2.0], [2.0]),
        timed("ctranslate2", "int8", 2, [9.0], [9.0], [9.0]),
        timed("ctranslate2", "int8", 4),
    ]
    int8, int4 = result.ratios(runs)
    assert (int8["precision"], int8["peer_threads"], int8["ratio"], int8["low"], int8["high"]) == (
        "int8", 1, 2.0, 1.0, 3.0,
    )  # fmt: skip
    assert (int4["precision"], int4["peer_precision"], int4["ratio"], int4["high"]) == ("int4", "int8", 4.0, 6.0)


def test_a_long_call_is_its_own_warm_up_unless_the_system_is_slow(
    scripted: ConvertedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, expected in ((0.0, {OURS: 1, "same": 1, "slow": 3}), (2.0, {OURS: 3, "same": 3, "slow": 3})):
        monkeypatch.setattr(rounds, "LONG_CALL_S", limit)
        (cell,) = run(scripted, tmp_path / f"{limit}.json", ["same", "slow"])["cells"]
        assert {run["system"]: len(run["warm_up_s"]) for run in cell["runs"]} == expected


def test_a_clearly_slower_thread_setting_takes_no_part_in_the_rounds() -> None:
    quick, slow, close = (Variant(system="ctranslate2", threads=n) for n in (1, 2, 3))
    ours = Variant(system=OURS)
    runs = {variant: {"warm_up_s": [s]} for variant, s in ((ours, 9.0), (quick, 1.0), (slow, 1.6), (close, 1.4))}
    assert rounds._taking_part(runs, 6) == [ours, quick, close]


def test_outputs_agree_up_to_the_first_token_that_differs() -> None:
    assert rounds.agreement([[1, 2, 3], [1, 9, 3]], [[1, 2, 3], [1, 2, 3]]) == {
        "equal": 0.5,
        "equal_prefix": pytest.approx(4 / 6),
    }


def test_who_takes_part() -> None:
    def names(found: Sequence[Variant]) -> list[str]:
        return [str(variant) for variant in found]

    everyone = {"peers": FOREIGN, "precisions": PRECISIONS, "shortest_source": 32, "cores": 2}
    short = Setting(model="tiny", is_quantised=False, source_length=32, batch_size=1, num_beams=1)
    assert names(taking_part(short, **everyone)) == [
        "tfexport fp32",
        "ctranslate2 fp32, 1 thread",
        "ctranslate2 fp32, 2 threads",
        "transformers fp32, 2 threads",
        "torch.compile fp32, 2 threads",
        "optimum-onnx fp32",
    ]
    assert len(taking_part(replace(short, source_length=128), **everyone)) == 3
    assert names(taking_part(replace(short, is_quantised=True, batch_size=8), **everyone)) == [
        "tfexport int8, throughput",
        "tfexport int4, latency",
        "ctranslate2 int8, 1 thread",
        "ctranslate2 int8, 2 threads",
    ]
    assert names(taking_part(replace(short, is_quantised=True), **{**everyone, "peers": [REVISION]})) == [
        "tfexport int8, latency",
        "tfexport int4, latency",
        "revision int8, latency",
    ]
    only_int4 = taking_part(replace(short, is_quantised=True), **{**everyone, "precisions": ["int4"], "cores": 1})
    assert names(only_int4) == ["tfexport int4, latency", "ctranslate2 int8, 1 thread"]


def test_the_matrix_is_every_combination_and_its_sources_are_fixed() -> None:
    found = matrix(["tiny", "paper-base"], [False, True], [32, 128], [1, 8, 32], [1, 4])
    assert len(set(found)) == 48
    assert [setting.target_length for setting in matrix(["dates"], [False], [32], [1], [1])] == [16]
    assert [setting.is_quantised for setting in found] == [False] * 12 + [True] * 12 + [False] * 12 + [True] * 12
    sources = found[-1].sources(32_000)
    assert sources == found[-1].sources(32_000)
    assert (len(sources), len(sources[0])) == (32, 128)
    assert min(map(min, sources)) >= 4
    assert found[-1].target_length == systems.TARGET_LENGTH == 64


@pytest.mark.parametrize("name", ["tiny", "tied"])
def test_a_marian_model_computes_the_same(name: str, tmp_path: Path) -> None:
    """Against Hugging Face's own code; `tied` has one table for all three and attention without bias."""
    from transformers import MarianMTModel

    tied = dict.fromkeys(("tie_embeddings", "tie_output"), True) | {"attention_bias": False, "output_bias": False}
    ours = Transformer(replace(config(), embedding_scale=math.sqrt(32), **(tied if name == "tied" else {}))).eval()
    randomise(ours)
    save_model(ours, tmp_path / "model")
    write_marian(tmp_path / "model", tmp_path / "marian")
    theirs = MarianMTModel.from_pretrained(tmp_path / "marian").eval()
    source_ids, mask, target_ids = batch()
    with torch.no_grad():
        expected = theirs(input_ids=source_ids, attention_mask=mask.long(), decoder_input_ids=target_ids).logits
        torch.testing.assert_close(ours(source_ids, mask, target_ids), expected, atol=1e-4, rtol=1e-4)


def test_a_ctranslate2_model_says_the_same(tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    ours = Transformer(replace(config(), embedding_scale=math.sqrt(32), tokens=preset("tiny").tokens)).eval()
    randomise(ours)
    save_model(ours, tmp_path / "model")
    write_ctranslate2(tmp_path / "model", tmp_path / "ctranslate2", None)
    translator = ctranslate2.Translator(str(tmp_path / "ctranslate2"), intra_threads=1)
    source = [5, 9, 14, 23]
    said = translator.translate_batch(
        [list(map(str, source))], beam_size=1, min_decoding_length=8, max_decoding_length=8
    )
    target = [ours.config.tokens.start]
    with torch.no_grad():
        for _ in range(8):
            logits = ours(torch.tensor([source]), torch.ones(1, 4, dtype=torch.bool), torch.tensor([target]))[0, -1]
            logits[ours.config.tokens.eos] = -torch.inf
            target.append(int(logits.argmax()))
    assert [*map(int, said[0].hypotheses[0])] == target[1:]


def test_a_model_that_not_all_compute_alike_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"encoder: .*; expected the post-norm transformer of the paper"):
        Canonical.read(DATES)


def recorded() -> dict[str, Any]:
    """A small result with round numbers: ours takes 1 s, CTranslate2 what the cell says."""
    cells = []
    for precision, num_beams, batch_size, seconds in (
        ("fp32", 1, 1, 2.0), ("fp32", 1, 8, 0.5), ("fp32", 4, 1, 3.0), ("int8", 1, 1, 4.0),
    ):  # fmt: skip
        peer = {"optimize_for": None, "warm_up_s": [1.0], "equal": 1.0, "equal_prefix": 1.0}
        runs = [
            {**peer, **timed(OURS, precision, None, [1.0], [1.0]), "tokens_per_second": 64.0 * batch_size},
            {**peer, **timed("ctranslate2", precision, 1, [seconds], [seconds]), "tokens_per_second": 32.0},
        ]
        if precision == "int8":
            runs.insert(1, {**runs[0], **timed(OURS, "int4", None, [0.5], [0.5])})
        else:
            runs.append({**peer, **timed("transformers", "fp32", 2, [8.0]), "tokens_per_second": 8.0})
        setting = Setting(
            model="tiny", is_quantised=precision != "fp32", source_length=32, batch_size=batch_size, num_beams=num_beams
        )
        cells.append({"setting": setting.to_dict(), "runs": runs, "ratios": result.ratios(runs)})
    load = {"import_s": [0.1], "load_s": [0.2, 0.3, 0.4], "first_call_s": [0.5], "peak_bytes": [7e7]}
    about = {"model": "tiny", "is_quantised": False, **Variant(system="optimum-onnx").to_dict()}
    versions = {"tfexport": "0.1", "onnxruntime": "1.31"}
    return {
        "schema": result.SCHEMA,
        "environment": {"cpu": "A CPU", "cores": 4, "threads": 2, "system": "Linux", "date": "2026-01-02T03:04:05"},
        "revision": "0123456789abcdef+",
        "options": {"rounds": 2, "target_length": 64},
        "cells": cells,
        "loads": [{"model": "tiny", **Variant(system=OURS).to_dict(), **load, "versions": versions}],
        "not_measured": [{**about, "reason": "optimum-onnx fp32: no Python | at all"}],
    }


def test_the_report_says_what_the_result_does(tmp_path: Path) -> None:
    (tmp_path / "found.json").write_text(json.dumps(recorded()), encoding="utf-8")
    done = CliRunner().invoke(report.main, [str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "found.md").read_text(encoding="utf-8")
    for line in (
        "A CPU, 2 of 4 cores, Linux, 2026-01-02; tfexport 0.1, onnxruntime 1.31; revision 0123456789ab+; 2 rounds, 64 ",
        "| tiny | fp32 | greedy | 2.00 | **0.50** |",
        "| tiny | fp32 | beam 4 | 3.00 |  |",
        "| tiny | int4 | greedy | 8.00 |  |",
        "| fp32 greedy | 1.00 | 2 |",
        "| greedy | 1.59 | 3 |",  # the cube root of 2 · 0.5 · 4
        "| all | 1.86 | 4 |",
        "| int4 at batch 1 | 8.00 | 1 |",
        "| tiny | fp32 | greedy | 32 | 8 | ctranslate2 fp32, 1 thread | 0.50 (0.50 to 0.50) |",
        "| tiny | fp32 | greedy | 64 / 32 | 512 / 32 |",
        "| transformers | tiny | greedy | 8.00 | 8.00 | 2 |",
        "| tiny | tfexport fp32 | default | 100 | 300 | 500 | 70 |",
        "| tiny | optimum-onnx fp32: no Python \\| at all |",
    ):
        assert line in text
    assert text.count("**0.50**") == 1


def test_the_plot_holds_all_it_needs(tmp_path: Path) -> None:
    svg = picture.draw(recorded())
    tree = ElementTree.fromstring(svg)
    assert not [node for node in tree.iter() if any("href" in name for name in node.attrib)]
    assert "url(" not in svg
    assert svg.count("http") == 1  # the name space
    assert "prefers-color-scheme: dark" in svg
    dots = {
        title.text: float(dot.attrib["cx"])
        for dot in tree.iter("{http://www.w3.org/2000/svg}circle")
        for title in dot.iter("{http://www.w3.org/2000/svg}title")
        if title.text
    }
    by_value = sorted(dots.items(), key=lambda dot: dot[1])
    values = [float(re.search(r": ([\d.]+) \(", text)[1]) for text, _ in by_value]  # type: ignore[index]
    assert values == sorted(values) == [0.5, 2.0, 3.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    (one,) = (line for line in tree.iter("{http://www.w3.org/2000/svg}line") if line.attrib["class"] == "one")
    assert by_value[0][1] < float(one.attrib["x1"]) < by_value[1][1]
    # Twice as fast is as far from the line as half as fast.
    assert by_value[1][1] - float(one.attrib["x1"]) == pytest.approx(float(one.attrib["x1"]) - by_value[0][1], abs=0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "huge"], "'huge' is not one of 'tiny', 'paper-base', 'paper-big', 'dates'"),
        (["--peers", "ctranslate2,opennmt"], "'opennmt' is not one of"),
        (["--batch-size", "0"], "0 is not in the range x>=1"),
        (
            ["--python", "ctranslate3=/bin/python"],
            "expected NAME=PATH with NAME one of tfexport, revision, ctranslate2,",
        ),
        (["--python", "ctranslate2"], "expected NAME=PATH"),
        (["--python", "ctranslate2=/nowhere/python"], "/nowhere/python is no program"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(side_by_side.main, ["--output", str(tmp_path / "found.json"), *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert not list(tmp_path.iterdir())


def test_a_comparison_with_nobody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "ENVIRONMENTS", tmp_path / "nowhere")
    done = CliRunner().invoke(side_by_side.main, ["--output", str(tmp_path / "found.json"), "--peers", "ctranslate2"])
    assert done.exit_code == 1
    assert "no environment of ctranslate2 is there; run benchmarks/environments" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_command_measures_writes_and_prints(
    scripted: ConvertedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "ENVIRONMENTS", tmp_path / "nowhere")
    output = tmp_path / "results" / "found.json"
    words = ["--output", str(output), "--models", "tiny", "--peers", "ctranslate2", "--precision", "fp32"]
    words += ["--batch-size", "1,2", "--num-beams", "1", "--source-length", "7,7", "--quick", "--work", str(tmp_path)]
    words += ["--python", "ctranslate2=false"]  # a program that is found on the path, but no Python
    done = CliRunner().invoke(side_by_side.main, words)
    assert done.exit_code == 0, done.output
    assert "not measured: ctranslate2 fp32, 1 thread: " in done.stderr
    assert "| tiny | ctranslate2 fp32" in done.stdout
    document = result.read(output)
    assert [len(cell["runs"][0]["seconds"]) for cell in document["cells"]] == [3, 3]
    again = CliRunner().invoke(side_by_side.main, words)
    assert again.exit_code == 1
    assert "is there already; go on with it by --resume" in again.stderr
    assert CliRunner().invoke(side_by_side.main, [*words, "--resume"]).exit_code == 0


def test_every_peer_has_pinned_requirements_and_a_worker() -> None:
    for name in FOREIGN:
        pins = ROOT / "benchmarks" / "requirements" / f"{SYSTEMS[name].environment}.txt"
        assert all("==" in line for line in pins.read_text(encoding="utf-8").splitlines())
        module = ROOT / "benchmarks" / SYSTEMS[name].module.replace(".", "/")
        assert module.with_suffix(".py").exists()
    assert systems.REFERENCE.files == "bundle-fp32"
