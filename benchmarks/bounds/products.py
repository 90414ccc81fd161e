"""The matrix products of a decoder's step alone: the same operators, weights and shapes, with nothing between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

PRODUCTS = frozenset({"Gemm", "FusedGemm", "MatMul", "MatMulNBits", "MatMulIntegerToFloat"})


def bare_products(decoder: Path, rows: int, threads: int) -> Callable[[], object]:
    """Return a call that multiplies `rows` rows with every matrix that a step multiplies with, and returns the arrays.

    Args:
        decoder: graph in a bundle, whose weights lie beside it.
        rows: of activations.
        threads: of the CPU.
    """
    model = onnx.load(str(decoder))
    graph, widths = _only_products(model.graph, rows)
    alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(alone.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng, binding = np.random.default_rng(0), session.io_binding()
    values = []
    for read in session.get_inputs():
        is_rounded = read.type == "tensor(uint8)"
        array = (
            rng.integers(0, 256, read.shape, np.uint8) if is_rounded else rng.standard_normal(read.shape, np.float32)
        )
        values.append(ort.OrtValue.ortvalue_from_numpy(array))
        binding.bind_ortvalue_input(read.name, values[-1])
    for made, width in zip(session.get_outputs(), widths, strict=True):
        values.append(ort.OrtValue.ortvalue_from_numpy(np.empty((rows, width), np.float32)))
        binding.bind_ortvalue_output(made.name, values[-1])

    def run() -> list[ort.OrtValue]:
        session.run_with_iobinding(binding)
        return values  # a binding alone does not keep them alive

    return run


def _only_products(graph: onnx.GraphProto, rows: int) -> tuple[onnx.GraphProto, list[int]]:
    """Return the products with inputs of their own, and how wide each one's output is."""
    weights = {weight.name: weight for weight in graph.initializer}
    turned = {node.output[0]: node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights}
    nodes, inputs, outputs, widths = [], {}, [], []
    for node, matrix in _products(graph, weights, turned):
        inner, outer = _sizes(node, matrix, node.input[1] in turned)
        is_rounded = node.op_type == "MatMulIntegerToFloat"
        name = f"{'rounded' if is_rounded else 'rows'}_{inner}"
        inputs[name] = (TensorProto.UINT8 if is_rounded else TensorProto.FLOAT, [rows, inner])
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[0], copy.output[0] = name, f"product_{len(widths)}"
        nodes += [turned[node.input[1]], copy] if node.input[1] in turned else [copy]
        outputs.append(helper.make_tensor_value_info(copy.output[0], TensorProto.FLOAT, [rows, outer]))
        widths.append(outer)
    used = [weights[name] for name in sorted({name for node in nodes for name in node.input} & weights.keys())]
    read = [helper.make_tensor_value_info(name, *what) for name, what in inputs.items()]
    return helper.make_graph(nodes, "products", read, outputs, used), widths


def _products(
    graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto], turned: dict[str, onnx.NodeProto]
) -> Iterator[tuple[onnx.NodeProto, onnx.TensorProto]]:
    for node in graph.node:
        if node.op_type in PRODUCTS:
            name = turned[node.input[1]].input[0] if node.input[1] in turned else node.input[1]
            if name in weights:
                yield node, weights[name]


def _sizes(node: onnx.NodeProto, matrix: onnx.TensorProto, is_turned: bool) -> tuple[int, int]:
    """Return how many numbers of a row a product reads, and how many it writes."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "MatMulNBits":
        return attributes["K"], attributes["N"]
    inner, outer = matrix.dims
    return (outer, inner) if attributes.get("transB") or is_turned else (inner, outer)
