"""Messages of an ONNX file, read strictly: each of a known kind, with the fields that are taken and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

from tfexport._io.protobuf import Value, fields, read_varint


class Kind(NamedTuple):
    """A message of ONNX: its name, the fields that are taken, and in words some that are not."""

    name: str
    taken: frozenset[int]
    refused: Mapping[int, str] = {}


MODEL = Kind(
    "the model",
    frozenset({1, 2, 3, 4, 5, 6, 7, 8, 14}),
    {20: "training steps", 25: "functions of its own", 26: "devices"},
)
GRAPH = Kind("the graph", frozenset({1, 2, 5, 10, 11, 12, 13, 14, 16}), {15: "sparse weights"})
NODE = Kind("an operator", frozenset({1, 2, 3, 4, 5, 6, 7, 9}), {8: "an overload", 10: "devices"})
TENSOR = Kind("a tensor", frozenset({1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16}), {3: "segments"})


class Message:
    """A message of a known kind, with no other fields than those that are taken."""

    def __init__(self, raw: memoryview, kind: Kind) -> None:
        """Read all fields.

        Raises:
            ValueError: it is no message, or has a field that is not taken.
        """
        self._kind = kind
        self._fields: dict[int, list[Value]] = {}
        for number, value in fields(raw):
            if number in self._fields:
                self._fields[number].append(value)
            else:
                self._fields[number] = [value]
        for number in self._fields.keys() - kind.taken:
            what = kind.refused.get(number, f"the field {number}")
            raise ValueError(f"{kind.name} has {what}, which no graph of tfexport has")

    def messages(self, number: int) -> list[memoryview]:
        """Return a field that may stand any number of times."""
        found = self._fields.get(number, [])
        for value in found:
            if not isinstance(value, memoryview):
                raise self._wrong(number)
        return cast(list[memoryview], found)

    def message(self, number: int) -> memoryview:
        """Return a field that may stand once, empty where it does not."""
        found = self.messages(number)
        if len(found) > 1:  # protobuf would join them
            raise ValueError(f"{self._kind.name} has its field {number} twice")
        return found[0] if found else memoryview(b"")

    def text(self, number: int) -> str:
        """Return a text that may stand once, empty where it does not."""
        return str(self.message(number), "utf-8")

    def numbers(self, number: int) -> list[int]:
        """Return whole numbers, one by one or side by side."""
        found: list[int] = []
        for value in self._fields.get(number, []):
            if isinstance(value, int):
                found.append(value)
                continue
            if isinstance(value, bytes):
                raise self._wrong(number)
            place = 0
            while place < len(value):
                one, place = read_varint(value, place)
                found.append(one)
        return [one - 2**64 if one >= 2**63 else one for one in found]

    def number(self, number: int) -> int:
        """Return a whole number that may stand once, 0 where it does not."""
        found = self._fields.get(number, [0])
        if len(found) != 1 or not isinstance(found[0], int):
            raise self._wrong(number)
        return self.numbers(number)[0] if number in self._fields else 0

    def __contains__(self, number: int) -> bool:
        return number in self._fields

    def _wrong(self, number: int) -> ValueError:
        return ValueError(f"field {number} of {self._kind.name} is not what it must be")
