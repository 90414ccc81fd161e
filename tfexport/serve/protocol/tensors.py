"""A tensor of the Open Inference Protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tfexport.serve.protocol.errors import InvalidRequestError


@dataclass(frozen=True)
class Tensor:
    """One tensor.

    Attributes:
        name: of the input or output.
        datatype: as the protocol calls it.
        shape: of it.
        values: of all places, the last dimension fastest; BYTES are texts in UTF-8.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


def texts(name: str, raws: Iterable[bytes]) -> list[str]:
    """Return the values of a tensor of BYTES.

    Raises:
        InvalidRequestError: one is not UTF-8.
    """
    found: list[str] = []
    for raw in raws:
        try:
            found.append(raw.decode())
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"input {name}: text {len(found) + 1} is not UTF-8") from error
    return found


def check_finite(name: str, values: Iterable[Any]) -> None:
    """Refuse values of a tensor that are no numbers.

    Raises:
        InvalidRequestError: one is not finite.
    """
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise InvalidRequestError(f"input {name} has a value that is not finite")
