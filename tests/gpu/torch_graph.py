"""Run the ONNX graphs of a model on PyTorch, with shapes on the host, so that a CUDA graph can capture a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor
from torch.nn import functional

from tfexport.errors import GraphError

Attributes = dict[str, Any]
DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.BOOL: torch.bool,
}
# Inputs that the host reads, by operator.
ON_HOST: dict[str, tuple[int, ...]] = {
    "Expand": (1,),
    "Range": (0, 1, 2),
    "ReduceMean": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Squeeze": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}


def _attention(a: Attributes, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = (query @ key.mT).float() * a.get("scale", 1 / math.sqrt(query.shape[-1]))
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).to(value.dtype) @ value


def _divide(a: Attributes, x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _gather(a: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = a.get("axis", 0) % x.dim()
    counted = torch.where(indices < 0, indices + x.shape[axis], indices)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return x.index_select(axis, counted.reshape(-1)).reshape(shape)


def _gemm(a: Attributes, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    if (a.get("alpha", 1), a.get("beta", 1)) != (1, 1):
        raise GraphError(f"Gemm: alpha {a['alpha']} and beta {a['beta']}, expected 1")
    found = (x.mT if a.get("transA") else x) @ (y.mT if a.get("transB") else y)
    return found if bias is None else found + bias


def _layer_norm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = x.shape[a.get("axis", -1) :]
    return functional.layer_norm(x, shape, weight, bias, a.get("epsilon", 1e-5))


def _range(a: Attributes, start: Tensor, stop: Tensor, step: Tensor) -> Tensor:
    return torch.arange(int(start), int(stop), int(step), device=a["device"])


def _reshape(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    wanted = shape.tolist()
    if not a.get("allowzero"):
        wanted = [x.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    return x.reshape(wanted)


def _scatter(a: Attributes, cache: Tensor, update: Tensor, begin: Tensor) -> Tensor:
    # Written in place, as engines do.
    places = begin[:, None] + torch.arange(update.shape[2], device=update.device)
    return cache.scatter_(2, places[:, None, :, None].expand(update.shape), update)


def _unsqueeze(a: Attributes, x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + axes.numel()
    for axis in sorted(axis % rank for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": lambda a, x: x.abs(),
    "Add": lambda a, x, y: x + y,
    "Attention": _attention,
    "Cast": lambda a, x: x.to(DTYPES[a["to"]]),
    "Clip": lambda a, x, low=None, high=None: x.clamp(low, high),
    "Concat": lambda a, *parts: torch.cat(parts, a["axis"]),
    "Cos": lambda a, x: x.cos(),
    "Div": _divide,
    "Erf": lambda a, x: x.erf(),
    "Expand": lambda a, x, shape: x.expand(torch.broadcast_shapes(x.shape, shape.tolist())),
    "Gather": _gather,
    "GatherElements": lambda a, x, indices: x.gather(a.get("axis", 0), indices),
    "Gelu": lambda a, x: functional.gelu(x, approximate=a.get("approximate", b"none").decode()),
    "Gemm": _gemm,
    "Greater": lambda a, x, y: x > y,
    "LayerNormalization": _layer_norm,
    "Less": lambda a, x, y: x < y,
    "LessOrEqual": lambda a, x, y: x <= y,
    "Log": lambda a, x: x.log(),
    "MatMul": lambda a, x, y: x @ y,
    "Mul": lambda a, x, y: x * y,
    "Neg": lambda a, x: -x,
    "Pow": lambda a, x, y: x**y,
    "Range": _range,
    "Reciprocal": lambda a, x: x.reciprocal(),
    "ReduceMean": lambda a, x, axes: x.mean(axes.tolist(), keepdim=bool(a.get("keepdims", 1))),
    "ReduceSum": lambda a, x, axes: x.sum(axes.tolist(), keepdim=bool(a.get("keepdims", 1))),
    "Relu": lambda a, x: x.relu(),
    "Reshape": _reshape,
    "Shape": lambda a, x: torch.tensor(x.shape[a.get("start", 0) : a.get("end")], dtype=torch.int64),
    "Sigmoid": lambda a, x: x.sigmoid(),
    "Sin": lambda a, x: x.sin(),
    "Softmax": lambda a, x: x.softmax(a.get("axis", -1)),
    "Sqrt": lambda a, x: x.sqrt(),
    "Squeeze": lambda a, x, axes=None: x.squeeze() if axes is None else x.squeeze(axes.tolist()),
    "Sub": lambda a, x, y: x - y,
    "Tanh": lambda a, x: x.tanh(),
    "TensorScatter": _scatter,
    "TopK": lambda a, x, k: tuple(x.topk(int(k), a.get("axis", -1))),
    "Transpose": lambda a, x: x.permute(a["perm"]),
    "Unsqueeze": _unsqueeze,
    "Where": lambda a, condition, x, y: torch.where(condition, x, y),
}


@dataclass(frozen=True)
class _Call:
    """One node; arguments are names of values, constants, or None if one is left out."""

    operator: Callable[..., Any]
    attributes: Attributes
    arguments: tuple[str | Tensor | None, ...]
    outputs: tuple[str, ...]


class TorchGraph:
    """An ONNX graph with its weights on a device, loaded once and run by any number of threads."""

    def __init__(self, graph: Path | bytes, device: str) -> None:
        """Load a graph; raise `GraphError` if it has an unknown operator."""
        model = onnx.load_model_from_string(graph) if isinstance(graph, bytes) else onnx.load(str(graph))
        unknown = sorted({node.op_type for node in model.graph.node} - OPERATORS.keys())
        if unknown:
            raise GraphError(f"{model.graph.name}: no {', '.join(unknown)} here; add it to tests/gpu/torch_graph.py")
        host = _host_values(model.graph.node)
        constants = {tensor.name: _constant(tensor) for tensor in model.graph.initializer}
        moved = {name: tensor.to(device) for name, tensor in constants.items()}
        self._outputs = [output.name for output in model.graph.output]
        self._calls = [_call(node, host, constants, moved, device) for node in model.graph.node]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the graph on inputs on the device, except `num_candidates`, which is on the host.

        Caches that TensorScatter writes are changed in place and are the outputs.
        """
        values: dict[str, Tensor] = dict(inputs)
        for call in self._calls:
            arguments = [values[each] if isinstance(each, str) else each for each in call.arguments]
            found = call.operator(call.attributes, *arguments)
            values.update(zip(call.outputs, found if isinstance(found, tuple) else (found,), strict=True))
        return {name: values[name] for name in self._outputs}


def _host_values(nodes: Sequence[NodeProto]) -> set[str]:
    host: set[str] = set()
    for node in reversed(nodes):
        host.update(node.input[place] for place in ON_HOST.get(node.op_type, ()) if place < len(node.input))
        if not host.isdisjoint(node.output) and node.op_type != "Shape":
            host.update(node.input)
    return host


def _call(
    node: NodeProto, host: set[str], constants: Mapping[str, Tensor], moved: Mapping[str, Tensor], device: str
) -> _Call:
    is_host = not host.isdisjoint(node.output)
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    attributes["device"] = "cpu" if is_host else device

    def argument(place: int, name: str) -> str | Tensor | None:
        side = constants if is_host or place in ON_HOST.get(node.op_type, ()) else moved
        return side.get(name, name) if name else None

    arguments = tuple(argument(place, name) for place, name in enumerate(node.input))
    return _Call(OPERATORS[node.op_type], attributes, arguments, tuple(node.output))


def _constant(tensor: TensorProto) -> Tensor:
    if tensor.data_type == TensorProto.BFLOAT16:  # which numpy does not know
        return torch.from_numpy(numpy_helper.to_array(tensor).view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(numpy_helper.to_array(tensor).copy())
