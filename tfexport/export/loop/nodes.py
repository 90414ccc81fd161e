"""Operators and constants of a graph that is written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper


class Constants:
    """Small tensors of a graph, equal ones once.

    Attributes:
        tensors: by type, shape and bytes.
    """

    def __init__(self, namespace: str) -> None:
        """Begin without a tensor; all names begin with `namespace`."""
        self.tensors: dict[tuple[str, tuple[int, ...], bytes], onnx.TensorProto] = {}
        self._namespace = namespace

    def __call__(self, value: Any, dtype: type[np.generic] = np.int64) -> str:
        """Return the name of a constant."""
        array: NDArray[Any] = np.array(value, dtype)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self.tensors:
            self.tensors[key] = numpy_helper.from_array(array, f"{self._namespace}/constant_{len(self.tensors)}")
        return self.tensors[key].name


class Nodes(list[onnx.NodeProto]):
    """Operators of a graph, in order."""

    def __init__(self, namespace: str) -> None:
        """Begin without an operator; all names begin with `namespace`."""
        super().__init__()
        self._namespace = namespace

    def __call__(self, operator: str, *inputs: str, called: str = "", **attributes: Any) -> str:
        """Append an operator of one output, `called` so or numbered, and return the output's name."""
        output = called or f"{self._namespace}/{operator}_{len(self)}"
        self.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output
