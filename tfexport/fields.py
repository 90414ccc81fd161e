"""Frozen configurations: checked on creation, read from JSON strictly and written to it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Self

from tfexport.errors import ConfigError, raise_all, shortened

# Far above every model there is. What is larger is a slip or an attack: it would fill the memory before it fails.
MAX_LAYERS = MAX_HEADS = 1_000
MAX_SIZE = 10_000_000
MAX_INT = 2**64 - 1


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class Config:
    """What every configuration shares: checked when it is made, read strictly, written plainly.

    A subclass is a frozen dataclass whose fields are given by keyword, without being decorated as one. Its types are
    what is checked first, then what `_problems` says. `subject` is named at the start of the error.
    """

    _subject: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, *, subject: str = "") -> None:
        """Take the name of what is configured; without one that of the class above stays."""
        if subject:
            cls._subject = subject
        # The methods below are those of a frozen dataclass. Compiled for each of forty classes, as dataclass does it,
        # they would be a sixth of what it takes to import all that a first text needs.
        dataclasses.dataclass(kw_only=True, eq=False, repr=False, match_args=False)(cls)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ or name not in self.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def __post_init__(self) -> None:
        """Check each value and how they fit together.

        Raises:
            ConfigError: lists every problem.
        """
        # Values that were not given are right; configurations are made for every request.
        problems = [
            one
            for name, kind, default in _typed(typing.cast(Any, type(self)))
            if (value := getattr(self, name)) is not default
            for one in _type_problems(name, value, kind)
        ]
        raise_all(ConfigError, self._subject, problems or list(self._problems()))

    def _problems(self) -> Iterable[str]:
        """Say what is wrong with values that are of the right types."""
        return ()

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
        raise_all(ConfigError, subject, [problem.removeprefix(f"{subject}: ") for problem in problems])
        return typing.cast(Self, config)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values."""
        return dataclasses.asdict(self)


def size_problems(config: Config, *names: str, least: int = 1) -> list[str]:
    """Say which of the sizes `names` of a configuration are out of range; those that are None are not given."""
    most = {"layers": MAX_LAYERS, **dict.fromkeys(("num_heads", "num_kv_heads", "heads", "kv_heads"), MAX_HEADS)}
    return [
        f"{name} is {shortened(value)}, expected {least} to {most.get(name, MAX_SIZE)}"
        for name in names
        if (value := getattr(config, name)) is not None and not least <= value <= most.get(name, MAX_SIZE)
    ]


def _read(cls: Any, data: object, place: str, problems: list[str]) -> Any:
    """Build `cls` from a JSON object, appending every problem; None when there was one."""
    if not isinstance(data, dict):
        problems.append(f"{place or 'the file'} is {shortened(data)}, expected an object")
        return None
    prefix, before = f"{place}." if place else "", len(problems)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    problems += [f"unknown key {prefix}{key[:80]}" for key in data if key not in fields]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _read_value(data[name], _hints(cls)[name], prefix + name, problems)
        elif field.default is dataclasses.MISSING:
            problems.append(f"missing key {prefix}{name}")
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ConfigError as error:
        text = str(error)
        problems.append(f"{place}: {text.removeprefix(f'{cls._subject}: ')}" if place else text)
        return None


def _read_value(value: object, kind: Any, place: str, problems: list[str]) -> object:
    nested, item = _nested(kind)
    if nested and not (value is None and _test(kind)(None)):
        return _read(nested, value, place, problems)
    if item and isinstance(value, list):
        return tuple(_read(item, part, f"{place}[{index}]", problems) for index, part in enumerate(value))
    try:
        value = _tupled(value)
    except RecursionError:  # such as of a list that holds itself
        problems.append(f"{place} is nested too deeply, expected {_spelled(kind)}")
        return None
    problems += _type_problems(place, value, kind)
    return value


@functools.cache
def _nested(kind: Any) -> tuple[Any, Any]:
    """Return the configuration that a type allows, and the one of which it allows several; None for none."""
    options = _options(kind)
    items = [typing.get_args(option)[0] for option in options if typing.get_origin(option) is tuple]
    one, several = (list(filter(dataclasses.is_dataclass, kinds)) for kinds in (options, items))
    return one[0] if one else None, several[0] if several else None


def _tupled(value: object) -> object:
    """Return what may not change: lists, and lists in them, become tuples."""
    return tuple(map(_tupled, value)) if isinstance(value, list | tuple) else value


def _type_problems(name: str, value: object, kind: Any) -> list[str]:
    if _test(kind)(value):
        return []
    expected = _spelled(kind)
    if isinstance(value, int | float) and not isinstance(value, bool) and float in _options(kind):
        expected = "a finite number"
    elif type(value) is int and int in _options(kind):
        expected = "a whole number of 64 bits"
    elif isinstance(value, tuple) and any(type(one) is int and abs(one) > MAX_INT for one in value):
        expected = "a list of whole numbers of 64 bits"
    return [f"{name} is {shortened(value)}, expected {expected}"]


@functools.cache
def _test(kind: Any) -> Callable[[Any], bool]:
    """Return what says whether a value is of an annotated type; a bool is no number, and a number has to be finite.

    Configurations are made for every call, and taking their types apart takes longer than the tests.
    """
    if len(options := _options(kind)) > 1:
        tests = [_test(option) for option in options]
        return lambda value: any(test(value) for test in tests)
    if typing.get_origin(kind) is tuple:
        item = _test(typing.get_args(kind)[0])
        return lambda value: isinstance(value, tuple) and all(map(item, value))
    if typing.get_origin(kind) is Literal:
        words = typing.get_args(kind)
        return lambda value: any(value.__class__ is word.__class__ and value == word for word in words)
    if kind in (int, float):
        numbers, most = (int, MAX_INT) if kind is int else ((int, float), sys.float_info.max)
        return lambda value: isinstance(value, numbers) and value.__class__ is not bool and abs(value) <= most
    return lambda value: isinstance(value, kind)


def _options(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, and any other type alone."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """Return the types of the fields, as `typing.get_type_hints` does, which compiles the annotation of each."""
    return {
        name: _evaluated(annotation, base.__module__)
        for base in reversed(cls.__mro__)
        for name, annotation in inspect.get_annotations(base).items()
        if not name.startswith("_")
    }


@functools.cache
def _evaluated(annotation: str, module: str) -> Any:
    """Return the type that an annotation of a module says: a few serve most fields."""
    return eval(annotation, vars(sys.modules[module]))  # noqa: S307 - nobody's words but the project's own


@functools.cache
def _typed(cls: Any) -> list[tuple[str, Any, object]]:
    """Return the name, the type and the default of each field."""
    return [(field.name, _hints(cls)[field.name], field.default) for field in dataclasses.fields(cls)]


def _spelled(kind: Any) -> str:
    if len(_options(kind)) > 1:
        return " or ".join(_spelled(option) for option in _options(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(value) for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {_spelled(typing.get_args(kind)[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "null"}
    return words.get(kind, "an object")
