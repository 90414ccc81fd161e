"""Write a model's settings to Triton's config.pbtxt, and read them back."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from tfexport._io.strict_json import parse_json
from tfexport.config import options_of, settings
from tfexport.errors import ConfigError
from tfexport.generation import DecodeConfig
from tfexport.serve.config import Limits, ServingConfig
from tfexport.serve.inference import OUTPUTS

SHA256 = "bundle_sha256"
# Directory of the bundle, next to model.py in the directory of the model's only version.
BUNDLE = "bundle"
VERSION = "1"
# Options of `tfexport.load`. All but the last are text, even if they look like numbers.
LOADING = ("backend", "variant", "device", "engine", "threads")
_OPTION_TYPES: dict[object, str] = {bool: "BOOL", int: "INT64", float: "FP64", str: "STRING"}
_ANY = -1  # any size


@dataclass(frozen=True)
class Settings:
    """Settings of a model, valid only for the bundle with this sha256."""

    bundle_sha256: str
    serving: ServingConfig
    limits: Limits
    loading: Mapping[str, Any]

    def parameters(self) -> dict[str, str]:
        """Return the settings as parameters of config.pbtxt, without defaults."""
        changed = {name: value for name, value in self.loading.items() if value is not None}
        for config in (self.serving, self.limits):
            for field in dataclasses.fields(config):
                if (value := getattr(config, field.name)) != field.default:
                    changed[field.name] = value
        return {SHA256: self.bundle_sha256, **{name: str(value) for name, value in changed.items()}}

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Settings:
        # Names in capitals are Triton's own parameters.
        former = {"form": "variant"}  # in repositories of earlier versions
        parameters = {former.get(name, name): text for name, text in parameters.items() if not name.isupper()}
        serving, limits = (
            {one.name: _value(parameters.pop(one.name)) for one in dataclasses.fields(kind) if one.name in parameters}
            for kind in (ServingConfig, Limits)
        )
        loading = {name: parameters.pop(name) for name in LOADING if name in parameters}
        sha256 = parameters.pop(SHA256, None)
        if sha256 is None or parameters:
            problem = f"{SHA256} is missing" if sha256 is None else f"unknown {', '.join(parameters)[:200]}"
            raise ConfigError(f"parameters of config.pbtxt: {problem}; write the repository anew")
        return cls(
            sha256,
            ServingConfig.from_dict(serving, subject="config.pbtxt"),
            Limits.from_dict(limits, subject="config.pbtxt"),
            {name: _value(text) if name == LOADING[-1] else text for name, text in loading.items()},
        )


def _value(text: str) -> Any:
    try:
        value = parse_json(text.encode())
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _inputs(*, has_texts: bool, stream: bool) -> Iterator[str]:
    number = 1 if stream else _ANY
    if has_texts:
        yield _port("text_input", "STRING", [number])
    yield _port("input_ids", "INT64", [_ANY] if stream else [_ANY, _ANY])
    if not stream:
        yield _port("input_lengths", "INT64", [_ANY])
    yield _port("prefix", "STRING", [number])
    for option in settings(DecodeConfig):
        lists = [kind for kind in option.types if typing.get_origin(kind) is tuple]
        elements = {options_of(typing.get_args(kind)[0])[0] for kind in lists}
        kinds = (elements | {*option.types}) - {*lists, types.NoneType}
        if len(kinds) == 1 and (datatype := _OPTION_TYPES.get(*kinds)):
            yield _port(option.name, datatype, [_ANY if lists else 1])


def _outputs(*, has_texts: bool, stream: bool) -> Iterator[str]:
    """Yield the outputs of a model; those of a stream have no batch dimension."""
    for name, (datatype, rank) in OUTPUTS.items():
        if (name == "text_output" and not has_texts) or (name == "output_lengths" and stream):
            continue
        dims = [_ANY if name == "output_ids" else 1] if stream else [_ANY] * rank
        yield _port(name, datatype.replace("BYTES", "STRING"), dims)


def describe(name: str, model: Settings, *, has_texts: bool, stream: bool) -> str:
    lines = [
        f"# Written by tfexport {version('tfexport')}.",
        f"name: {_quoted(name)}",
        'backend: "python"',
        "# The engine has queue and batches; a queue policy of Triton would hold requests back for half a second.",
        "max_batch_size: 0",
        f"model_transaction_policy {{ decoupled: {str(stream).lower()} }}",
        "# The engine chooses the device, see the parameters.",
        "instance_group [ { kind: KIND_MODEL, count: 1 } ]",
    ]
    lines += [f"input {{ {port}, optional: true }}" for port in _inputs(has_texts=has_texts, stream=stream)]
    lines += [f"output {{ {port} }}" for port in _outputs(has_texts=has_texts, stream=stream)]
    lines += [
        f"parameters {{ key: {_quoted(key)}, value: {{ string_value: {_quoted(value)} }} }}"
        for key, value in model.parameters().items()
    ]
    return "\n".join(lines) + "\n"


def _port(name: str, datatype: str, dims: list[int]) -> str:
    return f"name: {_quoted(name)}, data_type: TYPE_{datatype}, dims: {dims}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
