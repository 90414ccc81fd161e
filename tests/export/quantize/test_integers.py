"""Graphs that compute in integers: what they compute, what stays as it is, who depends on whom, how large they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from safetensors.numpy import load_file

from tests.export.quantize.conftest import Loss, weight_spans, write_graph
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import WEIGHTS, GraphEntry, Quantization, TensorSpec, Variant
from tfexport.errors import GraphError
from tfexport.export.quantize.integers import write_integer_graphs
from tfexport.nn.directory import load_weights
from tfexport.nn.eager import EagerModel
from tfexport.runtime.eager import full_outputs
from tfexport.runtime.ort._device import OrtDevice
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Session
from tfexport.runtime.sources import pad_sources
from tfexport.verify._numbers import compare, random_batches, step_logits

Once = Callable[[str, Callable[[Path], object]], Path]
WAYS = {
    "int8": Quantization(weights="int8"),
    "int8 throughput": Quantization(weights="int8", optimize_for="throughput"),
    "int4": Quantization(weights="int4"),
}
VARIANTS: tuple[Variant, ...] = ("contrib", "static", "concat")


# ---- single operators, in graphs made by hand

Initializers = dict[str, NDArray[np.float32]]


def write(folder: Path, nodes: list[onnx.NodeProto], weights: Initializers, width: int) -> dict[str, GraphEntry]:
    is_lookup = nodes[0].op_type == "Gather"
    source = TensorSpec("ids", "int64", ("rows",)) if is_lookup else TensorSpec("x", "float32", ("rows", 128))
    return write_graph(folder, nodes, weights, source, TensorSpec("y", "float32", ("rows", width)))


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def run(path: Path, **inputs: NDArray[Any]) -> Any:
    return OrtDevice("cpu", weights="int8").load(path, path.name, 1).run(None, inputs)[0]


def dequantised(folder: Path, name: str) -> NDArray[np.float64]:
    """Read a matrix [outputs, inputs, a multiple of the block] back from the file by the words of its docs."""
    whole = load_file(folder / WEIGHTS)
    tensors = {key.removeprefix(f"{name}."): value for key, value in whole.items() if key.startswith(f"{name}.")}
    if "int8_columns.values" in tensors:
        return (tensors["int8_columns.values"] * tensors["int8_columns.scales"].astype(np.float64)).T
    kind = next(key.partition(".")[0] for key in tensors if "_blocks" in key)
    values, zeros = tensors[f"{kind}.values"].astype(np.float64), tensors[f"{kind}.zero_points"].astype(np.float64)
    scales = tensors[f"{kind}.scales"].astype(np.float64)
    if kind == "int4_blocks":
        values = np.stack([values % 16, values // 16], -1).reshape(*values.shape[:2], -1)
        zeros = np.stack([zeros % 16, zeros // 16], -1).reshape(len(zeros), -1)[:, : values.shape[1]]
    return ((values - zeros[..., None]) * scales[..., None]).reshape(len(values), -1)


def product(kind: str) -> tuple[list[onnx.NodeProto], Initializers]:
    """Write y = x · W + b with 128 inputs and 96 outputs, as one of the ways that exporters have."""
    stored = random(96, 128) if kind in ("gemm", "turned") else random(128, 96)
    bias = {"b": random(96, seed=1)}
    match kind:
        case "gemm":
            return [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)], {"w": stored, **bias}
        case "gemm of [inputs, outputs]":
            return [helper.make_node("Gemm", ["x", "w", "b"], ["y"])], {"w": stored, **bias}
        case "matmul":
            return [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": stored}
        case _:
            turn = helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0])
            return [turn, helper.make_node("MatMul", ["x", "t"], ["y"])], {"w": stored}


@pytest.mark.parametrize("kind", ["gemm", "gemm of [inputs, outputs]", "matmul", "turned"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_linear_map(way: str, kind: str, tmp_path: Path) -> None:
    """The operator gives what NumPy makes of the file, but for its 8-bit activations; the file is near the matrix."""
    nodes, weights = product(kind)
    graphs = write(tmp_path / "source", nodes, weights, 96)
    write_integer_graphs(tmp_path / "source", graphs, tmp_path / "out", WAYS[way])
    x, narrow = random(5, 128, seed=2), dequantised(tmp_path / "out", "w")
    expected = x @ narrow.T + weights.get("b", np.zeros(96))
    found = run(tmp_path / "out" / "g.onnx", x=x)
    assert 0 < np.abs(found - expected).std() < 0.01 * expected.std()
    original = run(tmp_path / "source" / "g.onnx", x=x)
    assert np.abs(found - original).std() < (0.12 if way == "int4" else 0.015) * original.std()
    graph = onnx.load(str(tmp_path / "out" / "g.onnx"), load_external_data=False).graph
    operator = "MatMulIntegerToFloat" if way == "int8 throughput" else "MatMulNBits"
    assert [node.op_type for node in graph.node if "MatMul" in node.op_type] == [operator]
    outside = {weight.name for weight in graph.initializer if weight.data_location == TensorProto.EXTERNAL}
    assert outside == set(load_file(tmp_path / "out" / WEIGHTS))


def row_products(folder: Path, *, relu: bool, count: int = 1) -> tuple[Path, list[NDArray[np.float64]]]:
    """Write y = Σ (relu) x · W{i} in integers; return the graph and each W as it is stored."""
    read, names = "positive" if relu else "x", [f"w{i}" for i in range(count)]
    nodes = [helper.make_node("Relu", ["x"], [read])] if relu else []
    nodes += [helper.make_node("MatMul", [read, name], [f"y{name}"]) for name in names]
    nodes.append(helper.make_node("Sum", [f"y{name}" for name in names], ["y"]))
    weights = {name: random(128, 96, seed=i) for i, name in enumerate(names)}
    graphs = write(folder / "source", nodes, weights, 96)
    write_integer_graphs(folder / "source", graphs, folder / "out", WAYS["int8 throughput"])
    return folder / "out" / "g.onnx", [dequantised(folder / "out", name).T for name in names]


def rounded_rows(x: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    largest = np.abs(x).max(-1, keepdims=True)
    return np.rint(x / np.where(largest == 0, 1, largest) * steps) / steps * largest


@pytest.mark.parametrize(("relu", "steps"), [(False, 127), (True, 255)])
def test_a_product_is_that_of_the_rounded_rows(relu: bool, steps: int, tmp_path: Path) -> None:
    """Activations that are never negative have all 255 steps; rows of very different size, or zero, are exact."""
    path, (matrix,) = row_products(tmp_path, relu=relu)
    x = random(21, 128, seed=1) * np.geomspace(1e-20, 1e20, 21, dtype=np.float32).reshape(21, 1)
    x[9] = 0
    x[17] = -np.abs(x[17])  # a ReLU makes it zero
    found = run(path, x=x)
    read = (x.clip(0) if relu else x).astype(np.float64)
    expected = rounded_rows(read, steps) @ matrix
    size = np.abs(expected).max(-1, keepdims=True) + 1e-30
    # In float32 a value between two steps may be rounded to the other one.
    step = np.abs(read).max(-1, keepdims=True) / steps * np.abs(matrix).max()
    assert (np.abs(found - expected) <= 1e-5 * size + step).all()
    assert np.median(np.abs(found - expected) / size) < 1e-6
    assert not found[9].any()
    assert found[17].any() != relu
    assert ("Relu" in {node.op_type for node in onnx.load(str(path)).graph.node}) is False


def test_a_row_is_the_same_to_the_bit_in_any_batch(tmp_path: Path) -> None:
    path, _ = row_products(tmp_path, relu=False)
    x = random(20, 128, seed=2)
    x[4:] *= 1000
    together = run(path, x=x)
    for row in range(0, 20, 5):
        np.testing.assert_array_equal(run(path, x=x[row : row + 1])[0], together[row])


def test_an_activation_is_rounded_once_for_all_its_readers(tmp_path: Path) -> None:
    path, matrices = row_products(tmp_path, relu=False, count=3)
    operators = [node.op_type for node in onnx.load(str(path)).graph.node]
    assert operators.count("MatMulIntegerToFloat") == operators.count("Mul") == 3
    assert operators.count("QuantizeLinear") == operators.count("ReduceMax") == 1
    x = random(6, 128, seed=3)
    expected = sum(rounded_rows(x.astype(np.float64), 127) @ matrix for matrix in matrices)
    np.testing.assert_allclose(run(path, x=x), expected, rtol=0, atol=0.15)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [100, 112, 128])
def test_rows_of_an_embedding_are_those_of_the_file(width: int, way: str, tmp_path: Path) -> None:
    """They are looked up exactly, in 8 bits whatever the linear maps have, and stored once where they are tied."""
    table = random(96, width)
    look_up = helper.make_node("Gather", ["w", "ids"], ["rows"])
    turn = helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0])
    nodes = [look_up, turn, helper.make_node("MatMul", ["rows", "t"], ["logits"])]  # the name of the projection
    nodes.append(helper.make_node("Identity", ["logits"], ["y"]))
    graphs = write(tmp_path / "source", nodes, {"w": table}, 96)
    write_integer_graphs(tmp_path / "source", graphs, tmp_path / "out", WAYS[way])
    model = onnx.load(str(tmp_path / "out" / "g.onnx"))
    model.graph.output.append(helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["rows", width]))
    onnx.save(model, str(tmp_path / "out" / "both.onnx"))
    ids = np.array([0, 95, 7, 7])
    _, rows = ort.InferenceSession(tmp_path / "out" / "both.onnx").run(None, {"ids": ids})
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    blocks = tensors["w.int8_blocks.values"].astype(np.float32) - tensors["w.int8_blocks.zero_points"][..., None]
    expected = (blocks * tensors["w.int8_blocks.scales"][..., None]).reshape(96, -1)[ids, :width]
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    assert np.abs(rows - table[ids]).max() < 0.02
    kinds = {name.split(".")[1] for name in tensors}
    assert kinds == {"int8_blocks", *(["int8_columns"] if way == "int8 throughput" else [])}


def test_small_or_other_weights_are_not_quantized(tmp_path: Path) -> None:
    weights = {"w0": random(128, 128), "w1": random(128, 31), "w2": random(31, 200), "w3": random(200, 128)}
    weights |= {"w4": random(128, 64), "b4": random(1, 64)}
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h0"]),
        helper.make_node("MatMul", ["h0", "w1"], ["h1"]),
        helper.make_node("Gemm", ["h1", "w2"], ["h2"], alpha=0.5),
        helper.make_node("Gemm", ["h2", "w3"], ["h3"], alpha=0.5),
        helper.make_node("Gemm", ["h3", "w4", "b4"], ["y"]),
    ]
    graphs = write(tmp_path / "source", nodes, weights, 64)
    lines: list[str] = []
    write_integer_graphs(tmp_path / "source", graphs, tmp_path / "out", WAYS["int4"], report=lines.append)
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    assert {name.partition(".")[0] for name in tensors if "_blocks" in name} == {"w0"}
    for name in ("w1", "w2", "w3", "w4", "b4"):
        np.testing.assert_array_equal(tensors[name], weights[name])
    assert lines == [f"{sum(tensor.nbytes for tensor in tensors.values()):,} bytes of weights as int4"]
    with pytest.raises(GraphError, match=r"^int8: no linear map has at least 4096 weights; export with fp32$"):
        small = write(tmp_path / "more" / "source", nodes[1:2], {"w1": weights["w1"]}, 31)
        write_integer_graphs(tmp_path / "more" / "source", small, tmp_path / "more" / "out", WAYS["int8"])


# ---- the model that comes with the project


def narrow(dates_bundle: Path, once: Once, way: str) -> Path:
    """Quantise every variant of models/dates once for all tests; the directory is not to be changed."""

    def make(path: Path) -> None:
        path.mkdir()
        write_integer_graphs(dates_bundle, open_bundle(dates_bundle).manifest.graphs, path, WAYS[way])

    return once(f"dates-integer-{way.replace(' ', '-')}", make)


def session(dates_bundle: Path, folder: Path, variant: Variant) -> Session:
    graphs = {path.stem: path for path in folder.glob("*.onnx")}
    return OrtSession(Graphs(graphs, open_bundle(dates_bundle).manifest.spec, "int8"), variant, threads=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", WAYS)
def test_the_graphs_are_the_model_with_the_weights_of_the_file(
    way: str, variant: Variant, dates_bundle: Path, once: Once
) -> None:
    """PyTorch with the weights as NumPy reads them says the same, but for activations rounded to 8 bits."""
    bundle = open_bundle(dates_bundle)
    assert bundle.manifest.config is not None
    folder, spec = narrow(dates_bundle, once, way), bundle.manifest.spec
    model = load_weights(bundle.file(WEIGHTS), bundle.manifest.config)
    tensors = load_file(folder / WEIGHTS)
    changed = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in tensors:
                found = torch.from_numpy(dequantised(folder, name)[:, : parameter.shape[1]]).float()
                assert (parameter - found).abs().max() < 0.2 * parameter.abs().max()
                parameter.copy_(found)
                changed += 1
    assert changed == 38 + 1  # linear maps, and the one table
    batches = random_batches(spec, 12, np.random.default_rng(0))
    expected = [full_outputs(EagerModel(model), b.sources, b.target_ids)[:, b.prefill - 1 :] for b in batches]
    graphs = session(dates_bundle, folder, variant)
    got = [step_logits(graphs, batch, logits) for batch, logits in zip(batches, expected, strict=True)]
    assert 0 < compare("graphs", expected, got, 0.0).error < 0.04


@pytest.mark.parametrize(("way", "points"), [("int8", 0.2), ("int8 throughput", 0.2), ("int4", 1.0)])
def test_held_out_dates_are_read_as_well(
    way: str, points: float, dates_bundle: Path, once: Once, lost_points: Loss
) -> None:
    assert lost_points(narrow(dates_bundle, once, way), "contrib", "int8") <= points


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_text_does_not_depend_on_its_batch(way: str, variant: Variant, dates_bundle: Path, once: Once) -> None:
    opened = session(dates_bundle, narrow(dates_bundle, once, way), variant)
    sources = [[7, 30, 41, 12], np.random.default_rng(0).integers(4, 300, 40).tolist()]

    def logits(sources: list[list[int]]) -> NDArray[np.float32]:
        batch = opened.batch()
        batch.add(pad_sources(opened.spec.source, sources), [[1]] * len(sources))
        found = [batch.step(np.full(len(sources), token), opened.spec.vocab) for token in (1, 20, 30)]
        return np.stack([c.logits[0][np.argsort(c.token_ids[0])] for c in found])

    assert np.abs(logits(sources) - logits(sources[:1])).max() < 1e-3


def test_an_encoder_has_many_rows_and_a_step_of_the_decoder_few(dates_bundle: Path, once: Once) -> None:
    for way, of_decoder in (("int8", "MatMulNBits"), ("int8 throughput", "MatMulIntegerToFloat")):
        folder = narrow(dates_bundle, once, way)
        for name, operator in (("encoder_contrib", "MatMulIntegerToFloat"), ("decoder_contrib", of_decoder)):
            nodes = onnx.load(str(folder / f"{name}.onnx"), load_external_data=False).graph.node
            assert {node.op_type for node in nodes if node.op_type.startswith("MatMul")} == {operator}
    kinds: dict[str, set[str]] = {}
    for name in load_file(narrow(dates_bundle, once, "int8") / WEIGHTS):
        weight, _, kind = name.rpartition(".")[0].rpartition(".")
        kinds.setdefault(weight, set()).add(kind)
    assert all(len(found) == 1 for found in kinds.values() if "int8_columns" in found)


@pytest.mark.parametrize(("way", "share"), [("int8", 0.30), ("int8 throughput", 0.31), ("int4", 0.21)])
def test_a_weight_is_stored_once_and_the_file_is_small(way: str, share: float, dates_bundle: Path, once: Once) -> None:
    """All variants share the file; that the contrib one reads query, key and value as one costs it a copy here."""
    folder = narrow(dates_bundle, once, way)
    tensors = load_file(folder / WEIGHTS)
    both = [name for name in tensors if ".dec" in name or name.startswith("dec.")]
    joint = sum(tensors[name].nbytes for name in both if ".self.weight." in name or name.endswith(".self.bias"))
    size = (folder / WEIGHTS).stat().st_size - joint
    assert size < share * (dates_bundle / WEIGHTS).stat().st_size
    spans = weight_spans(folder.glob("*.onnx"), WEIGHTS)
    assert all(len(places) == 1 for places in spans.values())
    tables = {name.split(".")[3] for name in tensors if name.startswith("enc.embed.weight.")}
    assert tables == {"int8_blocks", *(["int8_columns"] if way == "int8 throughput" else [])}


def test_weights_that_are_not_finite_are_listed(tmp_path: Path) -> None:
    nodes, weights = product("gemm")
    weights["w"][3, 5], weights["b"][2] = np.nan, np.inf
    graphs = write(tmp_path / "source", nodes, weights, 96)
    with pytest.raises(GraphError) as caught:
        write_integer_graphs(tmp_path / "source", graphs, tmp_path / "out", WAYS["int8"])
    assert str(caught.value).count("contains NaN or infinity; use a model from before") == 2
    assert not list((tmp_path / "out").iterdir())
