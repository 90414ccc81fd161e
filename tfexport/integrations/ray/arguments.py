"""What an application is built from: the bundles, how they are served, and what each replica takes."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from tfexport.config import Ge, Gt, Le, settings
from tfexport.contract import Device, Form
from tfexport.errors import ConfigError
from tfexport.serve.config import MAX_S, HttpConfig, ServingConfig, named_bundles

SUBJECT = "application"


class Arguments(ServingConfig, HttpConfig, subject=SUBJECT):
    """Arguments of the application: these, those of `ServingConfig`, and those of `HttpConfig`.

    Paths are those of the nodes that replicas run on.

    Attributes:
        bundle: `[NAME=]BUNDLE`, or a list of them; a replica serves them all, each with an engine of its own.
        backend: of `tfexport.load`.
        form: of `tfexport.load`.
        device: "cpu" or "cuda"; None is "cuda" where a replica has a GPU or a part of one.
        engine: of `tfexport.load`.
        threads: of the CPU, for each model; None for what Ray has given to the replica, shared between its models.
        trusted_keys: path of a file of public keys, or a list of them, one of which must have signed each bundle.
        token_file: file with one bearer token a line; None lets everybody ask.
        min_replicas: that there are however little is asked.
        max_replicas: that there are at most; above `min_replicas`, Ray scales between them.
        num_cpus: cores that Ray sets aside for a replica.
        num_gpus: GPUs that Ray sets aside for a replica; 0.5 lets two share one, whose memory Ray does not divide.
        shutdown_timeout_s: seconds in which a replica that has to go finishes what it has accepted.
    """

    bundle: str | tuple[str, ...]
    backend: str = "auto"
    form: Form | None = None
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
        """Read arguments strictly; texts stand for numbers and the like, as a command line gives them.

        Raises:
            ConfigError: lists every one that is unknown, missing or wrong.
        """
        kinds = {setting.name: setting.types for setting in settings(cls)}
        return cls.from_dict(
            {name: _parsed(value, kinds.get(name, ())) for name, value in arguments.items()}, subject=SUBJECT
        )

    @property
    def bundles(self) -> dict[str, Path]:
        """The bundles by the name that they are served under."""
        return named_bundles(_listed(self.bundle))

    @property
    def keys(self) -> tuple[str, ...] | None:
        """The files of public keys; None where no signature is asked for."""
        return None if self.trusted_keys is None else _listed(self.trusted_keys)

    def _problems(self) -> Iterator[str]:
        yield from ServingConfig._problems(self)
        yield from HttpConfig._problems(self)
        if self.max_replicas < self.min_replicas:
            yield f"max_replicas is {self.max_replicas}, below min_replicas {self.min_replicas}; raise it too"
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            yield f"num_gpus is {self.num_gpus}, expected a part of one GPU or whole ones"
        if self.num_gpus and self.device == "cpu":
            yield f"num_gpus is {self.num_gpus} and device cpu, which would leave them idle; leave one of them out"
        if not _listed(self.bundle):
            yield "bundle is empty, expected one or more"
        try:
            named_bundles(_listed(self.bundle))
        except ConfigError as error:
            yield from error.problems


def _listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _parsed(value: object, kinds: tuple[Any, ...]) -> object:
    """Return what a text stands for where something else than a text is wanted, and any other value as it is."""
    if isinstance(value, str) and str not in kinds:
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value
