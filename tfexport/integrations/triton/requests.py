"""What a request asks for, and how an answer is written, in the tensors of Triton's Python backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfexport._io.strict_json import parse_json
from tfexport.model.result import Result
from tfexport.serve.config import Limits
from tfexport.serve.inference import (
    OUTPUTS,
    Answer,
    InvalidRequestError,
    Source,
    Tensor,
    asked_for,
    check_finite,
    texts,
)

_DATATYPES = {"bool": "BOOL", "int64": "INT64", "float32": "FP32", "float64": "FP64", "object": "BYTES"}
_NUMPY = {datatype: name for name, datatype in _DATATYPES.items()}
# Parameters of Triton are no lists: these are written as JSON in a text.
_LISTS = ("suppress_tokens", "bad_words_ids", "eos_token_id", "forced_eos_token_id")


def read_request(request: Any, limits: Limits, *, stream: bool) -> tuple[list[Source], list[dict[str, Any]]]:
    """Return the sources that a request has, and what is asked for with each.

    Args:
        request: of Triton's Python backend.
        limits: of a request.
        stream: whether it has one source, without a dimension for more.

    Raises:
        InvalidRequestError: says which input or parameter is wrong, and how.
    """
    tensors: dict[str, Tensor] = {}
    left = limits.max_body_bytes
    for given in request.inputs():
        tensor, size = _read(given.name(), _array(given))
        if (left := left - size) < 0:
            raise InvalidRequestError(f"the inputs are above the limit of {limits.max_body_bytes} bytes; send less")
        tensors[tensor.name] = tensor
    if stream and (ids := tensors.get("input_ids")):
        tensors["input_ids"] = Tensor(ids.name, ids.datatype, (1, *ids.shape), ids.values)
    sources, options = asked_for(tensors, _parameters(request), limits)
    return sources, [_with_ids(source, given) for source, given in zip(sources, options, strict=True)]


def part_outputs(items: Sequence[str] | Sequence[int]) -> dict[str, Tensor]:
    """Return what a stream says of pieces of the text, or of tokens, that have come together."""
    if isinstance(items[0], str):
        return {"text_output": Tensor("text_output", "BYTES", (1,), ["".join(map(str, items))])}
    return {"output_ids": Tensor("output_ids", "INT64", (len(items),), items)}


def last_outputs(answer: Answer) -> dict[str, Tensor]:
    """Return what a stream ends with: no text is left, and all ids are told."""
    values: dict[str, Sequence[Any]] = {
        **({"text_output": [""]} if isinstance(answer, Result) else {}),
        "output_ids": answer.token_ids,
        "scores": [answer.score],
        "finish_reason": [answer.finish_reason],
    }
    return {name: Tensor(name, OUTPUTS[name][0], (len(given),), given) for name, given in values.items()}


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return an output as Triton takes it: texts are bytes in objects."""
    values: Iterable[Any] = tensor.values
    if tensor.datatype == "BYTES":
        values = [text.encode() for text in tensor.values]
    return np.array(values, dtype=_NUMPY[tensor.datatype]).reshape(tensor.shape)


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.as_numpy()
    return array


def _read(name: str, array: np.ndarray[Any, Any]) -> tuple[Tensor, int]:
    """Return an input, and how many bytes it has."""
    if array.size == 0:
        raise InvalidRequestError(f"input {name} has the shape {list(array.shape)}, expected sizes above 0")
    values, datatype = array.ravel().tolist(), _DATATYPES[array.dtype.name]
    size = sum(map(len, values)) if datatype == "BYTES" else array.nbytes
    if datatype == "BYTES":
        values = texts(name, values)
    else:
        check_finite(name, values)
    return Tensor(name, datatype, array.shape, values), size


def _parameters(request: Any) -> dict[str, Any]:
    """Return the parameters of a request, lists among them as such."""
    try:
        given: dict[str, Any] = parse_json((request.parameters() or "{}").encode())
    except ValueError as error:
        raise InvalidRequestError(f"the parameters are not JSON: {error}") from error
    if timeout_us := request.timeout():
        given["timeout"] = timeout_us
    return given | {name: _parsed(name, given[name]) for name in _LISTS if isinstance(given.get(name), str)}


def _with_ids(source: Source, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the prefix as ids where the source is ids."""
    prefix = given.get("prefix")
    is_listed = isinstance(prefix, str) and not isinstance(source, str)
    return {**given, "prefix": _parsed("prefix", prefix)} if is_listed else dict(given)


def _parsed(name: str, text: Any) -> Any:
    try:
        return parse_json(text.encode())
    except ValueError as error:
        raise InvalidRequestError(f'{name} is not JSON: {error}; write a list as in "[3, 17]"') from error
