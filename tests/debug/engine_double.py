"""Engines of TensorRT-RTX on a double of CUDA, which compute what ONNX Runtime computes with rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import tensorrt_rtx as trt
from onnx import TensorProto

from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.trt_double import FakeContext, FakeEngine
from tfexport.contract import NUM_CANDIDATES, GraphSpec, TensorSpec
from tfexport.debug.stages import dtype_of, widened
from tfexport.export.mixed import all_fp32
from tfexport.runtime.ort.host_graph import HostGraph
from tfexport.tensorrt.build.network import Graph
from tfexport.tensorrt.config import Profile

_DTYPES: Any = {
    TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
    TensorProto.INT64: "int64", TensorProto.BOOL: "bool",
}  # fmt: skip
_NAMES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64", "bool": "BOOL"}


class ShapingContext(FakeContext):
    """A context that knows the shapes of outputs once those of inputs are set, as the library does."""

    _engine: GraphEngine

    def infer_shapes(self) -> list[str]:
        if missing := super().infer_shapes():
            return missing
        dims = self._dims()
        assert dims is not None
        self._engine.shape_outputs(self._shapes, dims.get("num_candidates", 1))
        return []


class GraphEngine(FakeEngine):
    """An `ICudaEngine` of any graph, whose outputs may be inner tensors."""

    def __init__(
        self,
        graph: Graph,
        inputs: tuple[TensorSpec, ...],
        profile: Profile,
        cuda: CudaDouble,
        aliases: Mapping[str, str],
    ) -> None:
        self._given = graph
        found = onnx.load_model_from_string(graph.data).graph.output
        outputs = tuple(TensorSpec(one.name, _DTYPES[one.type.tensor_type.elem_type], ()) for one in found)
        super().__init__(graph.name, graph.data, GraphSpec(inputs, outputs), (profile,), cuda, [], aliases)

    def load(self, graph: Any) -> HostGraph:
        return HostGraph(self.name, all_fp32(graph, rounds=True), self._given.path.parent)

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(trt.DataType, _NAMES[super().get_tensor_dtype(name)])

    def create_execution_context(self, strategy: Any) -> FakeContext | None:
        if strategy is not trt.ExecutionContextAllocationStrategy.USER_MANAGED:
            return None
        self.cuda.check_current()
        return ShapingContext(self, replays_itself=False)

    def shape_outputs(self, shapes: Mapping[str, tuple[int, ...]], num_candidates: int) -> None:
        zeros = {name: np.zeros(shapes[name], dtype_of(tensor)) for name, tensor in self.inputs.items()}
        if NUM_CANDIDATES in zeros:
            zeros[NUM_CANDIDATES] = np.array([num_candidates])
        for name, array in self._graph.run(widened(zeros)).items():
            self.outputs[name] = TensorSpec(name, self.outputs[name].dtype, array.shape)

    def array(self, tensor: TensorSpec, shape: tuple[int, ...], address: int) -> Any:
        kind = dtype_of(tensor)
        size = int(np.prod(shape)) * kind.itemsize
        return self.cuda.view(address, size, on_device=True).view(kind).reshape(shape)

    def run(self, arrays: Mapping[str, Any]) -> None:
        found = self._graph.run(widened({name: arrays[name].copy() for name in self.inputs}))
        with np.errstate(over="ignore"):
            for name in self.outputs:
                arrays[name][...] = found[name].astype(arrays[name].dtype)
