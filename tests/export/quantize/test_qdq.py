"""Narrow weights: the model they make, the contract they keep, the accuracy they have, the plans they shrink."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tests import tiny
from tests.export.quantize.conftest import Loss, weight_spans, write_graph
from tests.export.test_capacity import build_plan
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.contract import QUANTIZED_WEIGHTS, REORDER, GraphEntry, ModelSpec, TensorSpec, Variant
from tfexport.errors import GraphError
from tfexport.export.quantize.qdq import quantize_graphs
from tfexport.nn.directory import load_weights
from tfexport.precision import WeightType
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort._device import OrtDevice
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs

Once = Callable[[str, Callable[[Path], object]], Path]
TYPES: tuple[WeightType, ...] = get_args(WeightType)


def portable(bundle: Bundle) -> dict[str, GraphEntry]:
    graphs = bundle.manifest.graphs
    return {name: entry for name, entry in graphs.items() if not name.endswith("_contrib") and name != REORDER}


def narrow(bundle: Bundle, once: Once, weights: WeightType) -> Path:
    """Quantize a bundle once for all tests; the directory is not to be changed."""

    def make(path: Path) -> None:
        path.mkdir()
        quantize_graphs(bundle.path, portable(bundle), path, weights)

    return once(f"dates-{bundle.manifest.spec.precision}-{weights}", make)


def session(directory: Path, spec: ModelSpec, variant: Variant) -> OrtSession:
    return OrtSession(Graphs({path.stem: path for path in directory.glob("*.onnx")}, spec), variant, threads=1)


def rounded(matrix: torch.Tensor, weights: WeightType) -> torch.Tensor:
    largest = {"int8": 127, "int4": 7, "fp8": 448}[weights]
    blocks = matrix.unflatten(1, (-1, 64 if weights == "int4" else matrix.shape[1]))
    scale = blocks.abs().amax(-1, keepdim=True) / largest
    if weights == "fp8":
        return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)
    return ((blocks / scale).round() * scale).flatten(1)


@pytest.mark.parametrize("variant", ["static", "concat"])
@pytest.mark.parametrize("weights", TYPES)
def test_the_graphs_are_the_model_with_rounded_linear_maps(
    weights: WeightType, variant: Variant, dates_bundle: Path, once: Once
) -> None:
    """Every linear map but the output projection, and nothing else: logits agree with PyTorch's."""
    bundle = open_bundle(dates_bundle)
    assert bundle.manifest.config is not None
    model = load_weights(bundle.file("weights.safetensors"), bundle.manifest.config)
    changed = 0
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "out":
                before = module.weight.clone()
                module.weight.copy_(rounded(module.weight, weights))
                changed += not torch.equal(module.weight, before)
    assert changed == 38
    spec = bundle.manifest.spec
    ids = np.random.default_rng(0).integers(3, spec.source_vocab, (5, 11))
    mask = np.arange(11) < np.array([[11], [7], [3], [9], [11]])
    steps = np.random.default_rng(1).integers(3, spec.vocab, (5, 4))
    found, expected = session(narrow(bundle, once, weights), spec, variant), EagerSession(model, spec)
    batches = found.batch(), expected.batch()
    for batch in batches:
        batch.add(tiny.sources(ids, mask), steps[:, :1].tolist())
    for step in range(steps.shape[1]):
        mine, other = (batch.step(steps[:, step], spec.vocab) for batch in batches)
        order = [np.argsort(candidates.token_ids, 1) for candidates in (mine, other)]
        np.testing.assert_allclose(
            np.take_along_axis(mine.logits, order[0], 1), np.take_along_axis(other.logits, order[1], 1), atol=2e-3
        )


@pytest.mark.parametrize(("weights", "points"), [("int8", 0.2), ("int4", 1.0)])
def test_held_out_dates_are_read_as_well(
    weights: WeightType, points: float, dates_bundle: Path, once: Once, lost_points: Loss
) -> None:
    assert lost_points(narrow(open_bundle(dates_bundle), once, weights), "static", None) <= points


@pytest.mark.parametrize(("weights", "opset"), [("int8", 19), ("fp8", 19), ("int4", 21)])
def test_contract_opset_and_sharing(weights: WeightType, opset: int, dates_bundle: Path, once: Once) -> None:
    bundle = open_bundle(dates_bundle)
    folder = narrow(bundle, once, weights)
    files = {"decoder.onnx", "decoder_static.onnx", "encoder.onnx", QUANTIZED_WEIGHTS}
    assert {path.name for path in folder.iterdir()} == files
    for name, entry in portable(bundle).items():
        model = onnx.load(str(folder / entry.file), load_external_data=False)
        assert model.opset_import[0].version == (24 if name == "decoder_static" else opset)
    spans = weight_spans(folder.glob("*.onnx"), QUANTIZED_WEIGHTS)
    assert all(len(places) == 1 for places in spans.values()), "both decoders read the same bytes"
    length = sum(int(length) for _, length in set.union(*spans.values()))
    assert length <= (folder / QUANTIZED_WEIGHTS).stat().st_size <= length + 64 * len(spans)


def test_equal_input_gives_equal_bytes(dates_bundle: Path, once: Once, tmp_path: Path) -> None:
    bundle = open_bundle(dates_bundle)
    quantize_graphs(bundle.path, portable(bundle), tmp_path, "int4")
    for path in narrow(bundle, once, "int4").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def chain(folder: Path, kinds: str, widths: tuple[int, ...]) -> dict[str, GraphEntry]:
    """Write y = x · w0 · w1 … with weights in a file: g a Gemm of [out, in], m a MatMul of [in, out], t a turned one.

    e is a MatMul whose matrix is read row by row as well.
    """
    random = np.random.default_rng(0)
    nodes, weights = [], {}
    for index, (kind, inputs, outputs) in enumerate(zip(kinds, widths, widths[1:], strict=False)):
        matrix, source, target = f"w{index}", f"h{index}", f"h{index + 1}"
        weights[matrix] = random.standard_normal((outputs, inputs) if kind in "gt" else (inputs, outputs), np.float32)
        if kind == "t":
            nodes.append(helper.make_node("Transpose", [matrix], [f"t{index}"], perm=[1, 0]))
            matrix = f"t{index}"
        attributes, made = {"transB": 1} if kind == "g" else {}, f"product{index}" if kind == "e" else target
        nodes.append(helper.make_node("Gemm" if kind == "g" else "MatMul", [source, matrix], [made], **attributes))
        if kind == "e":
            nodes.append(helper.make_node("Gather", [matrix, "one"], [f"row{index}"]))
            nodes.append(helper.make_node("Add", [made, f"row{index}"], [target]))
    first, last = (TensorSpec(f"h{i}", "float32", ("rows", widths[i])) for i in (0, len(kinds)))
    return write_graph(folder, nodes, weights, first, last, [numpy_helper.from_array(np.array([1]), "one")])


def run(path: Path, rows: np.ndarray[Any, Any]) -> Any:
    """Run node by node: fused with a MatMul, ONNX Runtime rounds the activations to 8 bits too."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(path, options).run(None, {"h0": rows})[0]


@pytest.mark.parametrize("kinds", ["g", "m", "t", "gmt"])
@pytest.mark.parametrize(("weights", "error"), [("int8", 0.01), ("fp8", 0.05), ("int4", 0.2)])
def test_every_way_to_write_a_linear_map(weights: WeightType, error: float, kinds: str, tmp_path: Path) -> None:
    graphs = chain(tmp_path / "source", kinds, (64, 128, 64, 192)[: len(kinds) + 1])
    lines: list[str] = []
    quantize_graphs(tmp_path / "source", graphs, tmp_path / "out", weights, report=lines.append)
    assert lines == [f"{len(kinds)} of {len(kinds)} weights are stored as {weights}"]
    x = np.random.default_rng(1).standard_normal((5, 64), np.float32)
    expected = run(tmp_path / "source" / "g.onnx", x)
    found = run(tmp_path / "out" / "g.onnx", x)
    assert 0 < np.abs(found - expected).std() / expected.std() < error * len(kinds)


def test_the_runtime_runs_graphs_with_narrow_weights(tmp_path: Path) -> None:
    """With its own session options; on CPUs without VNNI, those for int8 products break these graphs."""
    graphs = chain(tmp_path / "source", "gmt", (64, 128, 64, 192))
    quantize_graphs(tmp_path / "source", graphs, tmp_path / "out", "int8")
    x = np.random.default_rng(1).standard_normal((5, 64), np.float32)
    expected = run(tmp_path / "source" / "g.onnx", x)
    (found,) = OrtDevice("cpu").load(tmp_path / "out" / "g.onnx", "g", 1).run(None, {"h0": x})
    assert 0 < np.abs(found - expected).std() / expected.std() < 0.03


def test_uneven_inputs_become_int8_and_are_reported(tmp_path: Path) -> None:
    graphs = chain(tmp_path / "source", "ggm", (64, 140, 128, 64))
    lines: list[str] = []
    quantize_graphs(tmp_path / "source", graphs, tmp_path / "out", "int4", report=lines.append)
    assert lines[1:] == ["1 of them as int8, because 64 does not divide the number of their inputs"]
    graph = onnx.load(str(tmp_path / "out" / "g.onnx"), load_external_data=False).graph
    types = {weight.name: weight.data_type for weight in graph.initializer}
    assert types["w1_narrow"] == TensorProto.INT8
    assert types["w0_narrow"] == types["w2_narrow"] == TensorProto.INT4
    assert run(tmp_path / "out" / "g.onnx", np.ones((2, 64), np.float32)).shape == (2, 64)


def test_small_weights_and_weights_with_other_readers_stay(tmp_path: Path) -> None:
    graphs = chain(tmp_path / "source", "emg", (64, 64, 63, 256))
    quantize_graphs(tmp_path / "source", graphs, tmp_path / "out", "int8")
    graph = onnx.load(str(tmp_path / "out" / "g.onnx"), load_external_data=False).graph
    assert sorted(weight.name for weight in graph.initializer) == ["one", "w0", "w1", "w2_narrow", "w2_scale"]


@pytest.fixture
def copied(dates_bundle: Path, tmp_path: Path) -> Bundle:
    shutil.copytree(dates_bundle, tmp_path / "copy")
    (tmp_path / "out").mkdir()
    return open_bundle(tmp_path / "copy")


def refuse(bundle: Bundle) -> str:
    with pytest.raises(GraphError) as caught:
        quantize_graphs(bundle.path, portable(bundle), bundle.path.with_name("out"), "int8")
    assert not list(bundle.path.with_name("out").glob("*.onnx"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("location", "../copy/weights.safetensors", "is in '../copy/weights.safetensors', expected a file next to"),
        ("location", "/etc/hostname", "is in '/etc/hostname', expected a file next to the graph"),
        ("location", "link", "is in 'link', expected a file next to the graph"),
        ("offset", "99999999", "does not fit weights.safetensors; export the bundle again"),
        ("offset", "-4", "encoder.onnx: is not an ONNX model"),
        ("length", "12", "does not fit weights.safetensors"),
    ],
)
def test_a_graph_that_points_elsewhere_is_refused(key: str, value: str, reason: str, copied: Bundle) -> None:
    (copied.path / "link").symlink_to("weights.safetensors")
    path = copied.file("encoder.onnx")
    model = onnx.load(str(path), load_external_data=False)
    weight = next(weight for weight in model.graph.initializer if weight.name.endswith("fc1.weight"))
    next(item for item in weight.external_data if item.key == key).value = value
    onnx.save(model, str(path))
    assert reason in refuse(copied)


def plan_size(directory: Path, name: str, spec: ModelSpec) -> int:
    return len(build_plan(directory, name, spec))


@pytest.fixture(scope="module")
def fp32_encoder_size(dates_bundle: Path) -> int:
    pytest.importorskip("tensorrt_rtx")
    return plan_size(dates_bundle, "encoder", open_bundle(dates_bundle).manifest.spec)


@pytest.mark.parametrize("weights", TYPES)
def test_tensorrt_keeps_the_weights_narrow(
    weights: WeightType, dates_bundle: Path, dates_fp16: Path, once: Once, fp32_encoder_size: int
) -> None:
    bundle, half = open_bundle(dates_bundle), open_bundle(dates_fp16)
    folder, spec = narrow(bundle, once, weights), bundle.manifest.spec
    assert plan_size(narrow(half, once, weights), "decoder_static", half.manifest.spec) > 0
    assert plan_size(folder, "decoder", spec) > 0
    matrices = 3 * (4 * 128 * 128 + 2 * 384 * 128) + 4 * 128 * 128
    saved = {"int8": 3, "fp8": 3, "int4": 3.5}[weights] * matrices
    assert fp32_encoder_size - plan_size(folder, "encoder", spec) >= 0.9 * saved
