"""Weights that lie in a file beside the graphs: where their bytes are, and what they hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from tfexport.errors import GraphError, shortened
from tfexport.nn.stored import read_header


class Span(NamedTuple):
    """Where the bytes of a weight lie; equal spans are one weight, whatever graphs call it."""

    location: str
    offset: int
    length: int


def external_weights(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the initializers whose bytes lie in a file, by name."""
    external = onnx.TensorProto.EXTERNAL
    return {weight.name: weight for weight in graph.initializer if weight.data_location == external}


def span(weight: onnx.TensorProto) -> Span:
    """Say where the bytes of an external weight lie; a number that is none is -1."""
    found = {entry.key: entry.value for entry in weight.external_data}
    offset, length = (found.get(key, default) for key, default in (("offset", "0"), ("length", "")))
    return Span(found.get("location", ""), *(int(text) if text.isdecimal() else -1 for text in (offset, length)))


def read_weight(directory: Path, weight: onnx.TensorProto) -> NDArray[Any]:
    """Read an external weight.

    Args:
        directory: of the graph, in which the file has to lie.
        weight: its initializer.

    Returns:
        The weight, of the dtype and shape that the graph gives it.

    Raises:
        GraphError: the file lies elsewhere or is too short, or a value is not finite.
        OSError: the file cannot be read.
    """
    place, name = span(weight), shortened(weight.name)
    path = directory / place.location
    if Path(place.location).name != place.location or path.is_symlink():
        raise GraphError(f"{name} lies in {shortened(place.location)}, expected a file beside the graph")
    dtype = helper.tensor_dtype_to_np_dtype(weight.data_type)
    count = math.prod(weight.dims)
    if place.length != count * dtype.itemsize or not 0 <= place.offset <= path.stat().st_size - place.length:
        raise GraphError(f"{name} does not fit {place.location}; export the bundle again")
    array = np.fromfile(path, dtype, count, offset=place.offset).reshape(weight.dims)
    if not np.isfinite(array.astype(np.float32)).all():
        raise GraphError(f"{name} holds NaN or infinity; take a model from before the training diverged")
    return array


def tensor_spans(path: Path) -> dict[str, Span]:
    """Say where each tensor of a safetensors file lies."""
    return {name: Span(path.name, tensor.offset, tensor.num_bytes) for name, tensor in read_header(path).items()}
