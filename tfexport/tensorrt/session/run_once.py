"""Run an engine once on arrays of the host, apart from sessions and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tfexport.contract import NUM_CANDIDATES
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.config import STEP, Shape
from tfexport.tensorrt.cuda import Cuda
from tfexport.tensorrt.session._engine import Engine
from tfexport.tensorrt.session._resources import Memory

Arrays = Mapping[str, NDArray[Any]]
_ACTIVATIONS = "activations"


def run_once(
    name: str,
    engine: Any,
    library: Library,
    cuda: Cuda,
    inputs: Arrays,
    *,
    aliases: Mapping[str, str],
    reason: Callable[[], str],
) -> dict[str, NDArray[Any]]:
    """Run an `ICudaEngine` with one profile and return all outputs by name.

    `aliases` maps outputs to the inputs whose memory they share. Outputs in bfloat16 are returned as float32.
    """
    made = Engine(name, engine, library.trt, reason)
    stream = cuda.stream()
    memory, pinned = Memory(cuda, stream), list[NDArray[Any]]()

    def pin(shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        pinned.append(cuda.pinned(shape, dtype))
        return pinned[-1]

    try:
        # A shape input is read on the host.
        num_candidates = np.ascontiguousarray(inputs.get(NUM_CANDIDATES, np.array([1])))
        on_device = {tensor: array for tensor, array in inputs.items() if tensor != NUM_CANDIDATES}
        memory.reserve({tensor: array.nbytes for tensor, array in on_device.items()})
        for tensor, array in on_device.items():
            source = pin(array.shape, array.dtype)
            source[...] = array
            cuda.upload(memory[tensor], source, stream)
        context = made.context(STEP, stream, "any shapes")
        activations = made.activation_bytes(STEP)
        memory.reserve({_ACTIVATIONS: activations})
        context.use_memory(memory[_ACTIVATIONS], activations)
        host = {NUM_CANDIDATES: num_candidates.ctypes.data} if NUM_CANDIDATES in inputs else {}
        shapes = {tensor: array.shape for tensor, array in inputs.items()}
        context.bind(shapes, {**host, **{tensor: memory[tensor] for tensor in on_device}})
        outputs: dict[str, NDArray[Any]] = {
            tensor: pin(context.shape(tensor), _DTYPES[library.dtype_name(engine.get_tensor_dtype(tensor))])
            for index in range(engine.num_io_tensors)
            if (tensor := engine.get_tensor_name(index)) not in inputs
        }
        memory.reserve({tensor: array.nbytes for tensor, array in outputs.items() if tensor not in aliases})
        places = {tensor: memory[aliases.get(tensor, tensor)] for tensor in outputs}
        context.place(places)
        context.run(stream)
        for tensor, array in outputs.items():
            cuda.download(array, places[tensor], stream)
        cuda.synchronize(stream)
        return {tensor: _widened(array) for tensor, array in outputs.items()}
    finally:
        cuda.synchronize(stream)
        memory.close()
        for array in pinned:
            cuda.unpin(array)
        cuda.destroy_stream(stream)


# bfloat16 is the upper half of float32.
_DTYPES = {
    "int64": np.int64, "int32": np.int32, "bool": np.bool_, "float32": np.float32, "float16": np.float16,
    "bfloat16": np.uint16,
}  # fmt: skip


def _widened(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype != np.uint16:
        return array.copy()
    return (array.astype(np.uint32) << 16).view(np.float32)
