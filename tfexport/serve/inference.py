"""Convert requests and answers of HTTP and Triton: options, sources, tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, get_origin

from tfexport.config import settings
from tfexport.decode.result import Hypothesis
from tfexport.errors import ConfigError, InputError, TfexportError, shortened
from tfexport.generation import DecodeConfig
from tfexport.model.result import Result
from tfexport.serve._generation import Generation
from tfexport.serve.config import Limits
from tfexport.serve.engine import Engine

Source: TypeAlias = str | list[int] | bytes | memoryview
Answer: TypeAlias = Result | Hypothesis
Submitted: TypeAlias = Generation[str, Result] | Generation[int, Hypothesis]
DECODING = frozenset(field.name for field in dataclasses.fields(DecodeConfig))
# Options that may be lists of numbers.
LISTS = {one.name for one in settings(DecodeConfig) if {*map(get_origin, one.types)} & {tuple} and str not in one.types}
# Units per second. Triton clients send `timeout` in microseconds.
_TIMEOUTS = {"timeout_ms": 1e3, "timeout": 1e6}
# Inputs of `infer` that are not options, with their datatypes.
INPUTS = {"text_input": "BYTES", "input_ids": "INT64", "input_lengths": "INT64", "prefix": "BYTES"}
# The same for audio and images: what the encoder reads, of one source, and files.
ARRAYS, FILE = ("features", "pixels"), "file_input"
INPUTS |= {**dict.fromkeys(ARRAYS, "FP32"), FILE: "BYTES"}
# Datatype and rank of each output: [sources, answers], or [sources, answers, length].
OUTPUTS = {
    "text_output": ("BYTES", 2),
    "output_ids": ("INT64", 3),
    "output_lengths": ("INT64", 2),
    "scores": ("FP32", 2),
    "finish_reason": ("BYTES", 2),
}
# Messages can quote client input of any length.
MAX_MESSAGE = 1000


class InvalidRequestError(InputError):
    """A request is not valid, and does not reach an engine."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the Open Inference Protocol."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]  # flat, in row-major order; str for BYTES, except for `FILE`; a memoryview for `ARRAYS`


def bounded(message: str) -> str:
    """Truncate an error message to `MAX_MESSAGE` characters."""
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"


def arguments(parameters: Mapping[str, Any], max_timeout_s: float) -> dict[str, Any]:
    """Check timeouts; return the arguments of `Engine.submit`, which checks the rest."""
    options = {name: value for name, value in parameters.items() if name in DECODING or name in ("prefix", "priority")}
    timeouts = {name: value for name, value in parameters.items() if name in _TIMEOUTS}
    problems = [f"unknown parameter {shortened(name)}" for name in parameters if name not in options | timeouts]
    for name, value in timeouts.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            problems.append(f"{name} is {shortened(value)}, expected a number")
        elif value <= 0:
            problems.append(f"{name} is {value}, expected above 0")
    if problems:
        raise InvalidRequestError(*problems)
    return options | {"timeout_s": min([*(value / _TIMEOUTS[name] for name, value in timeouts.items()), max_timeout_s])}


def submit(engine: Engine, source: Source, options: Mapping[str, Any], *, stream: bool = False) -> Submitted:
    """Submit a source with further arguments of `Engine.submit`."""
    if isinstance(source, list) or (isinstance(source, memoryview) and engine.model.tokenizer is None):
        return engine.submit_ids(source, stream=stream, **options)
    return engine.submit(source, stream=stream, **options)


def submit_all(engine: Engine, sources: Sequence[Source], options: Sequence[Mapping[str, Any]]) -> list[Submitted]:
    """Submit several sources; if one is refused, cancel the others."""
    with contextlib.ExitStack() as cancel_all:
        generations: list[Submitted] = []
        for number, (source, own) in enumerate(zip(sources, options, strict=True), 1):
            try:
                generations.append(submit(engine, source, own))
            except (InputError, ConfigError) as error:
                raise numbered(error, number, len(sources)) from error
            cancel_all.callback(generations[-1].cancel)
        cancel_all.pop_all()
        return generations


def numbered(error: TfexportError, number: int, count: int) -> TfexportError:
    """Return an error that names its source, if there are several."""
    return error if count == 1 else type(error)(*error.problems, **error.of(f"source {number} of {count}"))


def parse_inputs(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Any], limits: Limits
) -> tuple[list[Source], list[dict[str, Any]]]:
    """Return the sources of an `infer` request, and the `submit` arguments of each."""
    for name, datatype in INPUTS.items():
        if name in tensors and tensors[name].datatype != datatype:
            raise InvalidRequestError(f"input {name} is {tensors[name].datatype}, expected {datatype}")
    sources = _sources(tensors)
    if len(sources) > limits.max_texts:
        raise InvalidRequestError(f"{len(sources)} sources are given, the limit is {limits.max_texts}; send fewer")
    given = {name: list(tensor.values) for name, tensor in tensors.items() if name not in INPUTS}
    inputs = {name: one[0] if len(one) == 1 and name not in LISTS else one for name, one in given.items()}
    if twice := [name for name in (*inputs, "prefix") if name in parameters and name in tensors]:
        raise InvalidRequestError(f"{twice[0]} is given as a parameter and as an input, expected once")
    options = arguments({**parameters, **inputs}, limits.max_timeout_s)
    if "prefix" not in tensors:
        return sources, [options] * len(sources)
    prefixes = list(_column(tensors["prefix"]))
    if len(prefixes) not in (1, len(sources)):
        raise InvalidRequestError(f"prefix has {len(prefixes)} texts, expected 1 or {len(sources)}")
    if len(prefixes) == 1:
        prefixes *= len(sources)
    return sources, [options | {"prefix": prefix} for prefix in prefixes]


def outputs_of(results: Sequence[Sequence[Answer]], pad: int) -> dict[str, Tensor]:
    """Return the output tensors of `infer` by name; the token id `pad` fills rows."""
    if len(numbers := {len(answers) for answers in results}) > 1:
        raise InvalidRequestError(f"the sources have {min(numbers)} to {max(numbers)} alternatives; send one at a time")
    answers = [answer for each in results for answer in each]
    shape, lengths = (len(results), len(results[0])), [len(answer.token_ids) for answer in answers]
    longest = max(lengths)
    padded = [[*answer.token_ids, *[pad] * (longest - len(answer.token_ids))] for answer in answers]
    values: dict[str, Sequence[object]] = {
        "text_output": [answer.text for answer in answers if isinstance(answer, Result)],
        "output_ids": [token for row in padded for token in row],
        "output_lengths": lengths,
        "scores": scores_of(answers) or [],
        "finish_reason": [answer.finish_reason for answer in answers],
    }
    return {
        name: Tensor(name, datatype, shape if rank == 2 else (*shape, longest), values[name])
        for name, (datatype, rank) in OUTPUTS.items()
        if values[name]
    }


def scores_of(answers: Sequence[Answer]) -> list[float] | None:
    """Return the scores of answers; None if `return_scores` is false."""
    scores = [answer.score for answer in answers if answer.score is not None]
    return scores if len(scores) == len(answers) else None


def texts(name: str, raws: Iterable[bytes]) -> list[str]:
    """Decode a BYTES tensor; raise `InvalidRequestError` if it is not UTF-8."""
    decoded: list[str] = []
    for raw in raws:
        try:
            decoded.append(raw.decode())
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"input {name}: text {len(decoded) + 1} is not UTF-8") from error
    return decoded


def check_finite(name: str, values: Iterable[Any]) -> None:
    """Raise `InvalidRequestError` if a value is infinite or NaN."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise InvalidRequestError(f"input {name} has a value that is not finite")


def _sources(tensors: Mapping[str, Tensor]) -> list[Source]:
    given = [name for name in ("text_input", "input_ids", FILE, *ARRAYS) if name in tensors]
    if len(given) != 1:
        names, expected = ", ".join(tensors)[:200] or "none", f"{FILE}, {' or '.join(ARRAYS)}"
        raise InvalidRequestError(f"the inputs are {names}; expected text_input or input_ids, or for files {expected}")
    (name,) = given
    if name != "input_ids":
        if "input_lengths" in tensors:
            raise InvalidRequestError(f"input_lengths is set with {name}, expected with input_ids")
        tensor = tensors[name]
        return [cast(memoryview, tensor.values)] if name in ARRAYS else list(_column(tensor))
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
