"""Parse the lines of a layout (docs/reference/layouts.md)."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from tfexport.errors import ConfigError, raise_all, shortened

_MAX_LENGTH, _MAX_NAMES = 200, 10_000
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    # math.pow overflows at once, but ** on large integers would fill the memory.
    ast.Pow: math.pow,
}
_LANGUAGE = "numbers, sizes, + - * / ** and sqrt(…)"
Names = Mapping[str, float]


def names_in(text: str) -> frozenset[str]:
    """Return the names that an expression uses."""
    return _parse(text)[1]


def evaluate(text: str, names: Names) -> float:
    """Compute an expression such as `sqrt(d_model)` or `d_model ** -0.5`."""
    compute, used = _parse(text)
    if unknown := sorted(used - names.keys()):
        raise ConfigError(f"{unknown[0]!r} is not a known size, expected one of {', '.join(sorted(names))}")
    try:
        value = compute(names)
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(f"{text!r} has no value: {error}; expected a finite number") from error
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is {value}, expected a finite number")
    return value


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[Callable[[Names], float], frozenset[str]]:
    if len(text) > _MAX_LENGTH:
        raise ConfigError(f"{shortened(text)} has {len(text)} characters, the limit is {_MAX_LENGTH}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{text!r} is not an expression, expected {_LANGUAGE}") from error
    used: set[str] = set()
    return _compiled(tree, text, used), frozenset(used)


def _compiled(node: ast.expr, text: str, used: set[str]) -> Callable[[Names], float]:
    match node:
        case ast.Constant(value=constant) if type(constant) in (int, float):
            number = float(constant)  # type: ignore[arg-type]
            return lambda names: number
        case ast.Name(id=name):
            used.add(name)
            return lambda names: float(names[name])
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            value, factor = _compiled(inner, text, used), -1 if isinstance(sign, ast.USub) else 1
            return lambda names: factor * value(names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            one, other, compute = _compiled(left, text, used), _compiled(right, text, used), _BINARY[type(op)]
            return lambda names: compute(one(names), other(names))
        case ast.Call(func=ast.Name(id="sqrt"), args=[inner], keywords=[]):
            value = _compiled(inner, text, used)
            return lambda names: math.sqrt(value(names))
    raise ConfigError(f"{text!r} has {shortened(ast.unparse(node))}, expected {_LANGUAGE}")


class Match(NamedTuple):
    """Checkpoint keys, several if they are joined, and their canonical names."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


class _Piece(NamedTuple):
    kind: Literal["text", "list", "parts", "i", "wb", "h"]
    words: tuple[str, ...] = ()
    factor: int = 1
    offset: int = 0

    @property
    def regex(self) -> str:
        if self.kind == "text":
            return re.escape(self.words[0])
        return f"({'|'.join(map(re.escape, self.words))})" if self.words else "(0|[1-9][0-9]{0,3})"


_BRACES = {"wb": _Piece("wb", ("weight", "bias")), "h": _Piece("h")}


def _pieces(text: str) -> tuple[_Piece, ...]:
    found: list[_Piece] = []
    end = 0
    for token in re.finditer(r"\{([^{}]*)\}|\[([^\[\]]*)\]", text):
        found.append(_Piece("text", (text[end : token.start()],)))
        found.append(_braces(token[1]) if token[1] is not None else _Piece("parts", tuple(token[2].split("/"))))
        end = token.end()
    found.append(_Piece("text", (text[end:],)))
    if left := {c for piece in found if piece.kind == "text" for c in piece.words[0] if c in "{}[] ,"}:
        raise ConfigError(f"{text!r} has {' '.join(map(repr, sorted(left)))} outside of a list; close every bracket")
    return tuple(found)


def _braces(inner: str) -> _Piece:
    if inner in _BRACES:
        return _BRACES[inner]
    if index := re.fullmatch(r"(\d*)i(?:([+-])(\d+))?", inner):
        if int(index[1] or 1) == 0:
            raise ConfigError(f"{{{inner}}} counts no layers; expected a factor of 1 or more")
        return _Piece("i", factor=int(index[1] or 1), offset=int(f"{index[2] or '+'}{index[3] or 0}"))
    if "|" in inner:
        return _Piece("h", tuple(inner.split("|")))
    return _Piece("list", tuple(word.strip() for word in inner.split(",")))


class Rule:
    """The two sides of a line, checked against each other."""

    def __init__(self, source: str, target: str) -> None:
        left, self._target = _pieces(source), _pieces(target)
        raise_all(ConfigError, f"{source} -> {target}", _problems(left, self._target))
        self._regex = re.compile("".join(piece.regex for piece in left))
        self._variable = [piece for piece in left if piece.kind != "text"]
        self.joins = any(piece.kind == "h" for piece in left)
        self.joins_heads = _BRACES["h"] in left
        self.splits = any(piece.kind == "parts" for piece in self._target)

    def match(self, key: str) -> tuple[tuple[str, ...], int | None] | None:
        """Return the canonical names of a key and its place in a join, or None."""
        found = self._regex.fullmatch(key)
        if found is None:
            return None
        places: list[int] = []
        values: dict[str, str] = {}
        for piece, text in zip(self._variable, found.groups(), strict=True):
            if piece.kind == "list":
                places.append(piece.words.index(text))
                continue
            value = text
            if piece.kind == "i":
                layer, rest = divmod(int(text) - piece.offset, piece.factor)
                if rest or layer < 0:
                    return None
                value = str(layer)
            elif piece.kind == "h" and piece.words:
                value = str(piece.words.index(text))
            if values.setdefault(piece.kind, value) != value:
                return None
        return self._names(places, values), int(values["h"]) if self.joins else None

    def targets(self) -> set[str]:
        """Return every name that the right side can produce for layer 0."""
        lists = (range(len(piece.words)) for piece in self._variable if piece.kind == "list")
        kinds = [{"i": "0", "wb": kind} for kind in ("weight", "bias")]
        return {name for places in itertools.product(*lists) for kind in kinds for name in self._names(places, kind)}

    def _names(self, places: Sequence[int], values: Mapping[str, str]) -> tuple[str, ...]:
        names, left = [""], iter(places)
        for piece in self._target:
            ends = piece.words
            if piece.kind == "list":
                ends = (piece.words[next(left)],)
            elif piece.kind in ("i", "wb"):
                ends = (values[piece.kind],)
            names = [name + end for name in names for end in ends]
        return tuple(names)


def _problems(source: Sequence[_Piece], target: Sequence[_Piece]) -> list[str]:
    left, right = ([piece.words for piece in side if piece.kind == "list"] for side in (source, target))
    kinds = [[piece.kind for piece in side] for side in (source, target)]
    problems = [
        f"{{{','.join(one)}}} and {{{','.join(other)}}} differ in length"
        for one, other in zip(left, right, strict=False)
        if len(one) != len(other)
    ]
    if len(left) != len(right):
        problems.append(f"{len(left)} lists on the left and {len(right)} on the right, expected the same number")
    problems += [f"{{{','.join(one)}}} names a word twice" for one in left if len(set(one)) < len(one)]
    for kind in ("i", "wb"):
        if (kind in kinds[0]) != (kind in kinds[1]):
            problems.append(f"{{{kind}}} is on the {'left' if kind in kinds[0] else 'right'} only")
    checks = {
        "the right side counts layers only with {i}": any(p.kind == "i" and p != _Piece("i") for p in target),
        f"its lists give more than {_MAX_NAMES} names": math.prod(map(len, left)) > _MAX_NAMES,
        "{h} and {a|b} may be on the left only, where they join tensors": "h" in kinds[1],
        "[…/…] may be on the right only, where it cuts a tensor": "parts" in kinds[0],
        "[…/…], and {h} or {a|b}, may be there only once": kinds[1].count("parts") > 1 or kinds[0].count("h") > 1,
    }
    return problems + [problem for problem, is_wrong in checks.items() if is_wrong]


def matches(rule: Rule, keys: Iterable[str]) -> list[Match]:
    """Return the matches of a line in key order; keys that are joined are grouped."""
    found: list[Match] = []
    joined: dict[tuple[str, ...], dict[int, str]] = {}
    for key in keys:
        if one := rule.match(key):
            targets, place = one
            if place is None:
                found.append(Match((key,), targets))
            else:
                joined.setdefault(targets, {})[place] = key
    return found + [Match(tuple(by[place] for place in sorted(by)), targets) for targets, by in joined.items()]
