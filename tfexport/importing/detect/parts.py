"""The parts of a foreign state dict: layers by their indices, and each module's weight with its bias."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tfexport.importing.detect import words

Shape = tuple[int, ...]
# Those of a list by number, each with its shapes by what stands behind the number.
Elements = dict[int, dict[str, Shape]]
# As in the patterns of layouts: at most four digits, the first of them no 0.
_INDEX = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,3})(?![0-9])")
# An attention has at least two matrices, fused, and so has a feed-forward network.
_LEAST_MATRICES = 4
# A side that shares its list with the other one has as many layers; one would be no list.
_LEAST_LAYERS = 2
# A layer may have a key that its siblings lack, such as the first, which holds a relative bias for all.
_MOST_EXTRAS = 2
# Numbers that one key is looked through for; of layers, sublayers and heads.
_MOST_NUMBERS = 8


@dataclass(frozen=True)
class Part:
    """One module: a matrix or a gain, with its bias.

    `weight` and `bias` are keys; inside a layer their index is written "{i}",
    "{2i+1}" and so on. `path` are the components of the module's name, from the
    layer on. `shape` is that of the weight, or of the bias where there is no weight.
    `place` is the place among its siblings.
    """

    path: tuple[str, ...]
    shape: Shape
    weight: str | None
    bias: str | None
    bias_size: int | None = None
    place: int = 0

    @cached_property
    def name(self) -> str:
        """The path as one text."""
        return ".".join(self.path)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words of the path; indices of layers say nothing."""
        return words.words(re.sub(r"\{.*?\}", "", self.name))

    @property
    def keys(self) -> list[str]:
        """Its keys."""
        return [key for key in (self.weight, self.bias) if key is not None]

    @property
    def is_matrix(self) -> bool:
        """Whether the weight has two axes longer than 1, as a linear map, or three, one of them for heads."""
        return self.weight is not None and sum(size > 1 for size in self.shape) in (2, 3)

    @property
    def is_vector(self) -> bool:
        """Whether it is a gain, a bias or both: what a norm has."""
        return sum(size > 1 for size in self.shape) <= 1


@dataclass(frozen=True)
class Layers:
    """A list of equal layers."""

    prefix: str
    count: int
    parts: tuple[Part, ...]
    extras: tuple[str, ...]

    @property
    def matrices(self) -> list[Part]:
        """Its linear maps."""
        return [part for part in self.parts if part.is_matrix]


def split(shapes: Mapping[str, Shape], *, scattered: bool = False) -> tuple[list[Layers], dict[str, Shape]]:
    """Find the lists of layers.

    Args:
        shapes: of every tensor, by key.
        scattered: whether sublayers lie in lists of their own, attentions.{i} beside networks.{i}.

    Returns:
        The lists, and the keys that are in none.
    """
    keys, found = _Numbered(shapes), list[Layers]()
    for prefixes in _scattered(shapes) if scattered else ([prefix] for prefix in keys.prefixes()):
        layers = _layers(_parent(prefixes) if scattered else prefixes[0], prefixes, keys)
        lists = [layers] if layers is not None else [] if scattered else _halves(prefixes[0], keys)
        if lists and all(len(one.matrices) >= _LEAST_MATRICES for one in lists):
            found += lists
            keys.take(prefixes)
    return found, keys.rest


class _Numbered:
    """Keys by what stands before a number in them, so that each list is looked up and not searched for."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        """Sort the keys; `rest` are those that no list has taken, `order` is that of the state dict."""
        self.rest = dict(shapes)
        self.order = {key: place for place, key in enumerate(shapes)}
        self._elements: dict[str, Elements] = {}
        for key, shape in shapes.items():
            for match in itertools.islice(_INDEX.finditer(key), _MOST_NUMBERS):
                elements = self._elements.setdefault(key[: match.start()], {})
                elements.setdefault(int(match[0]), {})[key[match.end() :]] = shape

    def prefixes(self) -> list[str]:
        """List everything that stands before a number, the shortest first."""
        return sorted(self._elements, key=lambda prefix: (len(prefix), prefix))

    def elements(self, prefix: str) -> Elements:
        """Return what is left of a list."""
        left: Elements = {}
        for index, element in self._elements[prefix].items():
            if kept := {end: shape for end, shape in element.items() if f"{prefix}{index}{end}" in self.rest}:
                left[index] = kept
        return left

    def take(self, prefixes: Iterable[str]) -> None:
        """Take whole lists out of the rest."""
        for prefix in prefixes:
            for index, element in self._elements[prefix].items():
                for end in element:
                    self.rest.pop(f"{prefix}{index}{end}", None)


def parts_of(shapes: Mapping[str, Shape], prefix: str = "") -> list[Part]:
    """Join weights and biases; `prefix` is left out of the paths.

    The order is that of the state dict, in which its author defined the modules,
    unless a file has sorted the names: then numbers count, and nothing else.
    """
    modules: dict[tuple[str, str, bool], dict[str, str]] = {}
    for (parent, base), found in _modules(shapes).items():
        # W1, b1 and gain1, shift1 are two modules, alpha and bias are one.
        is_one = len({kind for kind, _ in found}) == len(found)
        for kind, key in found:
            is_gain = not is_one and bool(words.GAIN & set(words.words(key.rpartition(".")[2])))
            modules.setdefault((parent, base, is_gain), {})[kind] = key
    parts: list[Part] = []
    for (parent, base, _), keys in modules.items():
        weight, bias = keys.get("weight"), keys.get("bias")
        path = [*parent.removeprefix(prefix).split("."), base.replace(" ", "_")]
        shape = shapes[weight or bias or ""]
        bias_size = math.prod(shapes[bias]) if bias else None
        parts.append(Part(tuple(component for component in path if component), shape, weight, bias, bias_size))
    if list(shapes) == sorted(shapes):
        parts.sort(key=lambda part: words.natural(part.name))
    return [replace(part, place=place) for place, part in enumerate(parts)]


def _modules(keys: Iterable[str]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Group keys by what they belong to, as "weight" or "bias"."""
    modules: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for key in keys:
        parent, _, leaf = key.rpartition(".")
        base, kind = words.field(leaf)
        modules[parent, base].append((kind or "weight", key))
    return modules


def _parent(prefixes: Sequence[str]) -> str:
    """Return the components that all prefixes begin with, with their dot."""
    components = [prefix.split(".")[:-1] for prefix in prefixes]
    return "".join(f"{component}." for component in components[0][: words.common(components)])


def _layers(parent: str, prefixes: Sequence[str], keys: _Numbered) -> Layers | None:
    """Read lists that count the same layers; None when their elements differ or numbers are missing."""
    every: dict[str, Shape] = {}
    places: dict[str, int] = {}
    extras: list[str] = []
    counts = set()
    for prefix in prefixes:
        elements = keys.elements(prefix)
        start, number = min(elements, default=0), len(elements)
        if not elements or start > 1 or max(elements) != start + number - 1:
            return None
        commons = _period(elements, start)
        if not commons:
            return None
        period = len(commons)
        counts.add(number // period)
        for residue, common in enumerate(commons):
            for rest, shape in common.items():
                template = f"{prefix}{_affine(period, start + residue)}{rest}"
                every[template], places[template] = shape, keys.order[f"{prefix}{start + residue}{rest}"]
            extras += [
                f"{prefix}{index}{rest}"
                for index in range(start + residue, start + number, period)
                for rest in elements[index]
                if rest not in common
            ]
    if len(counts) != 1:
        return None
    ordered = {template: every[template] for template in sorted(every, key=places.__getitem__)}
    return Layers(parent, counts.pop(), tuple(parts_of(ordered, parent)), tuple(extras))


def _halves(prefix: str, keys: _Numbered) -> list[Layers]:
    """Read a list that holds the layers of both sides, one side behind the other; nothing where it does not.

    The keys of the first side count up to a layer, `{i<6}`, those of the second from it, `{i+6}`.
    """
    elements = keys.elements(prefix)
    number = len(elements)
    if sorted(elements) != list(range(number)):
        return []
    cut = next((i for i in range(number) if elements[i].keys() != elements[0].keys()), number)
    if cut < _LEAST_LAYERS or number - cut < _LEAST_LAYERS:
        return []
    sides = (range(cut), f"{{i<{cut}}}"), (range(cut, number), _affine(1, cut))
    if any(elements[i] != elements[side[0]] for side, _ in sides for i in side):
        return []
    found = []
    for side, index in sides:
        places = {f"{prefix}{index}{rest}": keys.order[f"{prefix}{side[0]}{rest}"] for rest in elements[side[0]]}
        shapes = {f"{prefix}{index}{rest}": shape for rest, shape in elements[side[0]].items()}
        ordered = {template: shapes[template] for template in sorted(shapes, key=places.__getitem__)}
        found.append(Layers(prefix, len(side), tuple(parts_of(ordered, prefix)), ()))
    return found


def _period(elements: Elements, start: int) -> list[dict[str, Shape]]:
    """Find after how many elements the same one comes again: 2 where attention and feed-forward alternate.

    Returns:
        What the elements of each turn have in common; nothing where none comes again.
    """
    number = len(elements)
    for period in range(1, number // 2 + 1) if number > 1 else (1,):
        if number % period:
            continue
        turns = [[elements[i] for i in range(start + residue, start + number, period)] for residue in range(period)]
        commons = [_common(turn) for turn in turns]
        if all(
            common and all(len(element) <= len(common) + _MOST_EXTRAS for element in turn)
            for turn, common in zip(turns, commons, strict=True)
        ):
            return commons
    return []


def _common(elements: Sequence[Mapping[str, Shape]]) -> dict[str, Shape]:
    """Return what all elements have."""
    return {end: shape for end, shape in elements[0].items() if all(other.get(end) == shape for other in elements)}


def _affine(factor: int, offset: int) -> str:
    return "{" + ("" if factor == 1 else str(factor)) + "i" + (f"+{offset}" if offset else "") + "}"


def _scattered(shapes: Mapping[str, Shape]) -> list[list[str]]:
    """Group lists that count the same layers of one side: attentions.{i}, norms.{i}, ffns.{i}."""
    groups: dict[tuple[str | None, int], list[str]] = defaultdict(list)
    keys = _Numbered(shapes)
    # A number that is a whole component counts more likely than one in a name.
    for prefix in sorted(keys.prefixes(), key=lambda prefix: not prefix.endswith(".")):
        layers = _layers(prefix, [prefix], keys)
        if layers is not None:
            groups[words.side(prefix), layers.count].append(prefix)
            keys.take([prefix])
    return list(groups.values())
