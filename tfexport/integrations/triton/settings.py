"""What a model is served with in Triton: written as the parameters of its config.pbtxt, and read there again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfexport._io.strict_json import parse_json
from tfexport.config import Config
from tfexport.errors import ConfigError
from tfexport.serve.config import Limits, ServingConfig

SHA256 = "bundle_sha256"
# The bundle, beside model.py in the directory of the model's only version.
BUNDLE = "bundle"
VERSION = "1"
# Options of `tfexport.load`; all but the last are texts, whatever they look like.
LOADING = ("backend", "form", "device", "engine", "threads")


@dataclass(frozen=True)
class Settings:
    """What a model is served with.

    Attributes:
        bundle_sha256: of the bundle's manifest; no other bundle is served.
        serving: slots and limits of the engine.
        limits: of a request.
        loading: options of `tfexport.load`.
    """

    bundle_sha256: str
    serving: ServingConfig
    limits: Limits
    loading: Mapping[str, Any]

    def parameters(self) -> dict[str, str]:
        """Return what config.pbtxt says of them: what loads the bundle, and what is not as usual."""
        loading = {name: value for name, value in self.loading.items() if value is not None}
        changed = {**_changed(self.serving), **_changed(self.limits)}
        return {SHA256: self.bundle_sha256, **{name: str(value) for name, value in {**loading, **changed}.items()}}

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Settings:
        """Return what the parameters of a config.pbtxt say; those in capitals are Triton's own.

        Raises:
            ConfigError: lists those that are missing, unknown, or out of range.
        """
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
    """Return the fields that have another value than their default."""
    fields = dataclasses.fields(config)
    return {one.name: value for one in fields if (value := getattr(config, one.name)) != one.default}


def _part(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}


def _value(text: str) -> Any:
    """Return the number that a parameter is; else the text."""
    try:
        value = parse_json(text.encode())
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text
