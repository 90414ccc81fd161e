"""The static variant with a number for its capacity: equal results, in bounds, and what TensorRT asks for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from tests import tiny
from tests.tensorrt.engine_graphs import kernels
from tfexport.contract import CacheKind, ModelSpec, Variant
from tfexport.errors import GraphError
from tfexport.export.passes import fix_capacity
from tfexport.export.write import write_graphs
from tfexport.nn.config import model_spec
from tfexport.precision import FLOAT, Precision
from tfexport.tensorrt._library import load_library
from tfexport.tensorrt.build._profiles import make_profiles
from tfexport.tensorrt.build.builder import build_engine, resolve_options
from tfexport.tensorrt.build.network import Graph, parse_graph
from tfexport.tensorrt.config import EngineConfig

ROWS, SOURCE, HEADS, WIDTH, LAYERS = 3, 5, 4, 32, 2


def dims(raw: bytes) -> dict[str, list[str | int]]:
    graph = onnx.load_from_string(raw).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


def feed(capacity: int) -> dict[str, Any]:
    """Return one step over a cache that holds 2, 3 and 4 tokens."""
    random = np.random.default_rng(0)
    kind = CacheKind({"key": WIDTH, "value": WIDTH}, "float32", LAYERS, HEADS)
    tensors = [*kind.tensors("past", ROWS, capacity), *kind.tensors("cross", ROWS, SOURCE)]
    floats: dict[str, Any] = {one.name: random.standard_normal(one.shape, np.float32) for one in tensors}
    return {
        "target_ids": random.integers(0, 12, (ROWS, 1)),
        "source_mask": np.ones((ROWS, SOURCE), bool),
        "cache_lengths": np.array([2, 3, 4]),
        "num_candidates": np.array([3]),
        **floats,
    }


@pytest.mark.parametrize("capacity", [1, 5, 16])
def test_only_the_capacity_becomes_a_number(dates_bundle: Path, capacity: int) -> None:
    path = dates_bundle / "decoder_static.onnx"
    before, after = dims(path.read_bytes()), dims(fix_capacity(path, capacity))
    assert after == {name: [capacity if dim == "capacity" else dim for dim in shape] for name, shape in before.items()}
    assert sum(capacity in shape for shape in after.values()) >= 4 * LAYERS


def test_results_are_those_of_the_free_graph(dates_bundle: Path, tmp_path: Path) -> None:
    path = dates_bundle / "decoder_static.onnx"
    (tmp_path / "weights.safetensors").write_bytes((dates_bundle / "weights.safetensors").read_bytes())
    (tmp_path / "fixed.onnx").write_bytes(fix_capacity(path, 7))
    onnx.checker.check_model(str(tmp_path / "fixed.onnx"), full_check=True)
    free, fixed = (ort.InferenceSession(file) for file in (path, tmp_path / "fixed.onnx"))
    for expected, found in zip(free.run(None, feed(7)), fixed.run(None, feed(7)), strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(Exception, match="index: 2 Got: 8 Expected: 7"):
        fixed.run(None, feed(8))


@pytest.mark.parametrize("capacity", [0, -1, 17])
def test_positions_beyond_the_table_are_refused(dates_bundle: Path, capacity: int) -> None:
    with pytest.raises(GraphError) as caught:
        fix_capacity(dates_bundle / "decoder_static.onnx", capacity)
    assert str(caught.value) == (
        f"decoder_static.onnx: capacity is {capacity}, expected 1 to 16, the model's number of positions; "
        "change --max-target-length"
    )


def test_relative_positions_have_no_table_that_limits_the_capacity(variant: Callable[[str], Path]) -> None:
    """A bias table is read by bucket: that it has 8 rows limits nothing."""
    assert dims(fix_capacity(variant("t5") / "decoder_static.onnx", 500))["past_key.0"][2] == 500


def test_another_graph_is_refused(dates_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"^decoder\.onnx: has no dimension 'capacity'; use a graph of the static"):
        fix_capacity(dates_bundle / "decoder.onnx", 8)
    (tmp_path / "cut.onnx").write_bytes((dates_bundle / "decoder.onnx").read_bytes()[:999])
    with pytest.raises(GraphError, match=r"cut\.onnx: is not an ONNX model"):
        fix_capacity(tmp_path / "cut.onnx", 8)


def test_tensorrt_accepts_the_cache_only_with_a_fixed_capacity(dates_bundle: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    path = dates_bundle / "decoder_static.onnx"
    log = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(log)

    def parse(raw: bytes) -> tuple[bool, list[Any]]:
        network = builder.create_network(0)
        parsed = trt.OnnxParser(network, log).parse(raw, str(path))
        return parsed, [network.get_layer(i).type for i in range(network.num_layers)]

    parsed, layers = parse(fix_capacity(path, 12))
    assert parsed
    assert layers.count(trt.LayerType.KV_CACHE_UPDATE) == 2 * LAYERS
    assert not parse(path.read_bytes())[0]


def build_plan(directory: Path, name: str, spec: ModelSpec) -> Any:
    variant: Variant = "static" if name == "decoder_static" else "concat"
    # The first that has float8; one build for another fails by name of the type.
    settings = EngineConfig(target="tensorrt-rtx", max_batch=4, compute_capabilities=("8.9",))
    profiles, path = make_profiles(spec, variant, settings), directory / f"{name}.onnx"
    raw = fix_capacity(path, profiles.limits.max_target_length) if variant == "static" else path.read_bytes()
    library = load_library("tensorrt-rtx")
    network = parse_graph(library, Graph(name, raw, path))
    return build_engine(network, profiles.engines[name], resolve_options(library, settings, None))


@pytest.mark.parametrize(("precision", "width"), [("fp16", 12), pytest.param("bf16", 140, marks=pytest.mark.slow)])
def test_attention_is_fused_for_every_head_size(precision: Precision, width: int, tmp_path: Path) -> None:
    """With a mask of bool TensorRT-RTX 1.7.1 cannot build where 8 does not divide the width."""
    pytest.importorskip("tensorrt_rtx")
    config = tiny.config(encoder={"d_k": width, "d_v": width}, decoder={"d_k": width, "d_v": width})
    spec = model_spec(config, precision)
    model = tiny.model(config, dtype=getattr(torch, FLOAT[precision]))
    write_graphs(model, spec, tmp_path, variants=("static",), opset=18)
    plan = build_plan(tmp_path, "decoder_static", spec)
    fused = sum(number for name, number in kernels(plan).items() if re.match("_gem[mv]_mha", name))
    assert fused == 2 * 2 * LAYERS, "self and cross, step and prefill"
