"""Quantize linear maps and embeddings for ONNX Runtime's integer CPU operators.

MatMulNBits is the fastest operator for the few rows of a decode step, MatMulIntegerToFloat for many rows, as in an
encoder. Both round the activations of every row separately, so a text does not depend on the others of its batch. See
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tfexport.contract import ENCODER, ENCODER_CONTRIB, REORDER, SHORTLIST, WEIGHTS, GraphEntry, Quantization, Variant
from tfexport.errors import BundleError, GraphError
from tfexport.export import graph_file
from tfexport.export.decoders import VARIANTS, ModuleTraits
from tfexport.export.graph_file import Span, span
from tfexport.export.quantize._linear import LEAST_WEIGHTS, LinearMap, linear_maps, lookups
from tfexport.export.quantize._rounding import round_blocks, round_matrix
from tfexport.nn.config import TransformerConfig

# How a weight is stored: unchanged, in blocks of 8 or 4 bits, or in 8 bits with one scale per output.
_Kind = Literal["plain", "int8_blocks", "int4_blocks", "int8_columns"]

_DOMAIN = "com.microsoft"
# Round activations to 8 bits; multiplying them in float32 is much slower.
_ACCURACY_LEVEL = 4
# Inputs that share a scale, by bits: larger blocks are not faster; smaller blocks are more exact but larger in total.
_BLOCK = {8: 128, 4: 32}
# Smallest block that the operators accept.
_LEAST_BLOCK = 16
# The integers that represent the largest magnitude of a row and 0, for rows with and without negative values.
_SIGNED, _UNSIGNED = (127, 128), (255, 0)
# The magnitude of a row of zeros, such as padding.
_LEAST_MAGNITUDE = 1e-30


def fastest_variant(variants: Sequence[Variant], traits: TransformerConfig | ModuleTraits) -> tuple[Variant, ...]:
    """Return the fastest variant that supports a model; only this one is quantized."""
    fastest: tuple[Variant, ...] = ("contrib", "static", "concat")
    supported = [
        variant for variant in fastest if variant in variants and not VARIANTS[variant].supports(traits, "fp32")
    ]
    return tuple(supported[:1] or variants)


def write_integer_graphs(
    source: Path,
    graphs: Mapping[str, GraphEntry],
    directory: Path,
    quantization: Quantization,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Read the fp32 graphs in `source`; write graphs with 8 or 4 bits to `directory`.

    The output projection and the embeddings always have 8 bits, because models/dates needs them.
    """
    graphs = {name: entry for name, entry in graphs.items() if name != REORDER}  # that is for GPUs
    models = {name: graph_file.load_graph(source / entry.file) for name, entry in graphs.items()}
    graph_file.check_weights((model.graph for model in models.values()), quantization.weights)
    encoders = [models[name].graph for name in (ENCODER, ENCODER_CONTRIB) if name in models]
    many_rows = {span(found.weight) for graph in encoders for found in linear_maps(graph)}
    store = _Store({place: name for name, place in graph_file.tensor_spans(source / WEIGHTS).items()})
    for model in models.values():
        _IntegerGraph(model.graph, store, quantization, many_rows).rewrite()
        RemoveUnusedNodesPass()(model)
        model.graph.opset_imports.setdefault(_DOMAIN, 1)
    store.save(directory / WEIGHTS)
    for name, model in models.items():
        graph_file.save_graph(model, directory / graphs[name].file, graphs[name].spec, portable=False)
    report(f"{sum(tensor.nbytes for tensor in store.tensors.values()):,} bytes of weights as {quantization.weights}")
    return graphs


class _Store:
    """The tensors of the new weight file; each weight is stored once per kind."""

    def __init__(self, names: Mapping[Span, str]) -> None:
        self.names = names  # of the tensors of the old file
        self.tensors: dict[str, NDArray[Any]] = {}
        # Initializers that become references when the file is written, each with the name of its tensor.
        self.references: list[tuple[ir.Value, str]] = []
        self._stored: dict[tuple[Span, _Kind, int], list[str]] = {}

    def put(self, weight: ir.Value, kind: _Kind, outputs: int = 0) -> list[str]:
        """Store a weight and return the names of its tensors."""
        key = (span(weight), kind, outputs)
        if key not in self._stored:
            # Joint parameters have no name in the file; their names in graphs begin with the module `model`.
            name = self.names.get(span(weight), (weight.name or "").removeprefix("model."))
            tensors = _round(name, graph_file.read_weight(weight), kind, outputs)
            assert not tensors.keys() & self.tensors.keys()
            self._stored[key] = list(tensors)
            self.tensors.update(tensors)
        return self._stored[key]

    def save(self, path: Path) -> None:
        try:
            save_file(dict(self.tensors), path)
        except SafetensorError as error:  # the library wraps every OSError
            raise BundleError(
                f"cannot write bundle: {path.name}: {error}; free some space or choose another output"
            ) from error
        path.chmod(0o644)  # safetensors creates files that only their owner can read
        spans = graph_file.tensor_spans(path)
        for value, tensor in self.references:
            graph_file.refer(value, spans[tensor], path.parent)


class _IntegerGraph:
    """Rewrite one graph; an activation that several products read is rounded once."""

    def __init__(self, graph: ir.Graph, store: _Store, quantization: Quantization, many_rows: set[Span]) -> None:
        self._graph, self._store, self._quantization, self._many_rows = graph, store, quantization, many_rows
        self._parts: dict[str, ir.Value] = {}
        self._rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def rewrite(self) -> None:
        graph, old = self._graph, sorted(graph_file.external_weights(self._graph), key=lambda weight: weight.name or "")
        maps = [found for found in linear_maps(graph) if found.is_plain]
        if not maps and graph.name != SHORTLIST:  # which only looks up
            raise GraphError(
                f"{self._quantization.weights}: no linear map has at least {LEAST_WEIGHTS} weights; export with fp32"
            )
        tables = list(lookups(graph))
        for found in maps:
            self._replace(found.node, *self._linear(found))
        for node in tables:
            self._replace(node, *self._lookup(node))
        for weight in old:
            del graph.initializers[weight.name or ""]
        still_read = {node for node in graph if node.op_type != "Transpose" or node.outputs[0].uses()}
        for weight in old:
            if any(node in still_read for node, _ in weight.uses()):
                (tensor,) = self._store.put(weight, "plain")
                self._parts[weight.name or ""] = weight
                self._store.references.append((weight, tensor))
        for value in self._parts.values():
            graph.register_initializer(value)

    def _replace(self, node: ir.Node, tape: ir.tape.Tape, output: ir.Value) -> None:
        ir.convenience.replace_nodes_and_values(self._graph, node, [node], tape.nodes, node.outputs, [output])

    def _linear(self, found: LinearMap) -> tuple[ir.tape.Tape, ir.Value]:
        tape, node, kind = ir.tape.Tape(), found.node, self._kind(found)
        tensors = [self._part(tensor) for tensor in self._store.put(found.weight, kind, found.outputs)]
        bias = [] if found.bias is None else [found.bias]
        if kind == "int8_columns":
            target = f"{node.outputs[0].name}_product" if bias else f"{node.outputs[0].name}"
            output = self._row_product(tape, node, tensors, target)
            return tape, tape.op("Add", [output, *bias], name="") if bias else output
        assert found.weight.shape is not None
        inputs, outputs = found.weight.shape.numpy()[1 - found.outputs], found.weight.shape.numpy()[found.outputs]
        bits = 4 if kind == "int4_blocks" else 8
        attributes = {"K": inputs, "N": outputs, "bits": bits, "block_size": _block(inputs, bits)}
        attributes["accuracy_level"] = _ACCURACY_LEVEL
        read = [node.inputs[0], *tensors, *([None, *bias] if bias else [])]
        return tape, tape.op("MatMulNBits", read, attributes, domain=_DOMAIN, name=node.name)

    def _kind(self, found: LinearMap) -> _Kind:
        if self._quantization.weights == "int4":
            return "int8_blocks" if found.is_projection else "int4_blocks"
        is_wide = span(found.weight) in self._many_rows or self._quantization.optimize_for == "throughput"
        return "int8_columns" if is_wide else "int8_blocks"

    def _row_product(self, tape: ir.tape.Tape, node: ir.Node, tensors: list[ir.Value], target: str) -> ir.Value:
        """Multiply [..., inputs] with int8 [inputs, outputs] and float32 scales [outputs]."""
        rows = node.inputs[0]
        assert rows is not None
        relu = rows.producer()
        is_signed = relu is None or relu.op_type != "Relu"
        largest, zero = _SIGNED if is_signed else _UNSIGNED
        axis = self._constant("row_axis", np.array([-1]))
        least = self._constant("row_least", np.array(_LEAST_MAGNITUDE, np.float32))
        unit = self._constant(f"row_unit_{largest}", np.array(1 / largest, np.float32))
        zero_point = self._constant(f"row_zero_{zero}", np.array(zero, np.uint8))
        if rows not in self._rounded:

            def step(operator: str, read: list[ir.Value | None], made: str) -> ir.Value:
                return tape.op(operator, read, name="", output=ir.Value(name=f"{rows.name}_{made}"))

            # Unsigned rounding clips negative values, so a ReLU before it is not needed.
            source = rows if is_signed or relu is None else relu.inputs[0]
            magnitudes = step("Abs", [source], "magnitudes") if is_signed else source
            magnitude = step("Max", [step("ReduceMax", [magnitudes, axis], "largest"), least], "magnitude")
            scaled = step("Div", [source, magnitude], "unit")
            self._rounded[rows] = step("QuantizeLinear", [scaled, unit, zero_point], "rounded"), magnitude
        rounded, magnitude = self._rounded[rows]
        values, scales = tensors
        product = ir.Value(name=f"{target}_of_unit_rows")
        read = [rounded, values, unit, scales, zero_point]
        tape.op("MatMulIntegerToFloat", read, domain=_DOMAIN, name=node.name, output=product)
        return tape.op("Mul", [product, magnitude], name="", output=ir.Value(name=target))

    def _lookup(self, node: ir.Node) -> tuple[ir.tape.Tape, ir.Value]:
        # Quantized in the same way as the output projection, so that a tied table is stored once.
        tape, (weight, ids) = ir.tape.Tape(), node.inputs
        assert weight is not None
        assert weight.shape is not None
        values, *rest = self._store.put(weight, "int8_blocks")
        outputs, blocks, block = self._store.tensors[values].shape
        rows = self._part(values, f"{values}.rows", (outputs, blocks * block))
        settings = {"bits": 8, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
        read = [rows, ids, *map(self._part, rest)]
        gathered = tape.op("GatherBlockQuantized", read, settings, domain=_DOMAIN, name=node.name)
        width = weight.shape.numpy()[1]
        if blocks * block == width:
            return tape, gathered
        # Cut off the padding of the last block.
        gathered.name = f"{node.outputs[0].name}_padded"
        bounds = [self._constant(f"bound_{bound}", np.array([bound])) for bound in (0, width, -1)]
        return tape, tape.op("Slice", [gathered, *bounds], name="")

    def _part(self, tensor: str, name: str = "", shape: tuple[int, ...] = ()) -> ir.Value:
        name = name or tensor
        if name not in self._parts:
            array = self._store.tensors[tensor].reshape(shape or self._store.tensors[tensor].shape)
            self._parts[name] = _initializer(name, array)
            self._store.references.append((self._parts[name], tensor))
        return self._parts[name]

    def _constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        return self._parts.setdefault(name, _initializer(name, array))


def _initializer(name: str, array: NDArray[Any]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)


def _block(inputs: int, bits: int) -> int:
    # A size that divides the inputs, or else a small one, which wastes less space in the last block.
    sizes = [_BLOCK[bits] >> shift for shift in range(8) if _BLOCK[bits] >> shift >= _LEAST_BLOCK]
    return next((size for size in sizes if inputs % size == 0), _BLOCK[4])


def _round(name: str, array: NDArray[Any], kind: _Kind, outputs: int) -> dict[str, NDArray[Any]]:
    if kind == "plain":
        return {name: array}
    # safetensors writes an array in its memory order, so transposing needs a copy.
    matrix = array if outputs == 0 else array.T.copy()
    if kind == "int8_columns":
        rounded = round_matrix(matrix, "int8", 0)
        return {f"{name}.{kind}.values": rounded.values.T.copy(), f"{name}.{kind}.scales": rounded.scales}
    bits = 4 if kind == "int4_blocks" else 8
    blocks = round_blocks(matrix, bits, _block(matrix.shape[1], bits))
    return {f"{name}.{kind}.{part}": tensor for part, tensor in blocks._asdict().items()}
