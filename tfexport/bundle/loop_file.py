"""The loop of the loop graph: one operator, whose body is a plain graph and whose steps are bounded by a constant."""

from __future__ import annotations

from typing import NamedTuple

from tfexport.bundle.onnx_message import NODE, TENSOR, Kind, Message

_ATTRIBUTE = Kind("the attribute of the loop", frozenset({1, 6, 20}))
_VALUE = Kind("an input", frozenset({1, 2, 3, 4}))
_BODY = Kind("the body of the loop", frozenset({1, 2, 11, 12}), {5: "weights of its own", 15: "sparse weights"})
# AttributeProto.AttributeType and TensorProto.DataType.
_IS_GRAPH, _INT64 = 5, 7
_ONNX = (b"", b"ai.onnx")
_UNBOUNDED = "the steps of its loop are not the minimum with a constant"


class _Operator(NamedTuple):
    """What is read of an operator: its name, where it is one of ONNX's own, and what goes in and comes out."""

    name: str
    inputs: list[bytes]
    outputs: list[bytes]


def read_loop(graph: Message) -> tuple[list[memoryview], int]:
    """Find the loop of a graph.

    Args:
        graph: whose operators and weights are read.

    Returns:
        All operators but the loop itself, those of its body among them, and how many steps it can take.

    Raises:
        ValueError: there is not one loop, its body is no plain graph, or its steps are not bounded by a constant.
    """
    raw = graph.messages(1)
    operators = list(map(_read, raw))
    places = [place for place, operator in enumerate(operators) if operator.name == "Loop"]
    if len(places) != 1:
        raise ValueError(f"it has {len(places)} loops, expected one")
    (place,) = places
    loop = operators[place]
    return [*raw[:place], *raw[place + 1 :], *_body(raw[place], loop)], _max_trips(graph, operators, loop)


def _read(raw: memoryview) -> _Operator:
    node = Message(raw, NODE)
    name = node.text(4) if bytes(node.message(7)) in _ONNX else ""
    return _Operator(name, *(list(map(bytes, node.messages(side))) for side in (1, 2)))


def _body(raw: memoryview, loop: _Operator) -> list[memoryview]:
    """Return the operators of the body; what goes from step to step is all that comes out of the loop."""
    attributes = Message(raw, NODE).messages(5)
    if len(attributes) != 1:
        raise ValueError(f"the loop has {len(attributes)} attributes, expected its body")
    attribute = Message(attributes[0], _ATTRIBUTE)
    if attribute.text(1) != "body" or attribute.number(20) != _IS_GRAPH:
        raise ValueError("the attribute of the loop is not its body")
    body = Message(attribute.message(6), _BODY)
    carried = {len(loop.inputs) - 2, len(loop.outputs), len(body.messages(11)) - 2, len(body.messages(12)) - 1}
    if len(carried) != 1:
        raise ValueError("the loop and its body disagree about what goes from step to step")
    return body.messages(1)


def _max_trips(graph: Message, operators: list[_Operator], loop: _Operator) -> int:
    """Return the constant that the number of steps is the minimum with."""
    makers = [operator for operator in operators if loop.inputs[0] in operator.outputs]
    if len(makers) == 1 and makers[0].name == "Min" and len(makers[0].inputs) == 2:
        limit = makers[0].inputs[1]
        # What is an input too, or is made by an operator, is no constant.
        given = {bytes(Message(raw, _VALUE).message(1)) for raw in graph.messages(11)}
        made = {name for operator in operators for name in operator.outputs}
        tensors = [
            tensor for tensor in (Message(raw, TENSOR) for raw in graph.messages(5)) if tensor.message(8) == limit
        ]
        if len(tensors) == 1 and limit not in given | made:
            return _whole_number(tensors[0])
    raise ValueError(_UNBOUNDED)


def _whole_number(tensor: Message) -> int:
    """Read one int64, which stands in the graph as its bytes."""
    raw = bytes(tensor.message(9))
    if (
        tensor.number(2) != _INT64
        or tensor.numbers(1)
        or len(raw) != 8
        or any(field in tensor for field in (7, 13, 14))
    ):
        raise ValueError(_UNBOUNDED)
    return int.from_bytes(raw, "little", signed=True)
