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
from tfexport.config import Config
from tfexport.errors import ConfigError
from tfexport.generation import DecodeConfig
from tfexport.serve.config import Limits, ServingConfig
from tfexport.serve.inference import OUTPUTS

SHA256 = "bundle_sha256"
# Directory of the bundle, next to model.py in the directory of the model's only version.
BUNDLE = "bundle"
VERSION = "1"
# Options of `tfexport.load`. All but the last are text, even if they look like numbers.
LOADING = ("backend", "form", "device", "engine", "threads")


@dataclass(frozen=True)
class Settings:
    """Settings of a model, valid only for the bundle with this sha256."""

    bundle_sha256: str
    serving: ServingConfig
    limits: Limits
    loading: Mapping[str, Any]

    def parameters(self) -> dict[str, str]:
        """Return the settings as parameters of config.pbtxt, without defaults."""
        loading = {name: value for name, value in self.loading.items() if value is not None}
        changed = {**_changed(self.serving), **_changed(self.limits)}
        return {SHA256: self.bundle_sha256, **{name: str(value) for name, value in {**loading, **changed}.items()}}

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Settings:
        """Read config.pbtxt parameters; raise `ConfigError` for missing or invalid ones."""
        # Names in capitals are Triton's own parameters.
        parameters = {name: text for name, text in parameters.items() if not name.isupper()}
        values = {name: _value(text) for name, text in parameters.items()}
        parts = {kind: _part(kind, values) for kind in (ServingConfig, Limits)}
        known = {SHA256, *LOADING, *(name for part in parts.values() for name in part)}
        if SHA256 not in parameters or (unknown := [name for name in parameters if name not in known]):
            problem = f"{SHA256} is missing" if SHA256 not in parameters else f"unknown {', '.join(unknown)[:200]}"
            raise ConfigError(f"parameters of config.pbtxt: {problem}; write the repository anew")
        return cls(
            parameters[SHA256],
            ServingConfig.from_dict(parts[ServingConfig], subject="config.pbtxt"),
            Limits.from_dict(parts[Limits], subject="config.pbtxt"),
            {name: (values if name == LOADING[-1] else parameters)[name] for name in LOADING if name in parameters},
        )


def _changed(config: Config) -> dict[str, Any]:
    fields = dataclasses.fields(config)
    return {one.name: value for one in fields if (value := getattr(config, one.name)) != one.default}


def _part(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}


def _value(text: str) -> Any:
    try:
        value = parse_json(text.encode())
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


_TYPES = {"BYTES": "STRING"}
_OPTION_TYPES: dict[object, str] = {bool: "BOOL", int: "INT64", float: "FP64", str: "BYTES"}
ANY = -1


@dataclass(frozen=True)
class Port:
    """An input or output; -1 means any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]


def inputs(*, has_texts: bool, stream: bool) -> list[Port]:
    """Return the inputs of a model: sources, and each option that a tensor can hold."""
    number = 1 if stream else ANY
    texts = [Port("text_input", "BYTES", (number,))] if has_texts else []
    ids = [Port("input_ids", "INT64", (ANY,) if stream else (ANY, ANY))]
    lengths = [] if stream else [Port("input_lengths", "INT64", (ANY,))]
    return [*texts, *ids, *lengths, Port("prefix", "BYTES", (number,)), *_options()]


def outputs(*, has_texts: bool, stream: bool) -> list[Port]:
    """Return the outputs of a model; those of a stream have no batch dimension."""
    there = {name: output for name, output in OUTPUTS.items() if has_texts or name != "text_output"}
    if not stream:
        return [Port(name, datatype, (ANY,) * rank) for name, (datatype, rank) in there.items()]
    lasting = {name: datatype for name, (datatype, _) in there.items() if name != "output_lengths"}
    return [Port(name, datatype, (ANY if name == "output_ids" else 1,)) for name, datatype in lasting.items()]


def describe(name: str, settings: Settings, *, has_texts: bool, stream: bool) -> str:
    """Return the config.pbtxt of a model; `has_texts` if the bundle has a tokenizer."""
    lines = [
        f"# Written by tfexport {version('tfexport')}.",
        f"name: {_quoted(name)}",
        'backend: "python"',
        "# The engine has queue and batches; a queue policy of Triton would hold requests back for half a second.",
        "max_batch_size: 0",
        f"model_transaction_policy {{ decoupled: {str(stream).lower()} }}",
        "# The engine chooses the device, see the parameters.",
        "instance_group [ { kind: KIND_MODEL, count: 1 } ]",
        *_ports("input", inputs(has_texts=has_texts, stream=stream), optional=True),
        *_ports("output", outputs(has_texts=has_texts, stream=stream), optional=False),
        *(
            f"parameters {{ key: {_quoted(key)}, value: {{ string_value: {_quoted(value)} }} }}"
            for key, value in settings.parameters().items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _ports(kind: str, ports: list[Port], *, optional: bool) -> Iterator[str]:
    more = ", optional: true" if optional else ""
    for port in ports:
        datatype = _TYPES.get(port.datatype, port.datatype)
        yield f"{kind} {{ name: {_quoted(port.name)}, data_type: TYPE_{datatype}, dims: {list(port.dims)}{more} }}"


def _options() -> Iterator[Port]:
    for name, kind in typing.get_type_hints(DecodeConfig).items():
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
        several = any(typing.get_origin(one) is tuple for one in kinds)
        items = {typing.get_args(one)[0] if typing.get_origin(one) is tuple else one for one in kinds}
        datatype = _OPTION_TYPES.get(*items) if len(items := items - {types.NoneType}) == 1 else None
        if datatype:
            yield Port(name, datatype, (ANY if several else 1,))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
