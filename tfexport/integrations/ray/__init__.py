"""Serve bundles with Ray Serve."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from tfexport.config import Ge, Gt, Le, settings
from tfexport.contract import Device, Variant
from tfexport.errors import ConfigError
from tfexport.serve.config import MAX_S, HttpConfig, ServingConfig, named_bundles

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["Arguments", "app"]
SUBJECT = "application"


def app(arguments: Mapping[str, Any]) -> Application:
    """Build the Ray Serve application from arguments or a configuration file.

    `serve run tfexport.integrations.ray:app bundle=…` calls it. Only the replicas read the bundles, on their nodes.

    Args:
        arguments: fields of `Arguments`; values from a command line may be text.

    Raises:
        ConfigError: lists every argument that is unknown, missing or invalid.
    """
    from tfexport.integrations.ray._replica import deployment_of

    found = Arguments.read(arguments)
    return deployment_of(found).bind(found)


class Arguments(ServingConfig, HttpConfig, subject=SUBJECT, former={"form": "variant"}):
    """Arguments of the application, with those of `ServingConfig` and `HttpConfig`.

    Paths are paths on the nodes that run replicas. `backend`, `variant` and `engine` are those of `tfexport.load`.

    Attributes:
        bundle: `[NAME=]BUNDLE` or a list of them; each replica serves all bundles, each with its own engine.
        device: "cpu" or "cuda"; None chooses "cuda" if the replica has a GPU or a part of one.
        threads: CPU threads per model; None divides the replica's CPUs between its models.
        trusted_keys: path of a file of public keys, or a list of paths; one key must have signed each bundle.
        token_file: file with one bearer token per line; None accepts requests without a token.
        min_replicas: minimum number of replicas.
        max_replicas: maximum number of replicas; if it is above `min_replicas`, Ray scales between them.
        num_cpus: cores that Ray reserves for a replica.
        num_gpus: GPUs that Ray reserves for a replica; 0.5 lets two replicas share one, without a memory limit.
        shutdown_timeout_s: time limit in seconds for a stopping replica to finish its accepted requests.
    """

    bundle: str | tuple[str, ...]
    backend: str = "auto"
    variant: Variant | None = None
    device: Device | None = None
    engine: str | None = None
    threads: int | None = None
    trusted_keys: str | tuple[str, ...] | None = None
    token_file: str | None = None
    timeout_s: Annotated[float | None, Gt(0), Le(MAX_S)] = HttpConfig.max_timeout_s
    min_replicas: Annotated[int, Ge(1), Le(10_000)] = 1
    max_replicas: Annotated[int, Ge(1), Le(10_000)] = 1
    num_cpus: Annotated[float, Ge(0), Le(1024)] = 1.0
    num_gpus: Annotated[float, Ge(0), Le(1024)] = 0.0
    shutdown_timeout_s: Annotated[float, Ge(0), Le(86_400)] = 30.0

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
        yield from HttpConfig._problems(self)
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
