"""What the tensors of `infer` ask for: sources, and options that come as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfexport.serve.protocol.asking import Source
from tfexport.serve.protocol.errors import InvalidRequestError
from tfexport.serve.protocol.limits import Limits
from tfexport.serve.protocol.options import arguments
from tfexport.serve.protocol.tensors import Tensor

# Each input that is no option, with its datatype.
INPUTS = {"text_input": "BYTES", "input_ids": "INT64", "input_lengths": "INT64", "prefix": "BYTES"}
# Options with several values, which stay a list where there is one value.
_LISTS = ("suppress_tokens",)


def asked_for(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Any], limits: Limits
) -> tuple[list[Source], list[dict[str, Any]]]:
    """Return the sources, and for each what `asking.submit` is given with it.

    Args:
        tensors: inputs, by name.
        parameters: of the request; an option may stand here or among the inputs.
        limits: how many sources there may be, and for how long.

    Raises:
        InvalidRequestError: says which input or option is wrong, and how.
    """
    for name, datatype in INPUTS.items():
        if name in tensors and tensors[name].datatype != datatype:
            raise InvalidRequestError(f"input {name} is {tensors[name].datatype}, expected {datatype}")
    sources = _sources(tensors)
    if len(sources) > limits.max_texts:
        raise InvalidRequestError(f"{len(sources)} sources are given, the limit is {limits.max_texts}; send fewer")
    options = {name: _value(tensor) for name, tensor in tensors.items() if name not in INPUTS}
    if twice := [name for name in (*options, "prefix") if name in parameters and name in tensors]:
        raise InvalidRequestError(f"{twice[0]} is given as a parameter and as an input, expected once")
    given = arguments({**parameters, **options}, limits.max_timeout_s)
    if "prefix" not in tensors:
        return sources, [given] * len(sources)
    prefixes = list(_column(tensors["prefix"]))
    if len(prefixes) not in (1, len(sources)):
        raise InvalidRequestError(f"prefix has {len(prefixes)} texts, expected 1 or {len(sources)}")
    each = prefixes * (len(sources) if len(prefixes) == 1 else 1)
    return sources, [given | {"prefix": prefix} for prefix in each]


def _sources(tensors: Mapping[str, Tensor]) -> list[Source]:
    if ("text_input" in tensors) == ("input_ids" in tensors):
        raise InvalidRequestError(
            f"the inputs are {', '.join(tensors)[:200] or 'none'}; expected text_input or input_ids"
        )
    if "text_input" in tensors:
        if "input_lengths" in tensors:
            raise InvalidRequestError("input_lengths is given with text_input, expected with input_ids")
        return list(_column(tensors["text_input"]))
    ids = tensors["input_ids"]
    if len(ids.shape) != 2:
        raise InvalidRequestError(f"input_ids has the shape {list(ids.shape)}, expected [sources, length]")
    num_sources, longest = ids.shape
    lengths = _column(tensors["input_lengths"]) if "input_lengths" in tensors else [longest] * num_sources
    if len(lengths) != num_sources or not all(1 <= length <= longest for length in lengths):
        raise InvalidRequestError(f"input_lengths does not fit input_ids, expected {num_sources} of 1 to {longest}")
    return [list(ids.values[start * longest :][:length]) for start, length in enumerate(lengths)]


def _column(tensor: Tensor) -> Sequence[Any]:
    """Return one value for each source."""
    if any(size != 1 for size in tensor.shape[1:]):
        raise InvalidRequestError(f"input {tensor.name} has the shape {list(tensor.shape)}, expected [sources]")
    return tensor.values


def _value(tensor: Tensor) -> Any:
    is_one = len(tensor.values) == 1 and tensor.name not in _LISTS
    return tensor.values[0] if is_one else list(tensor.values)
