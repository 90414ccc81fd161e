"""What callers give in Python: taken as lists once, and told from what only looks like it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from numbers import Integral
from typing import Any, TypeGuard

from tfexport.errors import InputError, raise_all, shortened

# These can be iterated over, and are no lists: of a text come characters, of a set something in no order.
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)
ID_LISTS = "lists of token ids"


def as_list(given: object) -> list[Any] | None:
    """Take what can be iterated over in an order as a list; it is iterated over once.

    Args:
        given: a list, a tuple, a range, a generator, an array of NumPy or a tensor with one dimension, …

    Returns:
        What it holds, of an array as Python's own numbers; None for what is no list: a text, bytes, a set, a mapping,
        an array with more or fewer dimensions, whose rows may be padded.
    """
    if isinstance(given, _NO_LISTS) or not isinstance(given, Iterable):
        return None
    dimensions, tolist = getattr(given, "ndim", None), getattr(given, "tolist", None)
    if dimensions is None or tolist is None:
        return list(given)
    found: list[Any] | None = tolist() if dimensions == 1 else None
    return found


def listed(subject: str, name: str, given: object, kind: str) -> list[Any]:
    """Take what a call is about as a list; see `as_list`.

    Args:
        subject: named at the start of the error.
        name: of the argument.
        given: for it.
        kind: of what it holds, in words.

    Raises:
        InputError: it is no list.
    """
    found = as_list(given)
    if found is None:
        raise InputError(f"{subject}: {name} is {shortened(given)}, expected a list of {kind}")
    return found


def listed_ids(subject: str, name: str, given: object) -> list[Any]:
    """Take lists of token ids, one a text, as a list; whether each is one is asked next.

    Args:
        subject: named at the start of the error.
        name: of the argument.
        given: for it.

    Raises:
        InputError: it is no list, or one of ids and not of lists.
    """
    found = listed(subject, name, given, ID_LISTS)
    if found and all(map(is_whole, found)):
        raise InputError(f"{subject}: {name} is {shortened(found)}, expected a list of lists of token ids; write [ids]")
    return found


def is_whole(value: object) -> TypeGuard[int]:
    """Say whether a value is a whole number, of Python or of NumPy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_one_of(value: object, allowed: Iterable[str | None]) -> bool:
    """Say whether a value of any kind is one of some words, or None where that is among them."""
    return (value is None or isinstance(value, str)) and value in allowed


def check_call(
    subject: str, *, batch_size: object = 1, on_progress: object = None, cancel: object = None, **flags: object
) -> None:
    """Check the arguments that many calls have; each has to be given only where there is one.

    Args:
        subject: named at the start of the error.
        batch_size: a whole number, 1 or more.
        on_progress: what can be called, or None.
        cancel: what has `is_set`, as a `threading.Event`, or None.
        flags: by their names; True or False.

    Raises:
        InputError: lists every one that is something else.
    """
    problems = []
    if not (is_whole(batch_size) and batch_size >= 1):
        problems.append(f"batch_size is {shortened(batch_size)}, expected 1 or more")
    if on_progress is not None and not callable(on_progress):
        problems.append(f"on_progress is {shortened(on_progress)}, expected a function or None")
    if cancel is not None and not hasattr(type(cancel), "is_set"):
        problems.append(f"cancel is {shortened(cancel)}, expected a threading.Event or None")
    problems += [
        f"{name} is {shortened(flag)}, expected True or False"
        for name, flag in flags.items()
        if not isinstance(flag, bool)
    ]
    raise_all(InputError, subject, problems)


def word_problems(**words: tuple[object, tuple[str | None, ...]]) -> list[str]:
    """Say which arguments that take one of some words are something else.

    Args:
        words: what was given, and what is allowed, by name.
    """
    return [
        f"{name} is {shortened(value)}, expected one of {', '.join(map(repr, allowed))}"
        for name, (value, allowed) in words.items()
        if not is_one_of(value, allowed)
    ]
