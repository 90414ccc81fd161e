"""Check a written graph: ONNX's own checker, shape inference, and the contract of `tfexport.contract`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import onnx
from onnx import helper

from tfexport.contract import DType, GraphSpec, TensorSpec, contract_problems
from tfexport.errors import GraphError, raise_all
from tfexport.export.passes.attention_check import attention_problems


def check_graph(path: Path, contract: GraphSpec, *, portable: bool = True) -> None:
    """Refuse a graph that is not valid ONNX or not what the contract says.

    Args:
        path: of the graph, its external data beside it.
        contract: inputs and outputs that it must have, in order.
        portable: refuse attention that TensorRT would misread; the contrib form is not for it.

    Raises:
        GraphError: lists every difference.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise GraphError(f"{path.name}: not valid ONNX: {str(error).strip().splitlines()[0]}") from error
    found = GraphSpec(tuple(map(_read, model.graph.input)), tuple(map(_read, model.graph.output)))
    problems = contract_problems(found, contract) + (attention_problems(model) if portable else [])
    raise_all(GraphError, path.name, problems)


def value_info(tensor: TensorSpec) -> onnx.ValueInfoProto:
    """Write an input or output of a graph as ONNX has it."""
    dtype = {"float32": "float"}.get(tensor.dtype, tensor.dtype)
    return helper.make_tensor_value_info(tensor.name, onnx.TensorProto.DataType.Value(dtype.upper()), tensor.shape)


def _read(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    name = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    dtype = {"float": "float32"}.get(name, name)
    shape = tuple(dim.dim_param if dim.HasField("dim_param") else dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(value.name, cast(DType, dtype), shape)
