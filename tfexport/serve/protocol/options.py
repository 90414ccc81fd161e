"""What a request asks for besides its source: options of decoding, prefix, priority and time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfexport.errors import shortened
from tfexport.generation import DecodeConfig
from tfexport.serve.protocol.errors import InvalidRequestError

DECODING = {field.name for field in dataclasses.fields(DecodeConfig)}
# Triton's clients say `timeout` in microseconds.
_TIMES = {"timeout_ms": 1e3, "timeout": 1e6}
_OTHERS = {"prefix", "priority", *_TIMES}


def arguments(parameters: object, max_timeout_s: float) -> dict[str, Any]:
    """Return parameters as arguments of `Engine.submit` and `Engine.submit_ids`, but for the source.

    Args:
        parameters: a JSON object: fields of `DecodeConfig`, prefix, priority, timeout_ms.
        max_timeout_s: what a request may take; one that asks for more gets that.

    Raises:
        InvalidRequestError: no object, or unknown names, or values that are none; the engine checks the options' own.
    """
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"parameters is {shortened(parameters)}, expected an object")
    unknown = [shortened(name) for name in parameters if name not in DECODING and name not in _OTHERS]
    if unknown:
        raise InvalidRequestError(
            f"unknown parameter {', '.join(unknown[:8])}, expected options of generation or timeout_ms"
        )
    given = {name: value for name, value in parameters.items() if name in DECODING}
    if "prefix" in parameters:
        given["prefix"] = parameters["prefix"]
    if "priority" in parameters:
        given["priority"] = _number("priority", parameters["priority"])
    return given | {"timeout_s": _timeout_s(parameters, max_timeout_s)}


def _timeout_s(parameters: Mapping[str, Any], most: float) -> float:
    times = [_number(name, parameters[name]) / unit for name, unit in _TIMES.items() if name in parameters]
    if any(time <= 0 for time in times):
        raise InvalidRequestError("timeout_ms is 0 or less, expected more")
    return min([*times, most])


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} is {shortened(value)}, expected a number")
    return float(value)
