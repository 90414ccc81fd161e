"""Arithmetic in layout files: numbers, sizes by name, + - * / ** and sqrt, and nothing else."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping

from tfexport.errors import ConfigError, shortened

_MAX_LENGTH = 200
# Names that layouts were once written with, still read.
_FORMER = {"n_heads": "num_heads"}
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    # math.pow works in float64: it overflows at once where ** on whole numbers would fill the memory.
    ast.Pow: math.pow,
}


def names_in(text: str) -> set[str]:
    """Return the names that an expression uses.

    Raises:
        ConfigError: it is no expression of this language.
    """
    return {node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name)} - {"sqrt"}


def evaluate(text: str, names: Mapping[str, float]) -> float:
    """Compute an expression such as `sqrt(d_model)` or `d_model ** -0.5`.

    Args:
        text: at most 200 characters.
        names: value of each name that may stand in it.

    Raises:
        ConfigError: it is no expression of this language, uses an unknown name or has no finite real value.
    """
    try:
        value = _value(_parse(text), names)
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(f"{text!r} has no value: {error}; expected a finite number") from error
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is {value}, expected a finite number")
    return value


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> ast.expr:
    if len(text) > _MAX_LENGTH:
        raise ConfigError(f"{shortened(text)} has {len(text)} characters, the limit is {_MAX_LENGTH}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{text!r} is no arithmetic, expected numbers, sizes, + - * / ** and sqrt(…)") from error
    _check(tree, text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = _FORMER.get(node.id, node.id)
    return tree


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return
        case ast.Name():
            return
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            _check(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _check(left, text)
            _check(right, text)
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument], keywords=[]):
            _check(argument, text)
        case _:
            found = ast.unparse(node)
            raise ConfigError(f"{text!r} has {shortened(found)}, expected numbers, sizes, + - * / ** and sqrt(…)")


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            if name not in names:
                raise ConfigError(f"{name!r} is no known size, expected one of {', '.join(sorted(names))}")
            return float(names[name])
        case ast.UnaryOp(op=op, operand=operand):
            return -_value(operand, names) if isinstance(op, ast.USub) else _value(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, names), _value(right, names))
        case ast.Call(args=[argument]):
            return math.sqrt(_value(argument, names))
    raise AssertionError("checked before")
