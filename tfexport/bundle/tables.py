"""Weights that a graph looks rows up in and does nothing else with: tables of tokens and of positions."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.bundle.graph_file import read_place
from tfexport.bundle.onnx_message import GRAPH, MODEL, NODE, TENSOR, Message

# Operators that look rows up, and which of their inputs hold them.
_LOOKUPS = {"Gather": (0,), "GatherBlockQuantized": (0, 2, 3)}
# TensorProto.DataType of the types that such tables have and NumPy knows.
_DTYPES = {1: "float32", 2: "uint8", 3: "int8"}


@dataclass(frozen=True)
class Table:
    """Where a table lies, whatever a graph calls it.

    Attributes:
        location: name of the file beside the graph.
        offset: of its first byte.
        dtype: of NumPy.
        shape: of the table.
    """

    location: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


def read_tables(raw: bytes) -> dict[Table, str]:
    """Return the tables in files that a graph looks rows up in and reads nowhere else, with its name of each.

    Args:
        raw: bytes of a graph of a bundle, which was checked.
    """
    graph = Message(Message(memoryview(raw), MODEL).message(7), GRAPH)
    looked_up, read = set[str](), set[str]()
    for node in (Message(one, NODE) for one in graph.messages(1)):
        places = _LOOKUPS.get(node.text(4), ())
        for place, name in enumerate(str(value, "utf-8") for value in node.messages(1)):
            (looked_up if place in places else read).add(name)
    tables = {}
    for tensor in (Message(one, TENSOR) for one in graph.messages(5)):
        name, dtype = tensor.text(8), _DTYPES.get(tensor.number(2))
        if dtype and 13 in tensor and name in looked_up - read:
            location, offset, _ = read_place(tensor.messages(13), name)
            tables[Table(location, offset, dtype, tuple(tensor.numbers(1)))] = name
    return tables
