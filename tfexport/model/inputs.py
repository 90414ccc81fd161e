"""Read the inputs of a model of audio or images."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport._arguments import as_list
from tfexport.errors import InputError, raise_all, shortened
from tfexport.features.processor import FeatureProcessor


def read_features(processor: FeatureProcessor | None, inputs: Iterable[Any], *, paths: bool) -> list[NDArray[Any]]:
    """Return the features of each input, see `Model.read`."""
    values = list(inputs) if hasattr(inputs, "ndim") else as_list(inputs)
    if values is None:
        raise InputError(f"inputs is {shortened(inputs)}, expected a list; write [input]")
    if not values:
        raise InputError("there is no input; give at least one")
    found, errors = [], dict[int, InputError]()
    for index, value in enumerate(values):
        try:
            found.append(_features(processor, value, paths=paths))
        except InputError as error:
            errors[index] = error
    problems = [f"input {index + 1}: " * (len(values) > 1) + str(error) for index, error in errors.items()]
    raise_all(InputError, "", problems, indices=errors)
    return found


def _features(processor: FeatureProcessor | None, value: Any, *, paths: bool) -> NDArray[Any]:
    if isinstance(value, str | PathLike) and not paths:
        raise InputError("the input is a text, expected audio or an image")
    if isinstance(value, memoryview):
        value = np.asarray(value)
    if processor is None:
        if isinstance(value, np.ndarray):
            return value
        problem = f"the input is {shortened(value)}, expected an array of features"
        raise InputError(f"{problem}, because the bundle has no processor")
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], np.ndarray):
        return processor.extract(value[0], rate=value[1])
    return processor.extract(value)
