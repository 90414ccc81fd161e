"""Messages of protocol buffers as they lie in a file: the number and value of each field, whatever it means.

The encoding is that of https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

Value = int | memoryview | bytes

# How a value is written; the two others, groups, are of long ago.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_FIELD = 2**29 - 1
# The least number of varying length that takes more than a byte.
_TWO_BYTES = 0x80
_CUT_OFF = "it is cut off"


def fields(message: memoryview) -> list[tuple[int, Value]]:
    """Read the fields of a message.

    Args:
        message: bytes, which the values share.

    Returns:
        The number of each field with its value: a number of varying length as one, 0 … 2^64 - 1; one of four or eight
        bytes as a copy of them; anything else as a view.

    Raises:
        ValueError: they are no message.
    """
    found: list[tuple[int, Value]] = []
    place, end = 0, len(message)
    while place < end:
        # Keys, sizes and numbers are one byte nearly always: calls for them would take half the time of a whole graph.
        if (key := message[place]) < _TWO_BYTES:
            place += 1
        else:
            key, place = read_varint(message, place)
        number, kind = key >> 3, key & 7
        if not 1 <= number <= _MAX_FIELD:
            raise ValueError(f"it has the field {number}, which no message can have")
        if kind == _VARINT:
            value, place = read_varint(message, place)
            found.append((number, value))
            continue
        if kind == _BYTES:
            if place < end and (size := message[place]) < _TWO_BYTES:
                place += 1
            else:
                size, place = read_varint(message, place)
        elif kind in _FIXED_BYTES:
            size = _FIXED_BYTES[kind]
        else:
            raise ValueError(f"its field {number} is written in a way that there is none of")
        start, place = place, place + size
        if place > end:
            raise ValueError(_CUT_OFF)
        part = message[start:place]
        found.append((number, part if kind == _BYTES else bytes(part)))
    return found


def read_varint(message: memoryview, place: int) -> tuple[int, int]:
    """Read a number of varying length, 0 … 2^64 - 1; returns it and the place behind it.

    Raises:
        ValueError: there is none.
    """
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError(_CUT_OFF)
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < _TWO_BYTES:
            return value & (2**64 - 1), place
    raise ValueError("a number in it has more than ten bytes")
