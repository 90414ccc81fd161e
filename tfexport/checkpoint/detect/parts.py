"""The parts of a foreign state dict: layers by their indices, and each module's weight with its bias."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tfexport.checkpoint.detect import words

Shape = tuple[int, ...]
_INDEX = re.compile(r"\d+")
# An attention has at least two matrices, fused, and so has a feed-forward network.
_LEAST_MATRICES = 4
# A layer may have a key that its siblings lack, such as the first, which holds a relative bias for all.
_MOST_EXTRAS = 2


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

    @property
    def name(self) -> str:
        """The path as one text."""
        return ".".join(self.path)

    @property
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
    rest, found = dict(shapes), list[Layers]()
    for prefix in () if scattered else _prefixes(rest):
        layers = _layers(prefix, [prefix], rest)
        if layers is not None and len(layers.matrices) >= _LEAST_MATRICES:
            found.append(layers)
            rest = _without(rest, [prefix])
    for prefixes in _scattered(rest) if scattered else ():
        layers = _layers(_parent(prefixes), prefixes, rest)
        if layers is not None and len(layers.matrices) >= _LEAST_MATRICES:
            found.append(layers)
            rest = _without(rest, prefixes)
    return found, rest


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


def _prefixes(keys: Iterable[str]) -> list[str]:
    """List everything that stands before a number, the shortest first."""
    found = {key[: match.start()] for key in keys for match in _INDEX.finditer(key)}
    return sorted(found, key=lambda prefix: (len(prefix), prefix))


def _without(shapes: Mapping[str, Shape], prefixes: Iterable[str]) -> dict[str, Shape]:
    return {key: shape for key, shape in shapes.items() if not any(_is_below(key, prefix) for prefix in prefixes)}


def _is_below(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and key[len(prefix) : len(prefix) + 1].isdigit()


def _parent(prefixes: Sequence[str]) -> str:
    """Return the components that all prefixes begin with, with their dot."""
    components = [prefix.split(".")[:-1] for prefix in prefixes]
    return "".join(f"{component}." for component in components[0][: words.common(components)])


def _elements(prefix: str, shapes: Mapping[str, Shape]) -> dict[int, dict[str, Shape]]:
    elements: dict[int, dict[str, Shape]] = defaultdict(dict)
    for key, shape in shapes.items():
        match = _INDEX.match(key, len(prefix)) if key.startswith(prefix) else None
        if match:
            elements[int(match[0])][key[match.end() :]] = shape
    return elements


def _layers(parent: str, prefixes: list[str], shapes: Mapping[str, Shape]) -> Layers | None:
    """Read lists that count the same layers; None when their elements differ or numbers are missing."""
    order = {key: place for place, key in enumerate(shapes)}
    every: dict[str, Shape] = {}
    places: dict[str, int] = {}
    extras: list[str] = []
    counts = set()
    for prefix in prefixes:
        elements = _elements(prefix, shapes)
        start, number = min(elements, default=0), len(elements)
        if not elements or start > 1 or sorted(elements) != list(range(start, start + number)):
            return None
        period = _period(elements, start)
        if period is None:
            return None
        counts.add(number // period)
        for residue in range(period):
            common = _common(elements, start + residue, period)
            for rest, shape in common.items():
                template = f"{prefix}{_affine(period, start + residue)}{rest}"
                every[template], places[template] = shape, order[f"{prefix}{start + residue}{rest}"]
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


def _period(elements: Mapping[int, Mapping[str, Shape]], start: int) -> int | None:
    """Return after how many elements the same one comes again: 2 where attention and feed-forward alternate."""
    number = len(elements)
    for period in range(1, number // 2 + 1) if number > 1 else (1,):
        if number % period == 0 and all(
            len(elements[i]) <= len(_common(elements, start + (i - start) % period, period)) + _MOST_EXTRAS
            and _common(elements, start + (i - start) % period, period)
            for i in elements
        ):
            return period
    return None


def _common(elements: Mapping[int, Mapping[str, Shape]], first: int, period: int) -> dict[str, Shape]:
    others = [elements[index] for index in range(first, first + len(elements), period) if index in elements]
    return {rest: shape for rest, shape in others[0].items() if all(o.get(rest) == shape for o in others)}


def _affine(factor: int, offset: int) -> str:
    return "{" + ("" if factor == 1 else str(factor)) + "i" + (f"+{offset}" if offset else "") + "}"


def _scattered(shapes: Mapping[str, Shape]) -> list[list[str]]:
    """Group lists that count the same layers of one side: attentions.{i}, norms.{i}, ffns.{i}."""
    groups: dict[tuple[str | None, int], list[str]] = defaultdict(list)
    rest = dict(shapes)
    # A number that is a whole component counts more likely than one in a name.
    for prefix in sorted(_prefixes(shapes), key=lambda prefix: not prefix.endswith(".")):
        layers = _layers(prefix, [prefix], rest)
        if layers is not None:
            groups[words.side(prefix), layers.count].append(prefix)
            rest = _without(rest, [prefix])
    return list(groups.values())
