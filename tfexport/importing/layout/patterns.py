"""Patterns of key names: which checkpoint keys one line of a layout takes, and what they become.

Left of the arrow: `{a,b,c}` is one of several words, `{i}` the index of a
layer, `{2i+1}` one that counts otherwise, `{h}` the index of a head, `{wb}`
weight or bias. Right of it: the k-th list gives the word at the place that the
k-th list on the left had, `{i}` and `{wb}` are those found, and `[q/k/v]` names
the parts of one tensor.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tfexport.errors import ConfigError, raise_all

_TOKEN = re.compile(r"\{([^{}]*)\}|\[([^\[\]]*)\]")
_INDEX = re.compile(r"(\d*)i(?:([+-])(\d+))?")
_NUMBER = "(0|[1-9][0-9]{0,3})"
_WB = ("weight", "bias")
_MAX_NAMES = 10_000


class Match(NamedTuple):
    """Checkpoint keys and the canonical names that they become: one each, one to several parts, or heads to one."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


class Index(NamedTuple):
    """`{2i+1}`: the number in the key is factor · i + offset."""

    factor: int
    offset: int

    def solve(self, number: int) -> int | None:
        """Return the layer of a number, None where it belongs to none."""
        layer, rest = divmod(number - self.offset, self.factor)
        return layer if rest == 0 and layer >= 0 else None


@dataclass(frozen=True)
class Choice:
    """`{a,b,c}`."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """`[q/k/v]`: one tensor is cut into several."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class WeightOrBias:
    """`{wb}`."""


@dataclass(frozen=True)
class Head:
    """`{h}`: one key for each attention head, joined to one tensor."""


Piece = str | Index | Choice | Parts | WeightOrBias | Head


class Found(NamedTuple):
    """What a key is on the right: the names of its parts, mostly one, and its head, where keys are one a head."""

    targets: tuple[str, ...]
    head: int | None


def pieces(text: str) -> tuple[Piece, ...]:
    """Split a pattern into plain text and what stands in brackets.

    Raises:
        ConfigError: a bracket is not closed or holds nothing that is known.
    """
    found: list[Piece] = []
    end = 0
    for token in _TOKEN.finditer(text):
        found.append(text[end : token.start()])
        found.append(_braces(token[1]) if token[1] is not None else Parts(tuple(token[2].split("/"))))
        end = token.end()
    found.append(text[end:])
    if left := {c for piece in found if isinstance(piece, str) for c in piece if c in "{}[] ,"}:
        raise ConfigError(f"{text!r} has {' '.join(map(repr, sorted(left)))} outside of a list; close every bracket")
    return tuple(piece for piece in found if piece != "")


def _braces(inner: str) -> Piece:
    if inner == "wb":
        return WeightOrBias()
    if inner == "h":
        return Head()
    if index := _INDEX.fullmatch(inner):
        factor = int(index[1] or 1)
        if factor == 0:
            raise ConfigError(f"{{{inner}}} counts no layers; expected a factor of 1 or more")
        return Index(factor, int(f"{index[2] or '+'}{index[3] or 0}"))
    return Choice(tuple(word.strip() for word in inner.split(",")))


class Rule:
    """The two sides of one line, checked against each other."""

    def __init__(self, source: str, target: str) -> None:
        """Parse both sides.

        Raises:
            ConfigError: lists everything that does not fit together.
        """
        self._source, self._target = pieces(source), pieces(target)
        raise_all(ConfigError, f"{source} -> {target}", _problems(self._source, self._target))
        self._regex = re.compile("".join(_regex(piece) for piece in self._source))

    @property
    def joins_heads(self) -> bool:
        """Whether keys are one a head."""
        return Head() in self._source

    @property
    def splits(self) -> bool:
        """Whether one tensor becomes several."""
        return any(isinstance(piece, Parts) for piece in self._target)

    def match(self, key: str) -> Found | None:
        """Say what a key becomes, None where the line does not take it."""
        found = self._regex.fullmatch(key)
        if found is None:
            return None
        words: list[str] = []
        layer: int | None = None
        head: int | None = None
        kind = ""
        variable = [piece for piece in self._source if not isinstance(piece, str)]
        for piece, text in zip(variable, found.groups(), strict=True):
            match piece:
                case Index():
                    solved = piece.solve(int(text))
                    if solved is None or layer not in (None, solved):
                        return None
                    layer = solved
                case Head():
                    head = int(text)
                case WeightOrBias():
                    kind = text
                case Choice():
                    words.append(text)
        return Found(self._name(words, layer, kind), head)

    def targets(self) -> set[str]:
        """Return every name that the right side can give for layer 0."""
        names: set[str] = set()
        choices = [piece for piece in self._source if isinstance(piece, Choice)]
        for kind in _WB:
            for picked in _product([choice.words for choice in choices]):
                names |= set(self._name(list(picked), 0, kind))
        return names

    def _name(self, words: list[str], layer: int | None, kind: str) -> tuple[str, ...]:
        choices = [piece for piece in self._source if isinstance(piece, Choice)]
        places = iter([choice.words.index(word) for choice, word in zip(choices, words, strict=True)])
        names = [""]
        for piece in self._target:
            match piece:
                case str():
                    names = [name + piece for name in names]
                case Choice():
                    place = next(places)
                    names = [name + piece.words[place] for name in names]
                case Index():
                    names = [f"{name}{layer}" for name in names]
                case WeightOrBias():
                    names = [name + kind for name in names]
                case Parts():
                    names = [name + part for name in names for part in piece.words]
        return tuple(names)


def _product(lists: list[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    if not lists:
        return [()]
    return [(word, *rest) for word in lists[0] for rest in _product(lists[1:])]


def _regex(piece: Piece) -> str:
    match piece:
        case str():
            return re.escape(piece)
        case Choice():
            return "(" + "|".join(re.escape(word) for word in piece.words) + ")"
        case WeightOrBias():
            return "(weight|bias)"
    return _NUMBER


def _problems(source: tuple[Piece, ...], target: tuple[Piece, ...]) -> list[str]:
    problems = []
    left = [piece for piece in source if isinstance(piece, Choice)]
    right = [piece for piece in target if isinstance(piece, Choice)]
    if len(left) != len(right):
        problems.append(f"{len(left)} lists on the left and {len(right)} on the right, expected as many")
    for one, other in zip(left, right, strict=False):
        if len(one.words) != len(other.words):
            problems.append(f"{{{','.join(one.words)}}} and {{{','.join(other.words)}}} differ in length")
    problems += [
        f"{{{','.join(one.words)}}} names a word twice" for one in left if len(set(one.words)) < len(one.words)
    ]
    problems += [
        f"{name} is on the {'left' if on_left else 'right'} only"
        for name, kind in (("{i}", Index), ("{wb}", WeightOrBias))
        if (on_left := any(isinstance(p, kind) for p in source)) != any(isinstance(p, kind) for p in target)
    ]
    if any(isinstance(piece, Index) and piece != Index(1, 0) for piece in target):
        problems.append("the right counts layers with {i} alone")
    if math.prod(len(choice.words) for choice in left) > _MAX_NAMES:
        problems.append(f"its lists give more than {_MAX_NAMES} names")
    if Head() in target:
        problems.append("{h} stands on the left only, where it joins the heads")
    if any(isinstance(piece, Parts) for piece in source):
        problems.append("[…/…] stands on the right only, where it cuts a tensor")
    if sum(isinstance(piece, Parts) for piece in target) > 1 or source.count(Head()) > 1:
        problems.append("[…/…] and {h} may stand once")
    return problems


@functools.lru_cache(maxsize=4096)
def rule(source: str, target: str) -> Rule:
    """Return the rule of a line; the same object for the same text.

    Raises:
        ConfigError: a side is malformed or both do not fit together.
    """
    return Rule(source, target)


def matches(rule: Rule, keys: Iterable[str]) -> list[Match]:
    """Return what a line takes of `keys`, in their order; keys that are one a head belong together."""
    found: list[Match] = []
    heads: dict[tuple[str, ...], dict[int, str]] = {}
    for key in keys:
        if one := rule.match(key):
            if one.head is None:
                found.append(Match((key,), one.targets))
            else:
                heads.setdefault(one.targets, {})[one.head] = key
    return found + [Match(tuple(by[head] for head in sorted(by)), targets) for targets, by in heads.items()]
