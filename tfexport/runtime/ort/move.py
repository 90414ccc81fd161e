"""Graphs that move caches on whatever device they lie, written as bytes: no onnx package is needed to run a bundle.

Each handles all caches of a decoder in one run. The encoding is that of
protocol buffers, the numbers of the fields are those of
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfexport.spec import DType

# TensorProto.DataType
ELEMENT_TYPE: dict[DType, int] = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}
ROWS = "rows"
_IR_VERSION, _OPSET = 9, 20  # the first opset whose ConstantOfShape gives bfloat16
_CACHE_DIMS = ("rows", "heads", "length")


def cache_names(prefix: str, count: int) -> list[str]:
    """Name the inputs or outputs of all caches: prefix.0, prefix.1 and so on."""
    return [f"{prefix}.{index}" for index in range(count)]


def reorder_model(dtype: DType, count: int) -> bytes:
    """Write the graph that takes rows of `count` caches.

    Inputs `rows` int64 [new_rows] and `cache.{i}` [rows, heads, length, width.{i}];
    outputs `moved.{i}` [new_rows, heads, length, width.{i}] with moved[r] = cache[rows[r]].
    """
    nodes = [
        _node("Gather", [cache, ROWS], [moved])
        for cache, moved in zip(cache_names("cache", count), cache_names("moved", count), strict=True)
    ]
    inputs = [_value(ROWS, "int64", ["new_rows"]), *_caches("cache", dtype, count, _CACHE_DIMS)]
    return _model(nodes, inputs, _caches("moved", dtype, count, ("new_rows", *_CACHE_DIMS[1:])))


def extend_model(dtype: DType, count: int) -> bytes:
    """Write the graph that appends zeros to `count` caches.

    Inputs `cache.{i}` [rows, heads, length, width.{i}] and `tail.{i}` int64 [4], the
    shape of the zeros; outputs `longer.{i}` [rows, heads, longer, width.{i}].
    """
    zero = _tensor(dtype)
    nodes = []
    for cache, tail, longer in zip(*(cache_names(name, count) for name in ("cache", "tail", "longer")), strict=True):
        nodes.append(_node("ConstantOfShape", [tail], [f"zeros_{tail}"], _field(5, _attribute_tensor("value", zero))))
        nodes.append(_node("Concat", [cache, f"zeros_{tail}"], [longer], _field(5, _attribute_int("axis", 2))))
    inputs = [
        *_caches("cache", dtype, count, _CACHE_DIMS),
        *(_value(tail, "int64", [4]) for tail in cache_names("tail", count)),
    ]
    return _model(nodes, inputs, _caches("longer", dtype, count, (*_CACHE_DIMS[:2], "longer")))


def _caches(prefix: str, dtype: DType, count: int, dims: Sequence[str]) -> list[bytes]:
    return [_value(name, dtype, [*dims, f"width.{index}"]) for index, name in enumerate(cache_names(prefix, count))]


def _model(nodes: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[bytes]) -> bytes:
    graph = b"".join(
        [
            *(_field(1, node) for node in nodes),
            _field(2, b"move"),
            *(_field(11, value) for value in inputs),
            *(_field(12, value) for value in outputs),
        ]
    )
    opset = _field(1, b"") + _number(2, _OPSET)
    return _number(1, _IR_VERSION) + _field(7, graph) + _field(8, opset)


def _node(operator: str, inputs: Sequence[str], outputs: Sequence[str], attributes: bytes = b"") -> bytes:
    names = [_field(1, name.encode()) for name in inputs] + [_field(2, name.encode()) for name in outputs]
    return b"".join(names) + _field(4, operator.encode()) + attributes


def _attribute_int(name: str, value: int) -> bytes:
    return _field(1, name.encode()) + _number(3, value) + _number(20, 2)


def _attribute_tensor(name: str, value: bytes) -> bytes:
    return _field(1, name.encode()) + _field(5, value) + _number(20, 4)


def _tensor(dtype: DType) -> bytes:
    """Write one zero, a tensor of shape [1]."""
    width = 4 if dtype == "float32" else 2
    return _number(1, 1) + _number(2, ELEMENT_TYPE[dtype]) + _field(9, bytes(width))


def _value(name: str, dtype: DType, dims: Sequence[str | int]) -> bytes:
    shape = b"".join(_field(1, _number(1, dim) if isinstance(dim, int) else _field(2, dim.encode())) for dim in dims)
    tensor_type = _number(1, ELEMENT_TYPE[dtype]) + _field(2, shape)
    return _field(1, name.encode()) + _field(2, _field(1, tensor_type))


def _field(number: int, content: bytes) -> bytes:
    """Write a field of bytes: its number with wire type 2, its length, its content."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    """Write a field of a number that is not negative, wire type 0."""
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Write seven bits a byte, the lowest first; the highest bit says that more follow."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
