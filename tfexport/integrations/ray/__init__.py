"""Serve bundles with Ray Serve."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from tfexport.config import Ge, Gt, Help, Le, settings
from tfexport.contract import Device, Variant
from tfexport.errors import ConfigError
from tfexport.serve.config import MAX_S, HttpConfig, ServingConfig, named_bundles

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["Arguments", "app"]
SUBJECT = "application"


def app(arguments: Mapping[str, Any]) -> Application:
    """Build the Ray Serve application from arguments or a configuration file.

    `serve run tfexport.integrations.ray:app bundle=…` calls it with fields of `Arguments`, whose values may be text.
    Only the replicas read the bundles, on their nodes. Raises `ConfigError` with every invalid argument.
    """
    from tfexport.integrations.ray._replica import deployment_of

    found = Arguments.read(arguments)
    return deployment_of(found).bind(found)


class Arguments(ServingConfig, HttpConfig, subject=SUBJECT, former={"form": "variant"}):
    """Arguments of the application, with those of `ServingConfig` and `HttpConfig`.

    Paths are paths on the nodes that run replicas. `backend`, `variant` and `engine` are those of `tfexport.load`.
    """

    bundle: Annotated[str | tuple[str, ...], Help("`[NAME=]BUNDLE` or a list of them; each replica serves all.")]
    backend: Annotated[str, Help("Backend that runs the bundles.")] = "auto"
    variant: Annotated[Variant | None, Help("Decoder variant.")] = None
    device: Annotated[Device | None, Help("By default cuda if the replica has a GPU or a part of one.")] = None
    engine: Annotated[str | None, Help("TensorRT engine, if several fit.")] = None
    threads: Annotated[int | None, Help("CPU threads per model; by default a share of the replica's CPUs.")] = None
    trusted_keys: Annotated[
        str | tuple[str, ...] | None, Help("Files of public keys, one of which must have signed each bundle.")
    ] = None
    token_file: Annotated[str | None, Help("File with one bearer token per line, read when a replica starts.")] = None
    timeout_s: Annotated[float | None, Gt(0), Le(MAX_S), Help("Time limit of a request.")] = HttpConfig.max_timeout_s
    min_replicas: Annotated[int, Ge(1), Le(10_000), Help("Minimum number of replicas.")] = 1
    max_replicas: Annotated[int, Ge(1), Le(10_000), Help("Maximum number; Ray scales between both.")] = 1
    num_cpus: Annotated[float, Ge(0), Le(1024), Help("Cores that Ray reserves for a replica.")] = 1.0
    num_gpus: Annotated[float, Ge(0), Le(1024), Help("GPUs of a replica; 0.5 shares one, without memory limit.")] = 0.0
    shutdown_timeout_s: Annotated[float, Ge(0), Le(86_400), Help("Seconds to finish accepted requests.")] = 30.0

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> Self:
        """Read arguments strictly; parse text as JSON for options that are not text."""
        types = {setting.name: setting.types for setting in settings(cls)}
        values = {name: _parsed(value, types.get(name, ())) for name, value in arguments.items()}
        return cls.from_dict(values, subject=SUBJECT)

    @property
    def bundles(self) -> dict[str, Path]:
        """The path of each bundle by the name that it is served under."""
        return named_bundles(_listed(self.bundle))

    @property
    def keys(self) -> tuple[str, ...] | None:
        """The files of public keys; None if bundles need no signature."""
        return None if self.trusted_keys is None else _listed(self.trusted_keys)

    def _problems(self) -> Iterator[str]:
        yield from ServingConfig._problems(self)
        if self.max_replicas < self.min_replicas:
            yield f"max_replicas is {self.max_replicas}, below min_replicas {self.min_replicas}; raise it too"
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            yield f"num_gpus is {self.num_gpus}, expected at most 1 or a whole number"
        if self.num_gpus and self.device == "cpu":
            yield f"num_gpus is {self.num_gpus}, which device cpu does not use; leave one of them out"
        if not self.bundle:
            yield "bundle is empty, expected one or more"
        try:
            _ = self.bundles
        except ConfigError as error:
            yield from error.problems


def _listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _parsed(value: object, types: tuple[Any, ...]) -> object:
    if isinstance(value, str) and str not in types:
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value
