"""Define the request and response bodies of the HTTP API and its OpenAPI document."""

from __future__ import annotations

import math
import struct
import types
import typing
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import parse_qsl

import annotated_types
from pydantic import BaseModel, ConfigDict, Field, Json, PrivateAttr, TypeAdapter, ValidationError, create_model
from pydantic import model_validator as validator

from tfexport import config
from tfexport.errors import shortened
from tfexport.generation import DecodeConfig
from tfexport.serve.config import MAX_S
from tfexport.serve.inference import ARRAYS, FILE, OUTPUTS, InvalidRequestError, Source, Tensor, check_finite, texts

JSON, FORM, BYTES = "application/json", "application/x-www-form-urlencoded", "application/octet-stream"
FILES = "multipart/form-data"
# If a body has more problems than this, only their number is reported.
MAX_PROBLEMS = 100
_BOUNDS = {one: getattr(annotated_types, one.__name__) for one in (config.Ge, config.Gt, config.Le, config.Lt)}
_UNION_MEMBERS = {"int", "float", "bool", "str"}
# Codes of `struct`. A BYTES value is a 4-byte length, followed by the bytes.
FORMATS = dict(
    zip("BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 FP16 FP32 FP64".split(), "?bhiqBHIQefd", strict=True)
)


class Body(BaseModel):
    """A request body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    media_types: ClassVar[tuple[str, ...]] = (JSON,)

    def _check_one_of(self, one: str, other: str) -> None:
        if (one in self.model_fields_set) == (other in self.model_fields_set):
            raise ValueError(f"expected either {one} or {other}")

    @classmethod
    def parse(cls, raw: bytes, media_type: str, json_length: int | None) -> Self:
        """Parse a body; binary tensors follow the first `json_length` bytes, if any."""
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            raise InvalidRequestError(*_problems(error)) from error

    @classmethod
    def parse_form(cls, form: Mapping[str, str | bytes]) -> Self:
        """Parse the fields of a form, which are texts and files."""
        kinds = {name: field.annotation is bytes for name, field in cls.model_fields.items()}
        wrong = [name for name, value in form.items() if isinstance(value, bytes) != kinds.get(name, False)]
        if wrong := [name for name in wrong if name in kinds]:
            got, expected = ("a text", "a file") if kinds[wrong[0]] else ("a file", "a text")
            hint = "; with curl, write @ before its path" * kinds[wrong[0]]
            raise InvalidRequestError(f"{wrong[0]} is {got}, expected {expected}{hint}")
        files = {name: value for name, value in form.items() if isinstance(value, bytes)}
        try:
            found = cls.model_validate_strings({**form, **dict.fromkeys(files, "")})
        except ValidationError as error:
            raise InvalidRequestError(*_problems(error)) from error
        return found.model_copy(update=files)


def form_of(pairs: Sequence[tuple[str, str | bytes]]) -> dict[str, str | bytes]:
    """Return the fields of a form by name; refuse repeated ones."""
    if len(form := dict(pairs)) < len(pairs):
        raise InvalidRequestError("a field is given twice, expected once")
    return form


def _problems(error: ValidationError) -> list[str]:
    # The members of a union count as one problem.
    if error.error_count() > MAX_PROBLEMS:
        return [f"the body has {error.error_count()} problems; see /openapi.json for the schema"]
    problems: dict[str, list[str]] = {}
    for one in error.errors(include_url=False, include_context=False):
        kind, message = one["type"], one["msg"].removeprefix("Value error, ")
        place = "".join(_place(one["loc"]))
        if kind == "json_invalid":
            return [f"{place or 'the body'} is not JSON: {message.removeprefix('Invalid JSON: ')}"]
        if kind in ("extra_forbidden", "missing"):
            problems[f"{'missing' if kind == 'missing' else 'unknown'} key {place}"] = []
        elif kind == "value_error":
            problems[f"{place}: {message}" if place else message] = []
        else:
            expected = message.replace("Input should be", "expected")
            got = f"{place or 'the body'} is {shortened(one['input'])}, "
            problems.setdefault(got, []).append(expected[0].lower() + expected[1:])
    return [got + ", or ".join(dict.fromkeys(expected)) for got, expected in problems.items()]


def _place(loc: tuple[int | str, ...]) -> Iterator[str]:
    for depth, part in enumerate(loc):
        if isinstance(part, int):
            yield f"[{part}]"
        elif depth and (part in _UNION_MEMBERS or not part.isidentifier()):  # such as "list[int]"
            return
        else:
            yield f"{'.' * bool(depth)}{part[:80]}"


def _schema(kind: Any, marks: tuple[Any, ...] = ()) -> Any:
    marks += tuple(_BOUNDS[type(one)](one.limit) for one in getattr(kind, "__metadata__", ()) if type(one) in _BOUNDS)
    if typing.get_origin(kind) is Annotated:
        return _schema(kind.__origin__, marks)
    parts = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return reduce(or_, (_schema(part, marks) for part in parts))
    if typing.get_origin(kind) is tuple:
        return list[_schema(parts[0], marks)]  # type: ignore[misc]
    return Annotated[kind, *marks] if marks and kind in (int, float) else kind


_HINTS = typing.get_type_hints(DecodeConfig, include_extras=True)
_OPTIONS: dict[str, Any] = {
    option.name: (_schema(_HINTS[option.name]), Field(default=None, validate_default=False, description=option.help))
    for option in config.settings(DecodeConfig)
}


class Request(Body):
    """Options of a request."""

    prefix: str | list[int] = Field(default="", description="Start of each answer: text, or ids with input_ids.")
    priority: float = Field(default=0.0, ge=-MAX_S, le=MAX_S, description="Seconds to add to its age in the queue.")
    timeout_ms: float = Field(default=0.0, gt=0, description="Time limit in milliseconds, up to the server's limit.")
    timeout: float = Field(default=0.0, gt=0, description="Time limit in microseconds, for clients of Triton.")


Parameters = create_model("Parameters", __base__=Request, __doc__="Options of a request.", **_OPTIONS)


# What requests without parameters share; validating it for each takes longer than parsing the body.
NO_PARAMETERS = Parameters()


class InferParameters(Parameters):  # type: ignore[misc, valid-type]
    """Options of a request with tensors."""

    binary_data_output: bool = Field(default=False, description="Send outputs as binary data.")


class Sourced(Body):
    """A source: text, or token ids with special tokens."""

    text_input: str = ""
    input_ids: list[int] = []

    @validator(mode="after")
    def _check_source(self) -> Self:
        self._check_one_of("text_input", "input_ids")
        return self

    @property
    def source(self) -> Source:
        return self.text_input if "text_input" in self.model_fields_set else self.input_ids


class GenerateRequest(Sourced):
    """A source to generate from."""

    id: str | None = Field(default=None, description="Returned in the response.")
    parameters: Parameters = Field(default_factory=lambda: NO_PARAMETERS)  # type: ignore[valid-type]
    media_types = (JSON, FILES)

    @classmethod
    def parse_form(cls, form: Mapping[str, str | bytes]) -> Any:
        return GenerateForm.parse_form(form)


class GenerateForm(Body):
    """A file to generate from, in a form."""

    file: bytes = Field(description="Audio or an image.")
    id: str | None = Field(default=None, description="Returned in the response.")
    parameters: Json[Parameters] = Field(default_factory=Parameters, description="Options, as JSON.")  # type: ignore[valid-type]

    @property
    def source(self) -> bytes:
        return self.file


FORM_SCHEMA = GenerateForm.model_json_schema(ref_template="#/components/schemas/{model}")
del FORM_SCHEMA["$defs"]


class AlignRequest(Sourced):
    """A source and its target."""

    target_text: str = ""
    target_ids: list[int] = []

    @validator(mode="after")
    def _check_target(self) -> Self:
        self._check_one_of("target_text", "target_ids")
        if {"input_ids", "target_text"} <= self.model_fields_set:
            raise ValueError("input_ids is set with target_text, expected with target_ids")
        return self

    @property
    def target(self) -> Source:
        return self.target_text if "target_text" in self.model_fields_set else self.target_ids


class TokensRequest(Sourced):
    """A source and the token ids of an output."""

    target_ids: list[int]


class TokenizeRequest(Body):
    """A source text."""

    model: str | None = None
    prompt: str


class DetokenizeRequest(Body):
    """Token ids of a target."""

    model: str | None = None
    tokens: list[int]


class InputParameters(Body):
    """Parameters of an input tensor."""

    binary_data_size: int | None = Field(default=None, ge=0, description="Bytes of the tensor after the JSON.")


class Input(Body):
    """An input tensor, in JSON or as binary data after the JSON."""

    name: str
    datatype: Literal["BYTES", *FORMATS]  # type: ignore[valid-type]
    shape: list[Annotated[int, Field(gt=0, lt=2**31)]] = Field(min_length=1, max_length=3)
    data: Any = Field(default=None, description="Values as nested lists or as a flat list.")
    parameters: InputParameters = Field(default_factory=InputParameters)

    @validator(mode="after")
    def _check_data(self) -> Self:
        if ("data" in self.model_fields_set) == (self.parameters.binary_data_size is not None):
            raise ValueError("expected either data or binary_data_size")
        return self

    def read(self, binary: memoryview) -> Tensor:
        """Return the tensor; binary values are the first bytes of `binary`."""
        name, size = shortened(self.name)[1:-1], self.parameters.binary_data_size
        if size is not None and size > len(binary):
            raise InvalidRequestError(f"input {name}: binary_data_size is {size}, but {len(binary)} bytes remain")
        if size is None and self.name == FILE:
            raise InvalidRequestError(f"input {name} is JSON, expected binary data")
        values = self._from_json(name) if size is None else self._from_bytes(name, binary[:size])
        if len(values) != math.prod(self.shape):
            raise InvalidRequestError(f"input {name} has {len(values)} values, its shape is {self.shape}")
        if isinstance(values, memoryview):
            values = values.cast("B").cast("f", self.shape)
        return Tensor(self.name, self.datatype, tuple(self.shape), values)

    def _from_json(self, name: str) -> Sequence[Any]:
        values = [self.data]
        for _ in self.shape:
            values = [value for part in values for value in (part if isinstance(part, list) else [part])]
        try:
            found = _VALUES[self.datatype].validate_python(values, strict=True)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]["input"]
            raise InvalidRequestError(f"input {name} has {shortened(wrong)}, expected {self.datatype}") from error
        return memoryview(array("f", found)) if self.name in ARRAYS and self.datatype == "FP32" else found

    def _from_bytes(self, name: str, binary: memoryview) -> Sequence[Any]:
        if self.datatype == "BYTES":
            parts = _parts(name, binary)
            return list(parts) if self.name == FILE else texts(name, parts)
        code = FORMATS[self.datatype]
        number, rest = divmod(len(binary), struct.calcsize("<" + code))
        if rest:
            raise InvalidRequestError(f"input {name}: {len(binary)} bytes are not a whole number of {self.datatype}")
        if self.name in ARRAYS and code == "f":
            return binary.cast("f")
        values = list(struct.unpack(f"<{number}{code}", binary))
        check_finite(name, values)
        return values


def _values(datatype: str) -> Any:
    if datatype in ("BYTES", "BOOL"):
        return list[str] if datatype == "BYTES" else list[bool]
    if datatype.startswith("FP"):
        most = {"FP16": 65504.0, "FP32": 3.4028235e38, "FP64": math.inf}[datatype]
        return list[Annotated[float, Field(ge=-most, le=most, allow_inf_nan=False)]]
    bits = 8 * struct.calcsize("<" + FORMATS[datatype])
    low, high = (0, 2**bits) if datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return list[Annotated[int, Field(ge=low, lt=high)]]


_VALUES: dict[str, TypeAdapter[list[Any]]] = {name: TypeAdapter(_values(name)) for name in ("BYTES", *FORMATS)}


def _parts(name: str, binary: memoryview) -> Iterator[bytes]:
    number = start = 0
    while start < len(binary):
        number, end = number + 1, start + 4
        start = end + int.from_bytes(binary[start:end], "little")
        if start > len(binary):
            raise InvalidRequestError(f"input {name}: text {number} is longer than the remaining data")
        yield bytes(binary[end:start])


class OutputParameters(Body):
    """Parameters of an output tensor."""

    binary_data: bool | None = Field(default=None, description="Send as binary data after the JSON.")


class Output(Body):
    """A requested output tensor."""

    name: Literal[tuple(OUTPUTS)]  # type: ignore[valid-type]
    parameters: OutputParameters = Field(default_factory=OutputParameters)


class InferRequest(Body):
    """Sources as tensors: text_input, or input_ids with input_lengths.

    For audio and images: features or pixels of one source, or file_input as binary data. The prefix and the options may
    be parameters or tensors.
    """

    media_types = (JSON, BYTES, "")
    id: str | None = Field(default=None, description="Returned in the response.")
    inputs: list[Input] = Field(min_length=1)
    outputs: list[Output] = Field(default=[], description="Outputs to return; all if empty.")
    parameters: InferParameters = Field(default_factory=InferParameters)
    _tensors: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self._tensors

    @classmethod
    def parse(cls, raw: bytes, media_type: str, json_length: int | None) -> Self:
        length = len(raw) if json_length is None else json_length
        request = super().parse(raw[:length], media_type, None)
        binary = memoryview(raw)[length:]
        for tensor in request.inputs:
            if tensor.name in request._tensors:
                raise InvalidRequestError(f"input {tensor.name[:80]} is given twice, expected once")
            request._tensors[tensor.name] = tensor.read(binary)
            binary = binary[tensor.parameters.binary_data_size or 0 :]
        if len(binary):
            raise InvalidRequestError(f"{len(binary)} bytes after the JSON belong to no input")
        return request


class StreamOptions(BaseModel):
    """Options of a completion stream."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class Completion(Parameters):  # type: ignore[misc, valid-type]
    """One or more prompts, as in the OpenAI API, and decoding options of tfexport."""

    model: str | None = None
    prompt: str | list[str]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, description="Sample if above 0.")
    top_k: int | None = Field(default=None, description="-1 for all tokens.")
    top_p: float | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    user: Any = None
    # Features that are not supported; only the values that disable them are accepted.
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    logprobs: None = None
    presence_penalty: Literal[0] | None = None
    suffix: Literal[""] | None = None


class Transcription(Parameters):  # type: ignore[misc, valid-type]
    """A form with audio, as in the OpenAI API, and decoding options of tfexport."""

    media_types = (FILES,)
    file: bytes = Field(description="Audio.")
    model: str | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    stream: bool | None = None
    temperature: float | None = Field(default=None, description="Sample if above 0.")
    prompt: Literal[""] | None = None  # only the value that disables it is accepted


class Embeddings(Body):
    """Inputs of `/v1/embeddings`, as in the OpenAI API."""

    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]] = Field(description="Texts, or token ids with special tokens.")
    encoding_format: Literal["float", "base64"] = "float"
    user: Any = None

    @property
    def sources(self) -> list[str] | list[list[int]]:
        is_one = isinstance(self.input, str) or (self.input and isinstance(self.input[0], int))
        return [self.input] if is_one else self.input  # type: ignore[return-value]


class TranslateRequest(Body):
    """One or more texts, as in the LibreTranslate API."""

    media_types = (JSON, FORM)
    q: str | list[str]
    source: str
    target: str
    format: Literal["text"] = "text"
    alternatives: int = Field(default=0, ge=0)
    api_key: str | None = None

    @classmethod
    def parse(cls, raw: bytes, media_type: str, json_length: int | None) -> Self:
        if media_type != FORM:  # LibreTranslate's client sends forms
            return super().parse(raw, media_type, json_length)
        try:
            pairs = parse_qsl(raw.decode(), True, True, errors="strict", max_num_fields=len(cls.model_fields))
        except ValueError as error:
            raise InvalidRequestError(f"the body is not a form: {error}") from error
        return cls.parse_form(form_of(pairs))


class Named(BaseModel):
    """The model of a response."""

    id: str | None = None
    model_name: str
    model_version: str


class Generated(Named):
    """Results of one source; if there are several, lists with the best first."""

    text_output: str | list[str] | None = None
    output_ids: list[int] | list[list[int]]
    scores: float | list[float] | None = None
    finish_reason: str | list[str]


class Classified(Named):
    """Label and logits of a source; lists of them for a head on tokens."""

    label: str | list[str]
    logits: list[float] | list[list[float]]
    token_ids: list[int]


class OutputTensor(BaseModel):
    """An output tensor."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


class Inferred(Named):
    """Outputs as tensors."""

    outputs: list[OutputTensor]


class Aligned(BaseModel):
    """Attention weights of each source token, for each target token."""

    model_name: str
    model_version: str
    source_ids: list[int]
    target_ids: list[int]
    source_tokens: list[str]
    target_tokens: list[str]
    source_positions: list[int | None]
    weights: list[list[float]]


class Refusal(BaseModel):
    """An error message; endpoints under /v1 return it in an object."""

    error: str | dict[str, Any]
