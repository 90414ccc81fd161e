"""Tensors of the Open Inference Protocol, in JSON or in bytes behind it (the binary tensor data extension)."""

from __future__ import annotations

import math
import struct
from typing import Any

from tfexport.errors import shortened
from tfexport.serve.http.errors import RequestError
from tfexport.serve.protocol.tensors import Tensor, check_finite, texts

# How `struct` spells a datatype; BYTES, a length and as many bytes for each value, is written by hand.
FORMATS = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_KEYS = {"name", "datatype", "shape", "data", "parameters"}
_PYTHON = {"BYTES": str, "BOOL": bool, "FP16": float, "FP32": float, "FP64": float}


def read_tensors(inputs: object, binary: bytes) -> dict[str, Tensor]:
    """Read the inputs of a request, by name.

    Args:
        inputs: of the JSON object.
        binary: what follows it; all of it must belong to inputs.

    Raises:
        RequestError: says which input is wrong, and how.
    """
    if not isinstance(inputs, list) or not inputs:
        raise RequestError(400, f"inputs is {shortened(inputs)}, expected a list of tensors")
    tensors: dict[str, Tensor] = {}
    start = 0
    for data in inputs:
        tensor, size = _read(data, memoryview(binary)[start:])
        if tensor.name in tensors:
            raise RequestError(400, f"input {tensor.name} is given twice, expected once")
        tensors[tensor.name] = tensor
        start += size
    if start != len(binary):
        raise RequestError(400, f"{len(binary)} bytes follow the JSON, the inputs have {start}")
    return tensors


def write_tensor(tensor: Tensor, *, is_binary: bool) -> tuple[dict[str, Any], bytes]:
    """Return a tensor as JSON, and what belongs to it behind the JSON."""
    head = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    if not is_binary:
        return head | {"data": list(tensor.values)}, b""
    if tensor.datatype == "BYTES":
        raws = [value.encode() for value in tensor.values]
        data = b"".join(struct.pack("<I", len(raw)) + raw for raw in raws)
    else:
        data = struct.pack(f"<{len(tensor.values)}{FORMATS[tensor.datatype]}", *tensor.values)
    return head | {"parameters": {"binary_data_size": len(data)}}, data


def _read(data: object, binary: memoryview) -> tuple[Tensor, int]:
    """Return a tensor, and how many of the bytes are its own."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise RequestError(400, f"an input is {shortened(data)}, expected an object with a name")
    name, datatype = shortened(data["name"])[1:-1], data.get("datatype")
    if unknown := [key for key in data if key not in _KEYS]:
        raise RequestError(400, f"input {name} has the unknown key {unknown[0][:80]}")
    if datatype != "BYTES" and (not isinstance(datatype, str) or datatype not in FORMATS):
        raise RequestError(400, f"input {name}: datatype is {shortened(datatype)}, expected one of the protocol")
    shape = _shape(name, data.get("shape"))
    size = _binary_size(name, data.get("parameters", {}))
    if (size is None) == ("data" not in data):
        raise RequestError(400, f"input {name} needs data or binary_data_size, one of them")
    if size is None:
        values = _from_json(name, datatype, data["data"], len(shape))
    elif size > len(binary):
        raise RequestError(400, f"input {name}: binary_data_size is {size}, but {len(binary)} bytes are left")
    else:
        values = _from_bytes(name, datatype, binary[:size])
    if len(values) != math.prod(shape):
        raise RequestError(400, f"input {name} has {len(values)} values, its shape {list(shape)} says another number")
    return Tensor(data["name"], datatype, shape, values), size or 0


def _shape(name: str, shape: object) -> tuple[int, ...]:
    is_shape = isinstance(shape, list) and all(type(size) is int and 0 < size < 2**31 for size in shape)
    if not isinstance(shape, list) or not is_shape or not 1 <= len(shape) <= 3:
        raise RequestError(400, f"input {name}: shape is {shortened(shape)}, expected one to three sizes above 0")
    return tuple(shape)


def _binary_size(name: str, parameters: object) -> int | None:
    if not isinstance(parameters, dict) or set(parameters) - {"binary_data_size"}:
        raise RequestError(400, f"input {name}: parameters is {shortened(parameters)}, expected binary_data_size alone")
    size = parameters.get("binary_data_size")
    if size is not None and (type(size) is not int or size < 0):
        raise RequestError(400, f"input {name}: binary_data_size is {shortened(size)}, expected 0 or more")
    return size


def _from_json(name: str, datatype: str, data: object, rank: int) -> list[Any]:
    """Return the values of nested lists, or of a flat one."""
    values = [data]
    for _ in range(rank):
        values = [one for part in values for one in (part if isinstance(part, list) else [part])]
    if not _fit(values, datatype):
        wrong = next(value for value in values if not _fit([value], datatype))
        raise RequestError(400, f"input {name} has {shortened(wrong)}, expected {datatype}")
    return values


def _fit(values: list[Any], datatype: str) -> bool:
    """Say whether values are of a datatype; all at once, for one after the other takes ten times as long."""
    kind = _PYTHON.get(datatype, int)
    if not set(map(type, values)) <= ({int, float} if kind is float else {kind}):
        return False
    if kind in (str, bool):
        return True
    try:
        struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)
    except (struct.error, OverflowError):
        return False
    return all(map(math.isfinite, values))


def _from_bytes(name: str, datatype: str, binary: memoryview) -> list[Any]:
    if datatype == "BYTES":
        return texts(name, _parts(name, binary))
    code = FORMATS[datatype]
    number, rest = divmod(len(binary), struct.calcsize("<" + code))
    if rest:
        raise RequestError(400, f"input {name}: {len(binary)} bytes are no whole number of {datatype}")
    values = list(struct.unpack(f"<{number}{code}", binary))
    check_finite(name, values)
    return values


def _parts(name: str, binary: memoryview) -> list[bytes]:
    parts: list[bytes] = []
    start = 0
    while start < len(binary):
        end = start + 4
        size = int.from_bytes(binary[start:end], "little")
        if end + size > len(binary):
            raise RequestError(400, f"input {name}: text {len(parts) + 1} ends behind the tensor")
        parts.append(bytes(binary[end : end + size]))
        start = end + size
    return parts
