"""Frozen configurations: checked on creation, read from JSON strictly and written to it."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from typing import Any, Literal, Self

from tfexport.errors import ConfigError, raise_all, shortened

# Far above every model there is. What is larger is a slip or an attack: it would fill the memory before it fails.
MAX_LAYERS = MAX_HEADS = 1_000
MAX_SIZE = 10_000_000


def _type_problem(name: str, value: object, kind: Any) -> str | None:
    """Say what is wrong with `value` for the annotated type `kind`, or None."""
    for option in _options(kind):
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option) and not isinstance(value, bool):
                return None
        elif option is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return (
                    None
                    if abs(value) <= sys.float_info.max
                    else f"{name} is {shortened(value)}, expected a finite number"
                )
        elif option is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return None
        elif typing.get_origin(option) is tuple:
            item = typing.get_args(option)[0]
            if isinstance(value, tuple) and not any(_type_problem(name, v, item) for v in value):
                return None
        elif isinstance(value, option):
            return None
    return f"{name} is {shortened(value)}, expected {_spell(kind)}"


def size_problems(config: Config, *names: str, least: int = 1) -> list[str]:
    """Say which of the sizes `names` of a configuration are out of range; those that are None are not given."""
    most = {"layers": MAX_LAYERS, "num_heads": MAX_HEADS, "heads": MAX_HEADS}
    return [
        f"{name} is {shortened(value)}, expected {least} to {most.get(name, MAX_SIZE)}"
        for name in names
        if (value := getattr(config, name)) is not None and not least <= value <= most.get(name, MAX_SIZE)
    ]


def _options(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, and any other type alone."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _spell(kind: Any) -> str:
    if len(_options(kind)) > 1:
        return " or ".join(_spell(option) for option in _options(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(value) for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {_spell(typing.get_args(kind)[0])}"
    if kind is types.NoneType:
        return "null"
    return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}.get(
        kind.__name__, "an object"
    )


def _read(cls: type, data: object, prefix: str, problems: list[str]) -> Any:
    """Build `cls` from a JSON object, appending every problem; None when there was one."""
    if not isinstance(data, dict):
        problems.append(f"{prefix.rstrip('.') or 'the file'} is {shortened(data)}, expected an object")
        return None
    hints = _hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    before = len(problems)
    problems += [f"unknown key {prefix}{key[:80]}" for key in data if key not in fields]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in data:
            if field.default is dataclasses.MISSING:
                problems.append(f"missing key {prefix}{name}")
            continue
        value, kind = data[name], hints[name]
        options = _options(kind)
        nested = [option for option in options if dataclasses.is_dataclass(option)]
        if nested and not (value is None and types.NoneType in options):
            values[name] = _read(typing.cast(type, nested[0]), value, f"{prefix}{name}.", problems)
            continue
        if isinstance(value, list):
            value = tuple(value)
        problem = _type_problem(prefix + name, value, kind)
        if problem:
            problems.append(problem)
        values[name] = value
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ConfigError as error:
        problems.append(str(error))
        return None


class Config:
    """What every configuration shares: strict reading, plain writing."""

    @classmethod
    def from_dict(cls, data: object, *, subject: str = "config.json") -> Self:
        """Read a configuration strictly.

        Args:
            data: a decoded JSON object.
            subject: named at the start of the error.

        Raises:
            ConfigError: lists every unknown, missing, wrongly typed and contradictory value.
        """
        problems: list[str] = []
        config = _read(cls, data, "", problems)
        raise_all(ConfigError, subject, problems)
        return typing.cast(Self, config)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values."""
        return dataclasses.asdict(typing.cast(Any, self))

    def _check_types(self) -> list[str]:
        hints = _hints(typing.cast(Any, type(self)))
        found = (
            _type_problem(name, getattr(self, name), kind) for name, kind in hints.items() if not name.startswith("_")
        )
        return [problem for problem in found if problem]
