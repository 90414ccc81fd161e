"""Check a written graph: ONNX's own checker, shape inference, and the contract of `tfexport.spec`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import onnx

from tfexport.errors import GraphError, raise_all
from tfexport.graph.passes.attention_check import attention_problems
from tfexport.spec import DType, GraphSpec, TensorSpec


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
    problems: list[str] = []
    for kind, found, wanted in (
        ("input", model.graph.input, contract.inputs),
        ("output", model.graph.output, contract.outputs),
    ):
        spelled = [_spell(_read(value)) for value in found]
        expected = [_spell(tensor) for tensor in wanted]
        problems += [f"{kind} {text} is not in the contract" for text in spelled if text not in expected]
        problems += [f"{kind} {text} is missing" for text in expected if text not in spelled]
        if not problems and spelled != expected:
            problems.append(f"{kind}s are out of order")
    problems += attention_problems(model) if portable else []
    raise_all(GraphError, path.name, problems)


def _read(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    name = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    dtype = {"float": "float32"}.get(name, name)
    shape = tuple(dim.dim_param if dim.HasField("dim_param") else dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(value.name, cast(DType, dtype), shape)


def _spell(tensor: TensorSpec) -> str:
    return f"{tensor.name} {tensor.dtype} [{', '.join(map(str, tensor.shape))}]"
