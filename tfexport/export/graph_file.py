"""Read, write, check and describe graph files and their weights, without PyTorch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from tfexport.contract import GraphSpec, TensorSpec, contract_problems
from tfexport.errors import GraphError, first_line, raise_all, shortened
from tfexport.export.attention_check import attention_problems
from tfexport.nn.stored import read_header
from tfexport.precision import DType

_DTYPES = {"float": "float32", "double": "float64"}


def load_graph(path: Path) -> ir.Model:
    """Read a graph without its external weights."""
    try:
        model = ir.load(path)
    except Exception as error:
        raise GraphError(
            f"{path}: is not an ONNX model ({first_line(error.__cause__ or error)}); export it again"
        ) from error
    if not model.opset_imports:  # an empty file is a valid protobuf
        raise GraphError(f"{path}: is not an ONNX model (it names no opset); export it again")
    return model


def save_graph(model: ir.Model, path: Path, expected: GraphSpec, *, portable: bool = True) -> None:
    """Write a graph, and check that the file is valid ONNX and fulfills the contract."""
    try:
        ir.save(model, path)
        onnx.checker.check_model(str(path), full_check=True)
        written = ir.load(path)
    except Exception as error:
        raise GraphError(f"{path.name}: is not valid ONNX: {first_line(error)}") from error
    found = GraphSpec(tuple(map(tensor_spec, _required(written.graph))), tuple(map(tensor_spec, written.graph.outputs)))
    problems = contract_problems(found, expected) + (attention_problems(written) if portable else [])
    raise_all(GraphError, path.name, problems)


def tensor_spec(value: ir.Value) -> TensorSpec:
    """Describe an input or output of a graph; an unknown dimension is "?"."""
    name = value.dtype.name.lower() if value.dtype is not None else "?"
    shape = [dim if isinstance(dim, int) else dim.value or "?" for dim in value.shape or ()]
    return TensorSpec(value.name or "", cast(DType, _DTYPES.get(name, name)), tuple(shape))


class Span(NamedTuple):
    """A range of bytes of a file; graphs that share a weight have equal spans."""

    location: str
    offset: int
    length: int


def external_weights(graph: ir.Graph) -> list[ir.Value]:
    """Return the initializers that refer to a file."""
    return [value for value in graph.initializers.values() if isinstance(value.const_value, ir.ExternalTensor)]


def span(weight: ir.Value) -> Span:
    """Return the bytes that an external weight refers to."""
    tensor = weight.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    return Span(str(tensor.location), tensor.offset or 0, tensor.length or 0)


def refer(value: ir.Value, place: Span, directory: Path) -> None:
    """Make an initializer refer to bytes of a file in `directory`."""
    assert value.const_value is not None
    shape, dtype, name = ir.Shape(value.const_value.shape.numpy()), value.const_value.dtype, value.name or ""
    value.const_value = ir.ExternalTensor(*place, dtype, shape=shape, name=name, base_dir=directory)


def read_weight(weight: ir.Value) -> NDArray[Any]:
    """Read an external weight; it has to be in the directory of the graph, and finite."""
    tensor, place, name = weight.const_value, span(weight), shortened(weight.name or "")
    assert isinstance(tensor, ir.ExternalTensor)
    path = Path(tensor.base_dir) / place.location
    if Path(place.location).name != place.location or path.is_symlink():
        raise GraphError(f"{name} is in {shortened(place.location)}, expected a file next to the graph")
    dtype, shape = tensor.dtype.numpy(), tensor.shape.numpy()
    count = math.prod(shape)
    if place.length != count * dtype.itemsize or not 0 <= place.offset <= path.stat().st_size - place.length:
        raise GraphError(f"{name} does not fit {place.location}; export the bundle again")
    array = np.fromfile(path, dtype, count, offset=place.offset).reshape(shape)
    if not np.isfinite(array.astype(np.float32)).all():
        raise GraphError(f"{name} contains NaN or infinity; use a model from before the training diverged")
    return array


def check_weights(graphs: Iterable[ir.Graph], subject: str) -> None:
    """Raise a GraphError that lists external weights outside or not finite."""
    problems = []
    for weight in {span(weight): weight for graph in graphs for weight in external_weights(graph)}.values():
        try:
            read_weight(weight)
        except GraphError as error:
            problems.append(str(error))
    raise_all(GraphError, subject, problems)


def tensor_spans(path: Path) -> dict[str, Span]:
    """Return the bytes of each tensor of a safetensors file."""
    return {name: Span(path.name, tensor.offset, tensor.num_bytes) for name, tensor in read_header(path).items()}


def describe_graph(path: Path) -> dict[str, Any]:
    """Return inputs, outputs, operators and names of the weight files as JSON values."""
    model = load_graph(path)
    graph = model.graph
    nodes = ir.traversal.RecursiveGraphIterator(graph)
    operators = Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in nodes)
    return {
        "ir_version": model.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in model.opset_imports.items()},
        "operators": dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        "weight_files": sorted({span(weight).location for weight in external_weights(graph)}),
        "inputs": [_described(value) for value in _required(graph)],
        "outputs": [_described(value) for value in graph.outputs],
    }


def weight_bytes(graph: bytes) -> int:
    """Return the size of all weights of a serialized graph; shared bytes count once."""
    model = ir.from_proto(onnx.load_model_from_string(graph))
    outside = {span(weight) for weight in external_weights(model.graph)}
    tensors = [value.const_value for value in model.graph.initializers.values()]
    inside = [tensor.nbytes for tensor in tensors if tensor is not None and not isinstance(tensor, ir.ExternalTensor)]
    return sum(place.length for place in outside) + sum(inside)


def _required(graph: ir.Graph) -> list[ir.Value]:
    # Up to IR version 3, the inputs include the weights; later, an initializer is the default of an optional input.
    return [value for value in graph.inputs if value.name not in graph.initializers]


def _described(value: ir.Value) -> dict[str, Any]:
    tensor = tensor_spec(value)
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
