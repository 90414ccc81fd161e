"""Let graphs compute in integers: linear maps and embeddings as operators of ONNX Runtime's CPU for 8 and 4 bits.

MatMulNBits reads weights in blocks, and is the fastest for the few rows of a decoder's step. Products of integers, as
`row_product` writes them, are faster where rows are many, as in an encoder. Both round the activations of every row by
themselves: a text does not depend on those beside it.
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md describes the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx
from numpy.typing import NDArray
from onnx import helper
from onnx.external_data_helper import set_external_data
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tfexport.contract import ENCODER, ENCODER_CONTRIB, REORDER, WEIGHTS, Form, GraphEntry, Quantization
from tfexport.errors import BundleError, GraphError, raise_all
from tfexport.export.contract import check_graph
from tfexport.export.decoders import FORMS
from tfexport.export.decoders.form import Seam
from tfexport.export.external_data import Span, external_weights, read_weight, span, tensor_spans
from tfexport.export.quantize.linear import Product, lookups, products
from tfexport.export.quantize.row_product import RowProducts
from tfexport.export.quantize.weight_quantize import round_blocks, round_matrix
from tfexport.nn.config import TransformerConfig

# How a weight is stored: as it was, in blocks of 8 or 4 bits, or in 8 bits with a scale for each output.
_Kind = Literal["plain", "int8_blocks", "int4_blocks", "int8_columns"]

_DOMAIN = "com.microsoft"
# Activations are rounded to 8 bits; without it they are multiplied in float32, at a fraction of the speed.
_ACCURACY_LEVEL = 4
# Inputs that share a scale, by bits: larger blocks are no faster, smaller ones more exact and larger in the file.
_BLOCK = {8: 128, 4: 32}
# What the operators take.
_LEAST_BLOCK = 16
# What is smaller saves nothing.
_LEAST_WEIGHTS = 4096


@dataclass(frozen=True)
class _Part:
    """An initializer to be: a tensor of the new file, under a name and a shape of its own."""

    name: str
    tensor: str
    shape: tuple[int, ...]


@dataclass
class _Store:
    """The tensors of the new file; a weight is there once in each kind, whatever graphs read it.

    Attributes:
        source: directory of the old file.
        names: of the tensors in it.
        many_rows: those that are multiplied with all tokens of the sources at once.
    """

    source: Path
    names: Mapping[Span, str]
    many_rows: frozenset[Span]
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    _made: dict[tuple[Span, _Kind, int], list[str]] = field(default_factory=dict)

    def put(self, weight: onnx.TensorProto, kind: _Kind, outputs: int = 0) -> list[str]:
        """Store a weight and name its tensors: itself, or values, scales and zero points."""
        place = span(weight)
        key = (place, kind, outputs)
        if key not in self._made:
            # Joint parameters have no name of their own in the file; graphs name them within a module `model`.
            name = self.names.get(place, weight.name.removeprefix("model."))
            tensors = _round(name, read_weight(self.source, weight), kind, outputs)
            assert not tensors.keys() & self.tensors.keys()
            self._made[key] = list(tensors)
            self.tensors.update(tensors)
        return self._made[key]

    def part(self, tensor: str) -> _Part:
        """Return an initializer under the name and shape of its tensor."""
        return _Part(tensor, tensor, self.tensors[tensor].shape)


def fastest_form(forms: Sequence[Form], traits: TransformerConfig | Seam) -> tuple[Form, ...]:
    """Choose the only form worth quantising: graphs for one runtime need no other than its fastest."""
    fastest: tuple[Form, ...] = ("contrib", "static", "concat")
    able = [form for form in fastest if form in forms and not FORMS[form].supports(traits, "fp32")]
    return tuple(able[:1] or forms)


def write_integer_graphs(
    source: Path,
    graphs: Mapping[str, GraphEntry],
    directory: Path,
    quantization: Quantization,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Write graphs whose linear maps and embeddings are 8 or 4 bits wide.

    The output projection and the embeddings are never narrower than 8 bits, which is what the tokens of models/dates
    ask for. Norms, biases, tables of positions and matrices below 4096 weights stay as they are, and so does a Gemm
    with factors. Names, types and shapes of inputs and outputs stay.

    Args:
        source: directory of the graphs, in fp32, and of their weight file.
        graphs: to read, by name in the contract; all share the weight file. `reorder` is for GPUs and left out.
        directory: another one, existing; receives the graphs under their file names and `weights.safetensors`.
        quantization: how the weights are stored.
        report: told what happens, a line at a time.

    Returns:
        What a manifest says of each graph, by its name.

    Raises:
        GraphError: a graph has no linear map that is large enough; lists every weight that lies outside `source` or is
            not finite.
        BundleError: the disk is full.
    """
    graphs = {name: entry for name, entry in graphs.items() if name != REORDER}
    models = {name: onnx.load(str(source / entry.file), load_external_data=False) for name, entry in graphs.items()}
    names = {place: name for name, place in tensor_spans(source / WEIGHTS).items()}
    many_rows = frozenset().union(*(_multiplied(models[name]) for name in (ENCODER, ENCODER_CONTRIB) if name in models))
    store = _Store(source, names, many_rows)
    _check_weights(source, models.values(), quantization.weights)
    parts = {name: _rewrite(model, store, quantization) for name, model in models.items()}
    spans = _save(store.tensors, directory / WEIGHTS)
    for name, model in models.items():
        model.graph.initializer.extend(_initializer(part, store.tensors[part.tensor], spans) for part in parts[name])
        path = directory / graphs[name].file
        onnx.save(model, str(path))
        check_graph(path, graphs[name].spec, portable=False)
    report(f"{sum(tensor.nbytes for tensor in store.tensors.values()):,} bytes of weights as {quantization.weights}")
    return graphs


def _check_weights(source: Path, models: Iterable[onnx.ModelProto], subject: str) -> None:
    """Refuse weights that cannot be rounded, all at once."""
    external = {span(weight): weight for model in models for weight in external_weights(model.graph).values()}
    problems = []
    for weight in external.values():
        try:
            read_weight(source, weight)
        except GraphError as error:
            problems.append(str(error))
    raise_all(GraphError, subject, problems)


def _multiplied(model: onnx.ModelProto) -> frozenset[Span]:
    weights = external_weights(model.graph)
    return frozenset(span(weights[product.weight]) for product in products(model.graph, least=_LEAST_WEIGHTS))


def _rewrite(model: onnx.ModelProto, store: _Store, quantization: Quantization) -> list[_Part]:
    """Put the narrow operators in place of the others, and take out the initializers that lie in a file.

    Returns:
        The initializers that the graph now needs of the new file.
    """
    graph, weights = model.graph, external_weights(model.graph)
    replaced: dict[str, list[onnx.NodeProto]] = {}
    parts: list[_Part] = []
    row_products = RowProducts(graph)
    for product in products(graph, least=_LEAST_WEIGHTS):
        new, used = _multiply(product, weights[product.weight], store, quantization, row_products)
        replaced[product.node.output[0]] = new
        parts += used
    if not replaced:
        raise GraphError(f"{quantization.weights}: no linear map has {_LEAST_WEIGHTS} weights; export with fp32")
    for node in lookups(graph, least=_LEAST_WEIGHTS):
        new, used = _look_up(node, weights[node.input[0]], store)
        replaced[node.output[0]] = new
        parts += used
    nodes = [new for old in graph.node for new in replaced.get(old.output[0], [old])]
    nodes = _without_unread(nodes, {value.name for value in graph.output})
    parts += _plain(nodes, weights, store)
    inside = [weight for weight in graph.initializer if weight.name not in weights]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend([*inside, *row_products.constants()])
    if all(entry.domain != _DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    return list({part.name: part for part in parts}.values())


def _multiply(
    product: Product,
    weight: onnx.TensorProto,
    store: _Store,
    quantization: Quantization,
    row_products: RowProducts,
) -> tuple[list[onnx.NodeProto], list[_Part]]:
    """Write a linear map with narrow weights."""
    node = product.node
    kind = _kind(product, span(weight) in store.many_rows, quantization)
    tensors = store.put(weight, kind, product.outputs)
    target = f"{node.output[0]}_sum" if product.activation else node.output[0]
    if kind == "int8_columns":
        values, scales = tensors
        scaled = f"{target}_product" if product.bias else target
        new = row_products.multiply(node.input[0], values, scales, scaled, node.name)
        if product.bias:
            new.append(helper.make_node("Add", [scaled, product.bias], [target]))
    else:
        inputs, outputs = weight.dims[1 - product.outputs], weight.dims[product.outputs]
        bits = 4 if kind == "int4_blocks" else 8
        attributes = {
            "K": inputs,
            "N": outputs,
            "bits": bits,
            "block_size": _block(inputs, bits),
            "accuracy_level": _ACCURACY_LEVEL,
        }
        names = [node.input[0], *tensors, *(["", product.bias] if product.bias else [])]
        new = [helper.make_node("MatMulNBits", names, [target], domain=_DOMAIN, name=node.name, **attributes)]
    if product.activation:
        new.append(helper.make_node(product.activation, [target], [node.output[0]]))
    return new, [store.part(tensor) for tensor in tensors]


def _kind(product: Product, has_many_rows: bool, quantization: Quantization) -> _Kind:
    if quantization.weights == "int4":
        return "int8_blocks" if product.is_projection else "int4_blocks"
    return "int8_columns" if has_many_rows or quantization.optimize_for == "throughput" else "int8_blocks"


def _look_up(node: onnx.NodeProto, weight: onnx.TensorProto, store: _Store) -> tuple[list[onnx.NodeProto], list[_Part]]:
    """Write an embedding with a narrow table; one that is the output projection too is stored once."""
    values, *rest = (store.part(tensor) for tensor in store.put(weight, "int8_blocks"))
    outputs, blocks, block = values.shape
    rows = _Part(f"{values.name}.rows", values.tensor, (outputs, blocks * block))
    width, target = weight.dims[1], node.output[0]
    is_whole = blocks * block == width
    gather = helper.make_node(
        "GatherBlockQuantized",
        [rows.name, node.input[1], *(part.name for part in rest)],
        [target if is_whole else f"{target}_padded"],
        domain=_DOMAIN,
        name=node.name,
        bits=8,
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
    )
    return [gather] if is_whole else [gather, *_first_columns(f"{target}_padded", target, width)], [rows, *rest]


def _first_columns(source: str, target: str, width: int) -> list[onnx.NodeProto]:
    """Cut off what fills the last block."""
    bounds = {f"{target}_begin": 0, f"{target}_end": width, f"{target}_axis": -1}
    constants = [helper.make_node("Constant", [], [name], value_ints=[value]) for name, value in bounds.items()]
    return [*constants, helper.make_node("Slice", [source, *bounds], [target])]


def _block(inputs: int, bits: int) -> int:
    """Choose how many inputs share a scale: as many as divide them, or so few that the last block is short."""
    sizes = [_BLOCK[bits] >> shift for shift in range(8) if _BLOCK[bits] >> shift >= _LEAST_BLOCK]
    return next((size for size in sizes if inputs % size == 0), _BLOCK[4])


def _round(name: str, array: NDArray[Any], kind: _Kind, outputs: int) -> dict[str, NDArray[Any]]:
    """Return the tensors of a weight under the names that they have in the file."""
    if kind == "plain":
        return {name: array}
    # safetensors writes an array as it lies in memory: turned, it has to be moved.
    matrix = array if outputs == 0 else array.T.copy()
    if kind == "int8_columns":
        rounded = round_matrix(matrix, "int8", 0)
        return {f"{name}.{kind}.values": rounded.values.T.copy(), f"{name}.{kind}.scales": rounded.scales}
    bits = 4 if kind == "int4_blocks" else 8
    blocks = round_blocks(matrix, bits, _block(matrix.shape[1], bits))
    return {
        f"{name}.{kind}.values": blocks.values,
        f"{name}.{kind}.scales": blocks.scales,
        f"{name}.{kind}.zero_points": blocks.zero_points,
    }


def _without_unread(nodes: list[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """Leave out what nobody reads any more: nodes that turned a matrix, and ReLUs before a rounding that cuts too."""
    read = outputs.union(*(node.input for node in nodes))
    return [node for node in nodes if node.op_type not in ("Transpose", "Relu") or node.output[0] in read]


def _plain(nodes: Iterable[onnx.NodeProto], weights: Mapping[str, onnx.TensorProto], store: _Store) -> list[_Part]:
    """Keep the weights that are still read as they are."""
    read = {name for node in nodes for name in node.input if name in weights}
    return [
        _Part(name, tensor, tuple(weights[name].dims))
        for name in sorted(read)
        for tensor in store.put(weights[name], "plain")
    ]


def _save(tensors: Mapping[str, NDArray[Any]], path: Path) -> dict[str, Span]:
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:  # what the library makes of an OSError
        raise BundleError(
            f"cannot write bundle: {path.name}: {error}; free some space or choose another output"
        ) from error
    path.chmod(0o644)  # safetensors makes files that only their owner can read
    return tensor_spans(path)


def _initializer(part: _Part, tensor: NDArray[Any], spans: Mapping[str, Span]) -> onnx.TensorProto:
    dtype = helper.np_dtype_to_tensor_dtype(tensor.dtype)
    made = onnx.TensorProto(name=part.name, data_type=dtype, dims=part.shape, raw_data=b"")
    set_external_data(made, *spans[part.tensor])
    made.ClearField("raw_data")
    return made
