"""Frozen configurations that declare type, bounds, default and help of settings.

    class Example(Config, subject="example"):
        size: Annotated[int, Ge(1), Le(64), Help("Rows of a batch.")] = 8

The constructor checks the values, `from_dict` reads JSON strictly, `to_dict` returns JSON values, and `settings`
describes the fields for command lines and schemas. Errors begin with the subject. Modules that declare configurations
evaluate annotations at once, because that makes their import faster.
"""

import dataclasses
import functools
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from tfexport.errors import ConfigError, raise_all, shortened

# Far above every existing model. A larger value is a mistake or an attack, and would exhaust the memory.
MAX_LAYERS = MAX_HEADS = 1_000
MAX_SIZE = 10_000_000
MAX_INT = 2**64 - 1


@dataclass(frozen=True)
class Bound:
    """A limit of a number, or of each number of a list; None is always within it."""

    limit: float


class Ge(Bound):
    """At least the limit."""


class Gt(Bound):
    """Above the limit."""


class Le(Bound):
    """At most the limit."""


class Lt(Bound):
    """Below the limit."""


_COMPARE = {Ge: operator.ge, Gt: operator.gt, Le: operator.le, Lt: operator.lt}


@dataclass(frozen=True)
class Match:
    """A pattern for a text, or each text of a list; `expected` describes it in errors."""

    pattern: str
    expected: str


@dataclass(frozen=True)
class Help:
    """What a setting does, in one sentence for users."""

    text: str


Size = Annotated[int, Ge(1), Le(MAX_SIZE)]
SizeOrZero = Annotated[int, Ge(0), Le(MAX_SIZE)]
Layers = Annotated[int, Ge(1), Le(MAX_LAYERS)]
Heads = Annotated[int, Ge(1), Le(MAX_HEADS)]
Count = Annotated[int, Ge(0)]
TokenId = Annotated[int, Ge(0)]
Sha256 = Annotated[str, Match("[0-9a-f]{64}", "64 hexadecimal digits")]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a configuration; `types` are the unannotated members of its union."""

    name: str
    types: tuple[Any, ...]
    bounds: tuple[Bound, ...]
    default: Any
    help: str


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class Config:
    """Base class of configurations, which makes subclasses frozen dataclasses."""

    _subject: ClassVar[str]
    _former: ClassVar[Mapping[str, str]] = {}
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, *, subject: str = "", former: Mapping[str, str] | None = None) -> None:
        """Make the subclass a dataclass; without a subject it inherits its parent's.

        `former` maps earlier names of fields, which the constructor and `from_dict` still take, to those of today.
        """
        if subject:
            cls._subject = subject
        dataclass(frozen=True, kw_only=True)(cls)
        if former:
            cls._former, create = former, cls.__init__
            renamed = functools.wraps(create)(lambda self, **values: create(self, **_renamed(values, former)))
            cls.__init__ = renamed  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        values = [  # defaults are valid, and skipping them saves time in every request
            (name, value, kind)
            for name, kind, default in _fields(typing.cast(Any, type(self)))
            if (value := getattr(self, name)) is not default
        ]
        problems = [problem for value in values for problem in _type_problems(*value)]
        if not problems:
            bounds = [problem for value in values for problem in _bound_problems(*value)]
            problems = list(dict.fromkeys([*bounds, *self._problems()]))
        raise_all(ConfigError, self._subject, problems)

    def _problems(self) -> Iterable[str]:
        """Return problems of values that have the right types but may be out of bounds."""
        return ()

    @classmethod
    def _upgraded(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Convert an object of an earlier version, or raise `ConfigError`."""
        return data

    @classmethod
    def from_dict(cls, data: object, *, subject: str = "config.json") -> Self:
        """Convert decoded JSON strictly; raises the errors of `read_as`."""
        return typing.cast(Self, read_as(cls, data, subject=subject))

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values."""
        return dataclasses.asdict(self)


def read_as(kind: Any, data: object, *, subject: str, place: str = "") -> Any:
    """Convert decoded JSON at the key `place`; raise one error for all problems."""
    problems: list[str] = []
    value = _read_value(data, kind, place, problems)
    raise_all(ConfigError, subject, problems or _bound_problems(place, value, kind))
    return value


def settings(cls: Any) -> list[Setting]:
    """Describe the fields of a configuration in their order."""
    found = []
    for name, kind, default in _fields(cls):
        bounds = tuple(mark for mark in _marks(kind) if isinstance(mark, Bound))
        text = next((mark.text for mark in _marks(kind) if isinstance(mark, Help)), "")
        found.append(Setting(name=name, types=options_of(kind), bounds=bounds, default=default, help=text))
    return found


def _read_object(cls: Any, data: object, place: str, problems: list[str]) -> Any:
    """Build a dataclass from a JSON object; append problems, and return None if any."""
    if not isinstance(data, dict):
        problems.append(f"{place or 'the file'} is {shortened(data)}, expected an object")
        return None
    prefix, before = f"{place}." if place else "", len(problems)
    try:
        data = cls._upgraded(_renamed(data, cls._former)) if issubclass(cls, Config) else data
        fields = _fields(cls)
        known = {name for name, _, _ in fields}
        problems += [f"unknown key {prefix}{key[:80]}" for key in data if key not in known]
        values: dict[str, Any] = {}
        for name, kind, default in fields:
            if name in data:
                values[name] = _read_value(data[name], kind, prefix + name, problems)
            elif default is dataclasses.MISSING:
                problems.append(f"missing key {prefix}{name}")
        return cls(**values) if len(problems) == before else None
    except ConfigError as error:
        problems += [f"{place}: {error.reason}"] if place else error.problems
        return None


def _read_value(value: object, kind: Any, place: str, problems: list[str]) -> Any:
    options = options_of(kind)
    for option in () if value is None and types.NoneType in options else options:
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if dataclasses.is_dataclass(option):
            return _read_object(option, value, place, problems)
        if origin is Mapping and isinstance(value, dict):
            return {key: _read_value(one, arguments[1], f"{place}.{key[:80]}", problems) for key, one in value.items()}
        if origin is tuple and isinstance(value, list):
            item = _unmarked(arguments[0])
            if dataclasses.is_dataclass(item) or typing.get_origin(item) is Mapping:
                return tuple(_read_value(one, item, f"{place}[{i}]", problems) for i, one in enumerate(value))
    if Any in options:
        return value
    try:
        value = _tupled(value) if any(typing.get_origin(option) is tuple for option in options) else value
    except RecursionError:  # for example, a list that contains itself
        problems.append(f"{place} is nested too deeply, expected {_spelled(kind)}")
        return None
    problems += _type_problems(place, value, kind)
    return value


def _tupled(value: object) -> object:
    return tuple(map(_tupled, value)) if isinstance(value, list | tuple) else value


def _renamed(values: Mapping[str, Any], former: Mapping[str, str]) -> dict[str, Any]:
    return {former.get(name, name): value for name, value in values.items()}


def _type_problems(place: str, value: Any, kind: Any) -> list[str]:
    return [] if _test(kind)(value) else [f"{place} is {shortened(value)}, expected {_expected(value, kind)}"]


def _bound_problems(place: str, value: Any, kind: Any) -> list[str]:
    return [f"{place}{where} {shortened(part)}, expected {text}" for where, part, text in _violations(value, kind)]


def _expected(value: object, kind: Any) -> str:
    options = options_of(kind)
    if isinstance(value, int | float) and not isinstance(value, bool) and float in options:
        return "a finite number"
    if type(value) is int and int in options:
        return "a whole number of 64 bits"
    if isinstance(value, tuple) and any(type(one) is int and abs(one) > MAX_INT for one in value):
        return "a list of whole numbers of 64 bits"
    return _spelled(kind)


@functools.cache
def _test(kind: Any) -> Callable[[Any], bool]:
    # Cached, because configurations are created in every call, and analyzing types takes longer than the tests.
    kind = _unmarked(kind)
    if len(options := _options(kind)) > 1:
        tests = [_test(option) for option in options]
        return lambda value: any(test(value) for test in tests)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        item = _test(arguments[0])
        return lambda value: isinstance(value, tuple) and all(map(item, value))
    if origin is Mapping:
        item = _test(arguments[1])
        return lambda value: (
            isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and all(map(item, value.values()))
        )
    if origin is Literal:
        return lambda value: any(value.__class__ is word.__class__ and value == word for word in arguments)
    if kind in (int, float):
        numbers, most = (int, MAX_INT) if kind is int else ((int, float), sys.float_info.max)
        return lambda value: isinstance(value, numbers) and value.__class__ is not bool and abs(value) <= most
    return (lambda value: True) if kind is Any else (lambda value: isinstance(value, kind))


def _violations(value: Any, kind: Any, marks: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any, str]]:
    """Yield place, value and expectation of every part that is out of bounds."""
    if value is None or not (marks or _has_marks(kind)):
        return
    marks = (*marks, *getattr(kind, "__metadata__", ()))
    option = next(option for option in _options(kind) if _test(option)(value))
    if option is not kind and option is not _unmarked(kind):
        yield from _violations(value, option, marks)
    elif typing.get_origin(option) is tuple:
        item = typing.get_args(option)[0]
        yield from ((" has", part, text) for one in value for _, part, text in _violations(one, item, marks))
    elif typing.get_origin(option) is Mapping:
        item = typing.get_args(option)[1]
        for key, one in value.items():
            yield from ((f".{key[:80]}{where}", part, text) for where, part, text in _violations(one, item, marks))
    else:
        bounds = [mark for mark in marks if isinstance(mark, Bound)]
        if type(value) in (int, float) and not all(_COMPARE[type(bound)](value, bound.limit) for bound in bounds):
            yield " is", value, _range(bounds)
        for mark in marks:
            if isinstance(mark, Match) and not re.fullmatch(mark.pattern, value):
                yield " is", value, mark.expected


def _range(bounds: Iterable[Bound]) -> str:
    """Format bounds, such as "1 to 64" or "above 0 and up to 1"."""
    limits = {type(bound): bound.limit for bound in bounds}
    if set(limits) == {Ge, Le}:
        return f"{limits[Ge]} to {limits[Le]}"
    texts = {Ge: "{} or more", Gt: "above {}", Le: "up to {}" if len(limits) > 1 else "at most {}", Lt: "below {}"}
    return " and ".join(text.format(limits[kind]) for kind, text in texts.items() if kind in limits)


def options_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself, without annotations."""
    return tuple(map(_unmarked, _options(kind)))


@functools.cache
def _fields(cls: Any) -> list[tuple[str, Any, Any]]:
    """Return name, annotated type and default, or MISSING, of each field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        found.append((field.name, hints[field.name], default))
    return found


def _options(kind: Any) -> tuple[Any, ...]:
    kind = _unmarked(kind)
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def _unmarked(kind: Any) -> Any:
    return kind.__origin__ if typing.get_origin(kind) is Annotated else kind


def _marks(kind: Any) -> Iterator[Any]:
    yield from getattr(kind, "__metadata__", ())
    if typing.get_origin(kind := _unmarked(kind)) is not Literal:
        for part in typing.get_args(kind):
            yield from _marks(part)


@functools.cache
def _has_marks(kind: Any) -> bool:
    return any(isinstance(mark, Bound | Match) for mark in _marks(kind))


def _spelled(kind: Any) -> str:
    if len(_options(kind)) > 1:
        return " or ".join(_spelled(option) for option in _options(kind))
    kind = _unmarked(kind)
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(value) for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {_spelled(typing.get_args(kind)[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "null"}
    return names.get(kind, "an object")
