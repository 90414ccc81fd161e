"""Quantize the matrices of linear maps for TensorRT, with Q/DQ nodes.

Activations are rounded if their ranges are known. Embeddings, norms, biases, position tables and the output projection
do not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript.version_converter import convert_version

from tfexport.contract import QUANTIZED_WEIGHTS, GraphEntry
from tfexport.errors import GraphError, first_line
from tfexport.export import graph_file
from tfexport.export.graph_file import Span, span
from tfexport.export.quantize._linear import LEAST_WEIGHTS, LinearMap, linear_maps, only_linear
from tfexport.export.quantize._rounding import BLOCK, activation_scale, round_matrix
from tfexport.precision import FORMATS, WeightType

_IR_VERSION = 10  # the version of opset 21
_ALIGNMENT = 64

# Tensors of the new file with their bytes, by the suffix of their names, and the attributes of DequantizeLinear.
_Weight = tuple[dict[str, tuple[ir.TensorProtocol, Span]], dict[str, int]]


def quantize_graphs(
    source: Path,
    graphs: Mapping[str, GraphEntry],
    directory: Path,
    weights: WeightType,
    *,
    ranges: Mapping[Span, float] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Write the graphs in `source` with narrower matrices to `directory`.

    `ranges` has the largest magnitude of the activations that are multiplied with a matrix; these are rounded to the
    type of the weights, with one scale for each tensor.

    If 64 does not divide the inputs of a matrix, int4 becomes int8. The opset becomes at least 19, or 21 for int4.
    """
    models = {name: _load(source / entry.file, FORMATS[weights].qdq_opset) for name, entry in graphs.items()}
    bodies = [model.graph for model in models.values()]
    with (directory / QUANTIZED_WEIGHTS).open("xb") as file:
        moved = _move(bodies, file, weights, report)
    found, narrow = ranges or {}, {place for place, (_, attributes) in moved.items() if attributes}
    written = {}
    for name, model in models.items():
        entry = graphs[name]
        _round_activations(model.graph, {place: found[place] for place in narrow & found.keys()}, weights)
        _refer(model.graph, moved, directory)
        graph_file.save_graph(model, directory / entry.file, entry.spec)
        written[name] = GraphEntry.of(entry.file, model.opset_imports[""], entry.spec)
    return written


def _load(path: Path, opset: int) -> ir.Model:
    model = graph_file.load_graph(path)
    try:
        if model.opset_imports.get("", 0) < opset:
            convert_version(model, opset)
    except Exception as error:
        raise GraphError(
            f"{path.name}: cannot be converted to opset {opset} ({first_line(error)}); export it again"
        ) from error
    model.ir_version = max(model.ir_version, _IR_VERSION)
    return model


def _move(
    graphs: Iterable[ir.Graph], file: BinaryIO, weights: WeightType, report: Callable[[str], None]
) -> dict[Span, _Weight]:
    """Write every weight once, in the narrow type if only linear maps read it."""
    chosen = only_linear(graphs)
    if not chosen:
        raise GraphError(f"{weights}: no linear map has at least {LEAST_WEIGHTS} weights; build without --weights")
    graph_file.check_weights(graphs, weights)
    external = {span(weight): weight for graph in graphs for weight in graph_file.external_weights(graph)}
    moved: dict[Span, _Weight] = {}
    uneven = 0
    for place, weight in external.items():
        array = graph_file.read_weight(weight)
        if place in chosen:
            rounded = round_matrix(array, weights, chosen[place])
            attributes = {"axis": rounded.axis, **({"block_size": rounded.block} if rounded.block else {})}
            parts = {"_narrow": _write(file, rounded.values), "_scale": _write(file, rounded.scales)}
            moved[place] = parts, attributes
            uneven += weights == "int4" and not rounded.block
        else:
            moved[place] = {"": _write(file, array)}, {}
    report(f"{len(chosen)} of {len(external)} weights are stored as {weights}")
    if uneven:
        report(f"{uneven} of them as int8, because {BLOCK} does not divide the number of their inputs")
    return moved


def _write(file: BinaryIO, array: NDArray[Any]) -> tuple[ir.TensorProtocol, Span]:
    tensor = ir.tensor(array)
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset, length = file.tell(), file.write(tensor.tobytes())  # packs two values of 4 bits into a byte
    return tensor, Span(QUANTIZED_WEIGHTS, offset, length)


def _round_activations(graph: ir.Graph, ranges: Mapping[Span, float], kind: WeightType) -> None:
    readers: dict[ir.Value, list[LinearMap]] = defaultdict(list)
    for found in linear_maps(graph):
        if span(found.weight) in ranges and found.node.inputs[0] is not None:
            readers[found.node.inputs[0]].append(found)
    zero = ir.tensor(np.array(0, ir.DataType[FORMATS[kind].onnx_type].numpy()))
    for value, maps in readers.items():
        assert value.dtype is not None
        largest = max(ranges[span(found.weight)] for found in maps)
        tape, name = ir.tape.Tape(), value.name
        scale = tape.initializer(ir.tensor(activation_scale(largest, kind, value.dtype.numpy())), f"{name}_scale")
        zero_point = tape.initializer(zero, f"{name}_zero_point")
        rounded = tape.op("QuantizeLinear", [value, scale, zero_point], name=f"{name}_quantize")
        restored = tape.op("DequantizeLinear", [rounded, scale], name=f"{name}_dequantize")
        rounded.name, restored.name = f"{name}_rounded", f"{name}_restored"
        for part in tape.initializers:
            graph.register_initializer(part)
        for found in maps:
            found.node.replace_input_with(0, restored)
        graph.insert_before(maps[0].node, tape.nodes)


def _refer(graph: ir.Graph, moved: Mapping[Span, _Weight], directory: Path) -> None:
    tape = ir.tape.Tape()
    for value in graph_file.external_weights(graph):
        (parts, attributes), name = moved[span(value)], value.name or ""
        if not attributes:
            graph_file.refer(value, parts[""][1], directory)
            continue
        del graph.initializers[name]
        value.name = None  # free the name for the restored matrix
        inputs = [tape.initializer(tensor, name + suffix) for suffix, (tensor, _) in parts.items()]
        for part, (_, place) in zip(inputs, parts.values(), strict=True):
            graph_file.refer(part, place, directory)
        restored = ir.Value(name=name, type=value.type, shape=value.shape)
        tape.op("DequantizeLinear", inputs, attributes, name=f"{name}_dequantize", output=restored)
        value.replace_all_uses_with(restored)
    for part in tape.initializers:
        graph.register_initializer(part)
    graph.insert_before(graph[0], tape.nodes)
