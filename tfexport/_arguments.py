"""Validate and normalize arguments of the public API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from numbers import Integral
from typing import Any, TypeGuard

from tfexport.errors import InputError, raise_all, shortened

# Iterables that are not accepted as lists: a text yields characters, and a set has no order.
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)
ID_LISTS = "lists of token ids"


def as_list(value: object) -> list[Any] | None:
    """Convert an ordered iterable or 1-D array to a list; None if it is neither."""
    if isinstance(value, _NO_LISTS) or not isinstance(value, Iterable):
        return None
    array: Any = value
    if not hasattr(value, "ndim") or not hasattr(value, "tolist"):
        return list(value)
    return list(array.tolist()) if array.ndim == 1 else None


def listed(subject: str, name: str, value: object, kind: str) -> list[Any]:
    values = as_list(value)
    if values is None:
        raise InputError(f"{subject}: {name} is {shortened(value)}, expected a list of {kind}")
    return values


def listed_ids(subject: str, name: str, value: object) -> list[Any]:
    values = listed(subject, name, value, ID_LISTS)
    if values and all(map(is_whole, values)):
        raise InputError(f"{subject}: {name} is {shortened(values)}, expected a list of {ID_LISTS}; write [ids]")
    return values


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_one_of(value: object, allowed: Iterable[str | None]) -> bool:
    """Return whether a value is allowed; works for values that cannot be compared."""
    return (value is None or isinstance(value, str)) and value in allowed


def check_call(
    subject: str, *, batch_size: object = 1, on_progress: object = None, cancel: object = None, **flags: object
) -> None:
    """Check arguments that many calls have, or raise `InputError` with all problems."""
    problems = []
    if not (is_whole(batch_size) and batch_size >= 1):
        problems.append(f"batch_size is {shortened(batch_size)}, expected 1 or more")
    if on_progress is not None and not callable(on_progress):
        problems.append(f"on_progress is {shortened(on_progress)}, expected a function or None")
    if cancel is not None and not hasattr(type(cancel), "is_set"):
        problems.append(f"cancel is {shortened(cancel)}, expected a threading.Event or None")
    wrong = {name: flag for name, flag in flags.items() if not isinstance(flag, bool)}
    problems += [f"{name} is {shortened(flag)}, expected True or False" for name, flag in wrong.items()]
    raise_all(InputError, subject, problems)


def word_problems(**words: tuple[object, tuple[str | None, ...]]) -> list[str]:
    """List the arguments, given as name=(value, allowed), whose value is not allowed."""
    return [
        f"{name} is {shortened(value)}, expected one of {', '.join(map(repr, allowed))}"
        for name, (value, allowed) in words.items()
        if not is_one_of(value, allowed)
    ]
