"""Convert requests and answers of HTTP and Triton: options, sources, tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tfexport.decode.result import Hypothesis
from tfexport.errors import ConfigError, InputError, shortened
from tfexport.generation import DecodeConfig
from tfexport.model.result import Result
from tfexport.serve._generation import Generation
from tfexport.serve.config import Limits
from tfexport.serve.engine import Engine

Source: TypeAlias = str | list[int]
Answer: TypeAlias = Result | Hypothesis
Asked: TypeAlias = Generation[str, Result] | Generation[int, Hypothesis]
DECODING = frozenset(field.name for field in dataclasses.fields(DecodeConfig))
# Units per second. Triton clients send `timeout` in microseconds.
_TIMES = {"timeout_ms": 1e3, "timeout": 1e6}
# Inputs of `infer` that are not options, with their datatypes.
INPUTS = {"text_input": "BYTES", "input_ids": "INT64", "input_lengths": "INT64", "prefix": "BYTES"}
# Datatype and rank of each output: [sources, answers], or [sources, answers, length].
OUTPUTS = {
    "text_output": ("BYTES", 2),
    "output_ids": ("INT64", 3),
    "output_lengths": ("INT64", 2),
    "scores": ("FP32", 2),
    "finish_reason": ("BYTES", 2),
}
# Options that remain a list even with a single value.
_LISTS = ("suppress_tokens",)
# In characters; messages may quote client input of any length.
MAX_MESSAGE = 1000


class InvalidRequestError(InputError):
    """Reject a request before it reaches an engine."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the Open Inference Protocol.

    Attributes:
        datatype: as spelled in the protocol, such as INT64.
        values: flat, in row-major order; BYTES values are str.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


def bounded(message: str) -> str:
    """Truncate an error message to `MAX_MESSAGE` characters."""
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"


def arguments(parameters: Mapping[str, Any], max_timeout_s: float) -> dict[str, Any]:
    """Convert request parameters to arguments of `Engine.submit` and `submit_ids`.

    They are timeout_ms or timeout, and fields of `DecodeConfig`, prefix and priority, which the engine checks.

    Raises:
        InvalidRequestError: lists unknown names, and timeouts that are not valid numbers.
    """
    given = {name: value for name, value in parameters.items() if name in DECODING or name in ("prefix", "priority")}
    times = {name: value for name, value in parameters.items() if name in _TIMES}
    problems = [f"unknown parameter {shortened(name)}" for name in parameters if name not in given | times]
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            problems.append(f"{name} is {shortened(value)}, expected a number")
        elif value <= 0:
            problems.append(f"{name} is {value}, expected above 0")
    if problems:
        raise InvalidRequestError(*problems)
    return given | {"timeout_s": min([*(value / _TIMES[name] for name, value in times.items()), max_timeout_s])}


def submit(engine: Engine, source: Source, given: Mapping[str, Any], *, stream: bool = False) -> Asked:
    """Submit a text or token ids with further arguments of `Engine.submit`."""
    if isinstance(source, str):
        return engine.submit(source, stream=stream, **given)
    return engine.submit_ids(source, stream=stream, **given)


def submit_all(engine: Engine, sources: Sequence[Source], given: Sequence[Mapping[str, Any]]) -> list[Asked]:
    """Submit several sources; if one is refused, cancel the others.

    Raises:
        TfexportError: see `Engine.submit`; the message names the source.
    """
    with contextlib.ExitStack() as refused:
        asked: list[Asked] = []
        for number, (source, options) in enumerate(zip(sources, given, strict=True), 1):
            try:
                asked.append(submit(engine, source, options))
            except (InputError, ConfigError) as error:
                if len(sources) == 1:
                    raise
                raise type(error)(*error.problems, **error.of(f"source {number} of {len(sources)}")) from error
            refused.callback(asked[-1].cancel)
        refused.pop_all()
        return asked


def asked_for(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Any], limits: Limits
) -> tuple[list[Source], list[dict[str, Any]]]:
    """Return the sources of an `infer` request, and the `submit` arguments of each.

    Options may be passed as parameters or as tensors.
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


def outputs_of(found: Sequence[Sequence[Answer]], pad: int) -> dict[str, Tensor]:
    """Return the output tensors of `infer` by name.

    The token id `pad` fills short rows. There are no texts if the sources were token ids.

    Raises:
        InvalidRequestError: the sources have different numbers of answers.
    """
    if len(numbers := {len(one) for one in found}) > 1:
        raise InvalidRequestError(f"the sources have {min(numbers)} to {max(numbers)} alternatives; ask for each alone")
    answers = [answer for one in found for answer in one]
    shape, lengths = (len(found), len(found[0])), [len(one.token_ids) for one in answers]
    longest = max(lengths)
    values: dict[str, Sequence[object]] = {
        "text_output": [one.text for one in answers if isinstance(one, Result)],
        "output_ids": [token for one in answers for token in (*one.token_ids, *[pad] * (longest - len(one.token_ids)))],
        "output_lengths": lengths,
        "scores": [one.score for one in answers],
        "finish_reason": [one.finish_reason for one in answers],
    }
    return {
        name: Tensor(name, datatype, shape if rank == 2 else (*shape, longest), values[name])
        for name, (datatype, rank) in OUTPUTS.items()
        if values[name]
    }


def texts(name: str, raws: Iterable[bytes]) -> list[str]:
    """Decode a BYTES tensor; raise `InvalidRequestError` if it is not UTF-8."""
    found: list[str] = []
    for raw in raws:
        try:
            found.append(raw.decode())
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"input {name}: text {len(found) + 1} is not UTF-8") from error
    return found


def check_finite(name: str, values: Iterable[Any]) -> None:
    """Raise `InvalidRequestError` if a value is infinite or NaN."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise InvalidRequestError(f"input {name} has a value that is not finite")


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
    if any(size != 1 for size in tensor.shape[1:]):
        raise InvalidRequestError(f"input {tensor.name} has the shape {list(tensor.shape)}, expected [sources]")
    return tensor.values


def _value(tensor: Tensor) -> Any:
    is_one = len(tensor.values) == 1 and tensor.name not in _LISTS
    return tensor.values[0] if is_one else list(tensor.values)
