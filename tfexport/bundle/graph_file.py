"""What an ONNX file says of itself, read without the onnx package: tensors, operators, and where weights lie.

Fields are numbered as in https://github.com/onnx/onnx/blob/main/onnx/onnx.proto. What no graph of tfexport has is
refused by the reader itself, so that nothing that computes stays unread: functions of a model's own, graphs inside
operators (Loop, If, Scan), sparse tensors, fields of later versions, and whatever stands twice where it may stand once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from tfexport.bundle.onnx_message import GRAPH, MODEL, NODE, TENSOR, Kind, Message
from tfexport.contract import Dim, DType, GraphSpec, TensorSpec
from tfexport.errors import shortened

# TensorProto.DataType, and bits of each value.
_TYPES = {
    1: ("float32", 32),
    2: ("uint8", 8),
    3: ("int8", 8),
    6: ("int32", 32),
    7: ("int64", 64),
    9: ("bool", 8),
    10: ("float16", 16),
    11: ("float64", 64),
    16: ("bfloat16", 16),
}
_EXTERNAL = 1
# Where the values of a tensor may stand in the graph itself.
_INLINE = (4, 5, 6, 7, 9, 10, 11)
# The narrowest type packs four values into a byte.
_VALUES_PER_BYTE = 4
_MAX_RANK = 32
_NUMBER = re.compile("[0-9]{1,18}")


_OPSET = Kind("an opset", frozenset({1, 2}))
_INNER = "a graph inside, as Loop, If and Scan have"
_SPARSE = "a sparse tensor"
_ATTRIBUTE = Kind(
    "an attribute",
    frozenset({1, 2, 3, 4, 5, 7, 8, 9, 10, 13, 20}),
    {6: _INNER, 11: _INNER, 21: "a reference into a function", 22: _SPARSE, 23: _SPARSE},
)
_ENTRY = Kind("an entry", frozenset({1, 2}))
_VALUE = Kind("an input or output", frozenset({1, 2, 3, 4}))
_TYPE = Kind("a type", frozenset({1, 6}), dict.fromkeys((4, 5, 7, 8, 9), "another type than a tensor's"))
_TENSOR_TYPE = Kind("a tensor's type", frozenset({1, 2}))
_SHAPE = Kind("a shape", frozenset({1}))
_DIM = Kind("a dimension", frozenset({1, 2, 3}))


@dataclass(frozen=True)
class ExternalWeight:
    """An initializer whose bytes lie in a file.

    Attributes:
        name: of the initializer.
        location: the file, as the graph says it.
        offset: of its first byte.
        length: bytes that the graph names.
        num_bytes: that its type and shape take.
    """

    name: str
    location: str
    offset: int
    length: int
    num_bytes: int


@dataclass(frozen=True)
class GraphFile:
    """What an ONNX file says of itself.

    Attributes:
        spec: inputs and outputs, in order; a dimension without name and number is "?".
        opsets: version of each domain; "" is ONNX's own.
        operators: those of other domains as DOMAIN.NAME.
        weights: that lie in files.
    """

    spec: GraphSpec
    opsets: Mapping[str, int]
    operators: frozenset[str]
    weights: tuple[ExternalWeight, ...]


Known = dict[bytes, ExternalWeight | None]


def read_graph(raw: bytes, *, known: Known | None = None) -> GraphFile:
    """Read an ONNX file.

    Args:
        raw: its bytes.
        known: tensors that were read before, by their bytes; those of this graph are added. The graphs of a bundle
            have most of their weights in common.

    Raises:
        ValueError: says why it is none, or what it has that no graph of tfexport has.
    """
    model = Message(memoryview(raw), MODEL)
    graph = Message(model.message(7), GRAPH)
    entries = [Message(entry, _OPSET) for entry in model.messages(8)]
    opsets = [(_domain(entry.text(1)), entry.number(2)) for entry in entries]
    if len(dict(opsets)) < len(opsets):
        raise ValueError("a domain has two opsets")
    tensors = list(map(bytes, graph.messages(5)))
    known = {} if known is None else known
    known |= {tensor: _read_tensor(memoryview(tensor)) for tensor in tensors if tensor not in known}
    return GraphFile(
        spec=GraphSpec(*(tuple(map(_read_value, graph.messages(side))) for side in (11, 12))),
        opsets=dict(opsets),
        operators=_read_operators(graph.messages(1)),
        weights=tuple(weight for tensor in tensors if (weight := known[tensor]) is not None),
    )


def _read_operators(raw: list[memoryview]) -> frozenset[str]:
    nodes = [Message(one, NODE) for one in raw]
    # Most say what others have said: an attribute is read once, wherever it stands.
    for attribute in {bytes(one) for node in nodes for one in node.messages(5)}:
        _check_attribute(Message(memoryview(attribute), _ATTRIBUTE))
    kinds = {(bytes(node.message(7)), bytes(node.message(4))) for node in nodes}
    return frozenset(_operator(str(domain, "utf-8"), str(name, "utf-8")) for domain, name in kinds)


def _check_attribute(attribute: Message) -> None:
    for tensor in (*attribute.messages(5), *attribute.messages(10)):
        if _read_tensor(tensor) is not None:
            raise ValueError("a value of an operator lies in another file")


def _operator(domain: str, name: str) -> str:
    return f"{domain}.{name}" if (domain := _domain(domain)) else name


def _domain(text: str) -> str:
    """Return the domain of operators as its shortest name."""
    return "" if text == "ai.onnx" else text


def _read_tensor(raw: memoryview) -> ExternalWeight | None:
    """Read a tensor; None for one whose values stand in the graph itself."""
    tensor = Message(raw, TENSOR)
    name, dims = tensor.text(8), tensor.numbers(1)
    if len(dims) > _MAX_RANK or min(dims, default=0) < 0:
        raise ValueError(f"{shortened(name)} has the shape {shortened(dims)}")
    count = math.prod(dims)
    if tensor.number(14) != _EXTERNAL:
        if 13 in tensor or count > _VALUES_PER_BYTE * len(raw):
            raise ValueError(f"{shortened(name)} of shape {shortened(dims)} has no room for its values")
        return None
    if any(number in tensor for number in _INLINE):
        raise ValueError(f"{shortened(name)} has its values inside and in a file")
    dtype, bits = _type(tensor.number(2))
    if not bits:
        raise ValueError(f"{shortened(name)} has the {dtype}")
    location, offset, length = read_place(tensor.messages(13), name)
    return ExternalWeight(name, location, offset, length, count * bits // 8)


def read_place(entries: list[memoryview], name: str) -> tuple[str, int, int]:
    """Read file, offset and length of an external tensor.

    Args:
        entries: of its field `external_data`.
        name: of the tensor.

    Raises:
        ValueError: they say something else or more.
    """
    pairs = [(entry.text(1), entry.text(2)) for entry in (Message(one, _ENTRY) for one in entries)]
    found = dict(pairs)
    if len(found) < len(pairs) or {"offset", *found} != {"location", "offset", "length"}:
        raise ValueError(f"{shortened(name)} says {shortened(pairs)} of its file, expected location, offset and length")
    offset, length = found.get("offset", "0"), found["length"]
    for key, number in (("offset", offset), ("length", length)):
        if not _NUMBER.fullmatch(number):
            raise ValueError(f"{shortened(name)} has the {key} {shortened(number)}, expected bytes")
    return found["location"], int(offset), int(length)


def _read_value(raw: memoryview) -> TensorSpec:
    value = Message(raw, _VALUE)
    kind = Message(Message(value.message(2), _TYPE).message(1), _TENSOR_TYPE)
    dims = Message(kind.message(2), _SHAPE).messages(1)
    dtype, _ = _type(kind.number(1))
    return TensorSpec(value.text(1), cast(DType, dtype), tuple(map(_read_dim, dims)))


def _read_dim(raw: memoryview) -> Dim:
    dim = Message(raw, _DIM)
    if 1 in dim and 2 in dim:  # protobuf would take the last
        raise ValueError("a dimension has a name and a number")
    return dim.number(1) if 1 in dim else dim.text(2) or "?"


def _type(number: int) -> tuple[str, int]:
    """Return a type's name and the bits of each value; 0 where no graph of tfexport has it."""
    return _TYPES.get(number, (f"type {number}", 0))
