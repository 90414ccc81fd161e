"""Store the matrices of linear maps in 8 or 4 bits: weights narrower than what the graph computes in.

Each becomes an explicit DequantizeLinear, of which TensorRT keeps the narrow side. Embeddings, norms, biases, tables
of positions and the output projection stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper, version_converter
from onnx.external_data_helper import set_external_data

from tfexport.contract import QUANTIZED_WEIGHTS, GraphEntry, WeightType
from tfexport.errors import GraphError, first_line, raise_all
from tfexport.export.contract import check_graph
from tfexport.export.external_data import Span, external_weights, read_weight, span
from tfexport.export.quantize.linear import linear_maps
from tfexport.export.quantize.weight_quantize import BLOCK, round_matrix

# The first opsets whose DequantizeLinear has float16 scales and float8, and 4 bits in blocks.
_OPSET: dict[WeightType, int] = {"int8": 19, "fp8": 19, "int4": 21}
_IR_VERSION = 10  # that of opset 21
# What is smaller saves nothing worth a kernel.
_LEAST_WEIGHTS = 4096
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Stored:
    """One tensor in the new file; `suffix` is what its name in a graph has more than the weight's."""

    suffix: str
    tensor: onnx.TensorProto


@dataclass(frozen=True)
class _Weight:
    """What has become of one weight: itself, or values and scales with the attributes of DequantizeLinear."""

    parts: tuple[_Stored, ...]
    attributes: dict[str, Any]


def quantize_graphs(
    source: Path,
    graphs: Mapping[str, GraphEntry],
    directory: Path,
    weights: WeightType,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Write graphs that hold the matrices of linear maps in a narrower type.

    A weight that several graphs share is stored once. Where 64 does not divide the inputs of a matrix, int4 becomes
    int8, and the report says so. Names, types and shapes of inputs and outputs stay; the opset becomes 19, or 21 for
    int4, where it was lower.

    Args:
        source: directory of the graphs and of the weight files that they refer to.
        graphs: to read, by name in the contract; all that share weights.
        directory: another one, existing; receives the graphs under their file names and `weights.bin`.
        weights: the narrow type.
        report: told what happens, a line at a time.

    Returns:
        What a manifest says of each graph, by its name.

    Raises:
        GraphError: a graph is no valid ONNX or has nothing to store so; lists every weight that lies outside
            `source` or is not finite.
        OSError: a weight file cannot be read, or the new one not written.
    """
    models = {name: _load(source / entry.file, _OPSET[weights]) for name, entry in graphs.items()}
    bodies = [model.graph for model in models.values()]
    with (directory / QUANTIZED_WEIGHTS).open("xb") as file:
        moved = _move(bodies, source, file, weights, report)
    written = {}
    for name, model in models.items():
        entry = graphs[name]
        _refer(model.graph, moved)
        onnx.save(model, str(directory / entry.file))
        check_graph(directory / entry.file, entry.spec)
        written[name] = GraphEntry.of(entry.file, _opset(model), entry.spec)
    return written


def _load(path: Path, opset: int) -> onnx.ModelProto:
    try:
        model = onnx.load(str(path), load_external_data=False)
        if _opset(model) < opset:
            model = version_converter.convert_version(model, opset)
    except Exception as error:
        raise GraphError(
            f"{path.name}: cannot be raised to opset {opset} ({first_line(error)}); export it again"
        ) from error
    model.ir_version = max(model.ir_version, _IR_VERSION)
    return model


def _opset(model: onnx.ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if not entry.domain), 0)


def _move(
    graphs: Iterable[onnx.GraphProto],
    source: Path,
    file: BinaryIO,
    weights: WeightType,
    report: Callable[[str], None],
) -> dict[Span, _Weight]:
    """Write every weight once, narrow where only linear maps use it."""
    external = {span(weight): weight for graph in graphs for weight in external_weights(graph).values()}
    chosen = linear_maps(graphs, least=_LEAST_WEIGHTS)
    if not chosen:
        raise GraphError(f"{weights}: no linear map has {_LEAST_WEIGHTS} weights; build without --weights")
    moved, problems, uneven = {}, [], 0
    for place, weight in external.items():
        try:
            array = read_weight(source, weight)
            if place in chosen:
                moved[place] = _narrow(array, weights, chosen[place], file)
                uneven += weights == "int4" and not moved[place].attributes.get("block_size")
            else:
                moved[place] = _Weight((_write(file, "", array),), {})
        except GraphError as error:
            problems.append(str(error))
    raise_all(GraphError, weights, problems)
    report(f"{len(chosen)} of {len(external)} weights are stored as {weights}")
    if uneven:
        report(f"of these {uneven} as int8: they have inputs that {BLOCK} does not divide")
    return moved


def _narrow(matrix: NDArray[Any], weights: WeightType, outputs: int, file: BinaryIO) -> _Weight:
    rounded = round_matrix(matrix, weights, outputs)
    attributes = {"axis": rounded.axis} | ({"block_size": rounded.block} if rounded.block else {})
    return _Weight((_write(file, "_narrow", rounded.values), _write(file, "_scale", rounded.scales)), attributes)


def _write(file: BinaryIO, suffix: str, array: NDArray[Any]) -> _Stored:
    tensor = numpy_helper.from_array(np.ascontiguousarray(array))  # packs two values of 4 bits into a byte
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset, length = file.tell(), file.write(tensor.raw_data)
    set_external_data(tensor, QUANTIZED_WEIGHTS, offset, length)
    tensor.ClearField("raw_data")
    return _Stored(suffix, tensor)


def _refer(graph: onnx.GraphProto, moved: Mapping[Span, _Weight]) -> None:
    """Let a graph refer to the new file, in place."""
    nodes, initializers = [], []
    for old in graph.initializer:
        if old.data_location != onnx.TensorProto.EXTERNAL:
            initializers.append(old)
            continue
        weight = moved[span(old)]
        names = []
        for part in weight.parts:
            new = onnx.TensorProto()
            new.CopyFrom(part.tensor)
            new.name = old.name + part.suffix
            initializers.append(new)
            names.append(new.name)
        if weight.attributes:
            name = f"{old.name}_dequantize"
            nodes.append(helper.make_node("DequantizeLinear", names, [old.name], name=name, **weight.attributes))
    nodes += graph.node
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(initializers)
    graph.node.extend(nodes)
