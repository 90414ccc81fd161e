"""Parity checks: a wrong graph fails, rounding does not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import Result
from onnx import helper, numpy_helper

from tests import tiny
from tests.command import run
from tests.runtime.exported import Once, sense_graphs
from tests.stranger import senses
from tests.tiny import VARIANTS
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.nn.config import model_spec
from tfexport.nn.directory import load_model, save_model
from tfexport.nn.eager import EagerModel
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.verify import Report, Stages, VerifyConfig, verify_stages
from tfexport.verify._decodes import Stage, compare_decodes, decode_best
from tfexport.verify._numbers import compare, random_batches, random_sources

Make = Callable[[Path], object]
Change = Callable[[onnx.ModelProto], None]
FEW = VerifyConfig(samples=8)


@pytest.fixture(scope="session")
def bundle(variant: Callable[[str], Path]) -> Path:
    """The plainest variant in all variants; not to be changed."""
    return variant("post")


@pytest.fixture(scope="session")
def source(bundle: Path) -> Path:
    """Its model directory."""
    return bundle.with_name(f"{bundle.name}-model")


def verify(*arguments: object) -> Result:
    return run("verify", *arguments)


def altered(bundle: Path, output: Path, **changes: Change) -> Path:
    """Write the bundle anew with changed graphs: its hashes are right, so only parity checks notice."""
    opened = open_bundle(bundle)
    manifest = opened.manifest
    with create_bundle(output) as builder:
        shutil.copytree(bundle, builder.path, dirs_exist_ok=True)
        for name, change in changes.items():
            path = builder.path / manifest.graphs[name].file
            graph = onnx.load(path)
            change(graph)
            onnx.save(graph, path)
        builder.finish(replace(manifest, parity=None, provenance=None))
    return output


def rewire(graph: onnx.ModelProto, node: onnx.NodeProto, index: int, *added: onnx.NodeProto) -> None:
    """Put nodes before `node` and let its input `index` come from the last of them."""
    position = next(i for i, other in enumerate(graph.graph.node) if other is node or other == node)
    graph.graph.node[position].input[index] = added[-1].output[0]
    for offset, new in enumerate(added):
        graph.graph.node.insert(position + offset, new)


def constant(name: str, value: int) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value, np.int64)))


def first(graph: onnx.ModelProto, kind: str, has_input: str = "") -> onnx.NodeProto:
    return next(
        node
        for node in graph.graph.node
        if node.op_type == kind and any(name.endswith(has_input) for name in node.input)
    )


def change_weight(name: str, change: Callable[[Any], None]) -> Change:
    def apply(graph: onnx.ModelProto) -> None:
        tensor = next(t for t in graph.graph.initializer if t.name.endswith(name))
        array = numpy_helper.to_array(tensor).copy()
        change(array)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    return apply


def one_percent(array: Any) -> None:
    array.flat[np.abs(array).argmax()] *= 1.01


def one_percent_of_value(array: Any) -> None:
    one_percent(array[-len(array) // 3 :])  # query, key and value lie one below the other


def one_nan(array: Any) -> None:
    array.flat[7] = np.nan


def one_infinity(array: Any) -> None:
    array.flat[7] = np.inf


def swap_norms(graph: onnx.ModelProto) -> None:
    norms = [node for node in graph.graph.node if node.op_type == "LayerNormalization"][:2]
    for index in (1, 2):
        norms[0].input[index], norms[1].input[index] = norms[1].input[index], norms[0].input[index]


def drop_mask(reader: str) -> Change:
    def apply(graph: onnx.ModelProto) -> None:
        node = first(graph, reader, "source_mask")
        negated = helper.make_node("Not", ["source_mask"], ["negated_mask"])
        rewire(graph, node, 0, negated, helper.make_node("Or", ["source_mask", "negated_mask"], ["every_token"]))

    return apply


def shift_positions(graph: onnx.ModelProto) -> None:
    node = first(graph, "Gather", "dec.pos")
    shifted = helper.make_node("Sub", [node.input[1], "one_back"], ["shifted_positions"])
    rewire(graph, node, 1, constant("one_back", 1), shifted)


def shift_slot(graph: onnx.ModelProto) -> None:
    node = first(graph, "TensorScatter")
    back = helper.make_node("Sub", ["cache_lengths", "one_slot"], ["slot_before"])
    slot = helper.make_node("Max", ["slot_before", "no_slot"], ["wrong_slot"])
    rewire(graph, node, 2, constant("one_slot", 1), constant("no_slot", 0), back, slot)


def wrong_scale(kind: str) -> Change:
    def apply(graph: onnx.ModelProto) -> None:
        attribute = next(a for a in first(graph, kind).attribute if a.name == "scale")
        attribute.f *= 1.02

    return apply


MUTATIONS: dict[str, tuple[str, Change]] = {
    "alignment, one weight by 1 %": ("alignment", change_weight("dec.layers.1.cross.q.weight", one_percent)),
    "alignment, no mask": ("alignment", drop_mask("Unsqueeze")),
    "one weight by 1 %": ("decoder", change_weight("dec.layers.0.ffn.fc1.weight", one_percent)),
    "one weight of the encoder": ("encoder", change_weight("enc.layers.1.self.v.weight", one_percent)),
    "two norms swapped": ("decoder", swap_norms),
    "no mask": ("decoder", drop_mask("Unsqueeze")),
    "no mask in the encoder": ("encoder", drop_mask("Unsqueeze")),
    "no mask, static": ("decoder_static", drop_mask("Unsqueeze")),
    "positions off by one": ("decoder_static", shift_positions),
    "wrong slot": ("decoder_static", shift_slot),
    "wrong attention scale": ("decoder_static", wrong_scale("Attention")),
    "one weight of query, key and value": (
        "decoder_contrib",
        change_weight("dec.layers.1.self.weight", one_percent_of_value),
    ),
    "one weight of the encoder, contrib": (
        "encoder_contrib",
        change_weight("enc.layers.1.self.v.weight", one_percent),
    ),
    "no mask, contrib": ("decoder_contrib", drop_mask("Cast")),
    "no mask in the encoder, contrib": ("encoder_contrib", drop_mask("Cast")),
    "positions off by one, contrib": ("decoder_contrib", shift_positions),
    "wrong attention scale, contrib": ("decoder_contrib", wrong_scale("GroupQueryAttention")),
    "NaN": ("decoder", change_weight("dec.layers.1.ffn.fc2.weight", one_nan)),
    "infinity": ("decoder_static", change_weight("out.bias", one_infinity)),
}
STAGES = {
    "alignment": {"ort concat"},
    "encoder": {"ort concat", "ort static"},
    "decoder": {"ort concat"},
    "decoder_static": {"ort static"},
    "encoder_contrib": {"ort contrib"},
    "decoder_contrib": {"ort contrib"},
}


def strict_json(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return data


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_fails_at_its_stage(name: str, bundle: Path, tmp_path: Path) -> None:
    graph, change = MUTATIONS[name]
    result = verify(altered(bundle, tmp_path / "b", **{graph: change}), "--samples", FEW.samples, "--json")
    assert result.exit_code == 2, result.output
    report = strict_json(result.stdout)
    assert report["passed"] is False
    assert {check["stage"] for check in report["numbers"] if not check["passed"]} == STAGES[graph]
    assert {check["stage"] for check in report["decodes"] if not check["passed"]} <= STAGES[graph]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("alignment, no mask", "alignment of ort concat differs by"),
        ("no mask, static", "ort static differs by"),
        ("NaN", "ort concat gives NaN"),
    ],
)
def test_the_table_shows_which_check_failed_and_where(name: str, problem: str, bundle: Path, tmp_path: Path) -> None:
    graph, change = MUTATIONS[name]
    result = verify(altered(bundle, tmp_path / "b", **{graph: change}), "--samples", FEW.samples)
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "parity with the eager model: FAILED"
    assert re.search(rf"✗ {problem}.* at batch \d+, row \d+", " ".join(" ".join(lines).split()))


def test_the_unchanged_bundle_passes_the_same_checks(bundle: Path, tmp_path: Path) -> None:
    """The mutations above fail for what they change, not for how they are written."""
    result = verify(altered(bundle, tmp_path / "b", decoder=lambda graph: None), "--samples", FEW.samples)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_same_seed_gives_the_same_report(bundle: Path) -> None:
    reports = [verify(bundle, "--samples", 6, "--seed", seed, "--json").stdout for seed in (3, 3, 4)]
    assert strict_json(reports[0]) == strict_json(reports[1])
    assert strict_json(reports[0])["numbers"] != strict_json(reports[2])["numbers"]


def test_only_differences_within_rounding_are_ties(bundle: Path, source: Path, tmp_path: Path) -> None:
    """Two tokens win everywhere; the eager model prefers one of them by millionths, the static graph the other."""
    # Logits are about 9, where float32 goes by steps of 9.5e-7: a few of them, so that no rounding closes the gap.
    gap, error = 4e-6, 12e-6

    def twins(weight: Any, bias: Any, more: float = 0.0) -> None:
        weight[7] = weight[5]
        bias[5], bias[7] = 9 + gap, 9 + more

    def change(graph: onnx.ModelProto, more: float = 0.0) -> None:
        tensors = {tensor.name: tensor for tensor in graph.graph.initializer}
        weight, bias = (numpy_helper.to_array(tensors[f"model.out.{end}"]).copy() for end in ("weight", "bias"))
        twins(weight, bias, more)
        for end, array in (("weight", weight), ("bias", bias)):
            tensors[f"model.out.{end}"].CopyFrom(numpy_helper.from_array(array, f"model.out.{end}"))

    model = load_model(source)
    assert model.out is not None
    with torch.no_grad():
        twins(model.out.weight, model.out.bias)
    changes: dict[str, Change] = {"decoder": change, "decoder_contrib": change}
    wrong = altered(bundle, tmp_path / "b", **changes, decoder_static=lambda graph: change(graph, error))
    opened = open_bundle(wrong)
    spec = replace(opened.manifest.spec, max_target_length=2)
    graphs = replace(Graphs.of(opened), spec=spec)
    report = verify_stages(Stages(EagerModel(model), graphs), FEW)
    assert report.passed, report.problems()
    greedy = {check.stage: check for check in report.decodes if check.method == "greedy"}
    assert greedy["ort concat"].exact == greedy["ort contrib"].exact == FEW.samples
    assert (greedy["ort static"].exact, greedy["ort static"].ties) == (0, FEW.samples)
    first = str(greedy["ort static"].first)
    assert "5 became 7, eager margin" in first
    assert float(first.rsplit(maxsplit=1)[-1]) == pytest.approx(gap, abs=gap / 2)
    assert report.summary()["ties"] >= FEW.samples

    # The same decodes, judged by an error too small to turn them, differ.
    eager, static = EagerSession(model, spec), OrtSession(graphs, "static")
    sources = random_sources(spec, FEW.samples, np.random.default_rng(0))
    decodes = [decode_best(session, sources, 1, 8) for session in (eager, static)]
    judged = [
        compare_decodes(Stage("ort static", static, noise), "greedy", eager, sources, *decodes)
        for noise in (error, gap / 10)
    ]
    assert [check.passed for check in judged] == [True, False]
    assert "8 of 8 sequences differ; first: sequence 0, token 0" in str(judged[1].problem())


@pytest.mark.parametrize("count", [1, 2, 16])
def test_the_cache_is_filled_step_by_step_even_for_few_sequences(count: int) -> None:
    spec = model_spec(VARIANTS["post"], "fp32")
    for seed in range(20):
        batches = random_batches(spec, count, np.random.default_rng(seed))
        assert sum(len(batch.sources) for batch in batches) == count
        assert batches[0].target_ids.shape[1] - batches[0].prefill > 20
        assert count < 8 or not batches[0].sources.mask.all()


def test_a_model_with_empty_outputs_can_be_compared() -> None:
    """All logits are 0 with logit_scale 0; nothing is divided by them."""
    zeros = [np.zeros((1, 2, 3), np.float32)]
    assert compare("stage", zeros, zeros, 1e-5).passed
    assert not compare("stage", zeros, [zeros[0] + 1], 1e-5).passed


def test_the_report_has_no_number_that_is_not_finite() -> None:
    ones = np.ones((1, 2, 3), np.float32)
    for value, word in ((np.nan, "NaN"), (np.inf, "inf")):
        wrong = ones.copy()
        wrong[0, 1, 2] = value
        number = compare("ort static", [ones], [wrong], 1e-5)
        assert word in str(number.problem())
        assert "batch 0, row 0, position 1, entry 2" in str(number.problem())
        report = Report("the eager model", 1, 0, (number,), ())
        assert strict_json(json.dumps(report.to_dict()))["numbers"][0]["worst"] is None
        assert not report.passed


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """The directory of a model of one layer."""
    one = tiny.config(encoder={"layers": 1}, decoder={"layers": 1})
    save_model(tiny.model(one, dtype=torch.float32), tmp_path / "short")
    return tmp_path / "short"


def test_an_fp16_bundle_is_measured_against_its_original(short: Path, tmp_path: Path) -> None:
    export_bundle(str(short), tmp_path / "b", ExportConfig(precision="fp16", variants=("concat",)), verify=False)
    result = verify(tmp_path / "b", "--against", short, "--samples", FEW.samples, "--json")
    report = strict_json(result.stdout)
    assert (result.exit_code, report["passed"], report["reference"]) == (0, True, "the eager model")
    own = strict_json(verify(tmp_path / "b", "--samples", FEW.samples, "--json").stdout)
    assert own["reference"] == "the eager model with the bundle's fp16 weights"


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({}, 2, "FAILED"),
        ({"activation": "silu", "norm_eps": 1e-3}, 1, "activation is silu, the bundle has relu; norm_eps"[:-10]),
        ({"max_source_length": 12}, 1, "max_source_length is 12, the bundle has 24"),
    ],
)
def test_against_another_model(changes: dict[str, Any], code: int, message: str, bundle: Path, tmp_path: Path) -> None:
    """Other weights are a failure of parity, another configuration is a mistake."""
    save_model(tiny.model(replace(VARIANTS["post"], **changes), seed=9, dtype=torch.float32), tmp_path / "m")
    result = verify(bundle, "--against", tmp_path / "m", "--samples", 4)
    assert result.exit_code == code
    assert message in (result.stdout if code == 2 else result.stderr)
    if code == 1:
        assert (result.stdout, result.stderr.count("\n")) == ("", 1)


def test_a_longer_original_is_the_same_model(short: Path, tmp_path: Path) -> None:
    """A bundle may take less than the model that it was made from."""
    config = ExportConfig(variants=("concat",), max_source_length=10, max_target_length=8)
    export_bundle(str(short), tmp_path / "b", config, verify=False)
    assert verify(tmp_path / "b", "--against", short, "--samples", 4).exit_code == 0


def ignore_mask(graph: onnx.ModelProto) -> None:
    for node in graph.graph.node:
        node.input[:] = ["every" if name == "feature_mask" else name for name in node.input]
    graph.graph.node.insert(0, helper.make_node("Not", ["feature_mask"], ["others"]))
    graph.graph.node.insert(1, helper.make_node("Or", ["feature_mask", "others"], ["every"]))


@pytest.mark.parametrize("name", ["encoder", "encoder_contrib"])
def test_an_encoder_that_ignores_the_mask_of_frames_fails(name: str, once: Once, tmp_path: Path) -> None:
    bundle = sense_graphs("features", once).bundle
    assert bundle is not None
    graphs = Graphs.of(open_bundle(altered(bundle.path, tmp_path / "b", **{name: ignore_mask})))
    report = verify_stages(Stages(senses.make().model, graphs), FEW)
    wrong = {"encoder": {"ort concat", "ort static"}, "encoder_contrib": {"ort contrib"}}[name]
    assert {number.stage for number in report.numbers if not number.passed} == wrong
    assert {check.stage for check in report.decodes if not check.passed} == wrong
