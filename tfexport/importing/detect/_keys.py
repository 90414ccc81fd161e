"""Read the keys of a state dict: words, modules and lists of layers."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

Shape = tuple[int, ...]
# Elements of a numbered list by index: shapes by the rest of the key.
Elements = dict[int, dict[str, Shape]]
INDEX = re.compile(r"\{.*?\}")
# As in layout patterns: at most four digits, and no leading 0.
_LIST_INDEX = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,3})(?![0-9])")
_MIN_MATRICES = 4  # two of attention, if fused, and two of a feed-forward network
_MIN_LAYERS = 2  # of a side if one list holds both sides
# A layer may have keys that others lack: the first one often holds a relative bias for all.
_MAX_EXTRAS = 2
_MAX_NUMBERS = 8  # indices in a key: of layers, sublayers and heads

# Words in names, and what they usually mean.
_ENCODER = frozenset("enc encoder encoders encode encoding src source input inputs inp".split())
_DECODER = frozenset("dec decoder decoders decode decoding tgt trg target targets output outputs outp".split())
CROSS = frozenset(
    "cross enc encoder encdec src source mem memory context ctx inter interact co xattn crossattn".split()
)
SELF = frozenset("self slf masked causal tgt trg target dec decoder selfattn intra".split())
ATTENTION = frozenset("attn attention att mha mhsa multihead head heads attentions selfattn crossattn xattn".split())
FEED_FORWARD = frozenset(
    "ffn ff ffw feed forward feedforward mlp pwff pff positionwise pointwise intermediate ann fcn dense fc1 fc2".split()
)
EMBEDDING = frozenset("emb embs embed embeds embedding embeddings embedder lut wte shared".split())
POSITION = frozenset("pos position positions positional pe wpe posenc posemb postional".split())
ROTARY = frozenset("rotary rope freqs freq inv".split())
OUTPUT = frozenset("out output generator proj projection head lm logits classifier prj unembed fc linear dense".split())
NORM = frozenset({*"norm norms ln layernorm rms rmsnorm lnorm normalization".split(), "normalisation"})
FINAL = frozenset("final last f post top".split())
GATE = frozenset("gate gated gating".split())
_WEIGHT = frozenset("weight weights w kernel gamma alpha gain scale g a".split())
_BIAS = frozenset("bias biases b beta shift offset".split())
# Names of gains and shifts, which belong to norms if matrices next to them have weights and biases.
_GAIN = frozenset("gamma alpha gain scale g a beta shift offset".split())
# Matches similar words of other languages too: encodeur, enkoder.
_ENCODES, _DECODES = re.compile(r"en[ck]od(?!.*de[ck]od)"), re.compile(r"de[ck]od")
_ROLES = {
    "q": re.compile(r"(w?q|qs|qw|.*quer(y|ies))"),
    "k": re.compile(r"(w?k|ks|kw|.*keys?)"),
    "v": re.compile(r"(w?v|vs|vw|vals?|.*values?)"),
    "o": re.compile(r"(w?o|out|output|outputs|.*concat|final|combine|merge|unify.*|outproj)"),
    "kv": re.compile(r"(to|w)?kv"),
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words(name: str) -> tuple[str, ...]:
    """Split a name into words: "W_q.selfAttn1" gives w, q, self, attn, 1."""
    return tuple(word.lower() for word in _WORD.findall(name))


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that puts 2 before 10, and {3i} before {3i+1}."""
    plain = re.sub(r"\{\d*i\+?(\d*)\}", lambda found: found[1] or "0", name)
    # Split long numbers, because Python does not parse more than a few thousand digits.
    return tuple((1, int(piece)) if i % 2 else (0, piece) for i, piece in enumerate(re.split(r"(\d{1,18})", plain)))


def side(name: str) -> str | None:
    """Return the side that the first unambiguous component names, or None."""
    for component in name.split("."):
        found = words(component)
        is_decoder = bool(_DECODER.intersection(found)) or any(_DECODES.match(word) for word in found)
        is_encoder = bool(_ENCODER.intersection(found)) or any(_ENCODES.match(word) for word in found)
        if is_encoder != is_decoder:
            return "enc" if is_encoder else "dec"
    return None


def common(names: Iterable[Sequence[str]]) -> int:
    """Count the leading components that all names share."""
    return sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*names, strict=False)))


def leaf_field(key: str) -> tuple[str, str]:
    """Split the last component of a key: "in_proj_bias" gives ("in proj", "bias")."""
    found = list(words(key.rpartition(".")[2]))
    for position in (-1, 0):
        if found and found[position] in _WEIGHT | _BIAS:
            kind = "weight" if found.pop(position) in _WEIGHT else "bias"
            return " ".join(found), kind
    return " ".join(found), ""


def is_bare(key: str) -> bool:
    """Return whether a key is a bare parameter, which may be stored [in, out]."""
    return key.rpartition(".")[2] not in ("weight", "in_proj_weight")


def fused_order(found: Iterable[str]) -> str | None:
    """Return the order of q, k and v in a word such as "kqv", or None."""
    return next((word[-3:] for word in found if sorted(word[-3:]) == ["k", "q", "v"]), None)


def attention_role(found: Sequence[str]) -> str | None:
    """Return the projection that the last matching word names, or None."""
    if {"q", "k", "v"} <= set(found) or tuple(found[-2:]) == ("in", "proj"):
        return "qkv"
    if {"k", "v"} <= set(found):
        return "kv"
    for word in reversed(found):
        if fused_order([word]):
            return "qkv"
        for role, pattern in _ROLES.items():
            if pattern.fullmatch(word):
                return role
    return None


@dataclass(frozen=True)
class Part:
    """A matrix or a gain with its bias."""

    path: tuple[str, ...]  # with layer indices as "{i}", "{2i+1}" and so on
    shape: Shape  # of the bias, if there is no weight
    weight: str | None
    bias: str | None
    bias_size: int | None = None
    place: int = 0  # number of modules before this one

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @cached_property
    def words(self) -> tuple[str, ...]:
        return words(INDEX.sub("", self.name))

    def about(self, vocabulary: frozenset[str]) -> bool:
        return bool(vocabulary.intersection(self.words))

    @property
    def keys(self) -> list[str]:
        return [key for key in (self.weight, self.bias) if key is not None]

    @property
    def is_matrix(self) -> bool:
        # There may be a third axis for heads.
        return self.weight is not None and sum(size > 1 for size in self.shape) in (2, 3)

    @property
    def is_vector(self) -> bool:
        return sum(size > 1 for size in self.shape) <= 1

    def lines(self, target: str, *ops: str, bias_ops: Sequence[str] | None = None) -> tuple[str, ...]:
        kinds = ((self.weight, "weight", ops), (self.bias, "bias", ops if bias_ops is None else bias_ops))
        return tuple(" |> ".join((f"{key} -> {target}.{kind}", *own)) for key, kind, own in kinds if key is not None)

    def norm_lines(self, target: str) -> tuple[str, ...]:
        # A single number applies to every column.
        return self.lines(target, *(["expand"] if max(self.shape, default=1) == 1 else []))


@dataclass(frozen=True)
class Layers:
    """A list of equal layers; `extras` are keys that only some of them have."""

    prefix: str
    count: int
    parts: tuple[Part, ...]
    extras: tuple[str, ...] = ()

    @property
    def num_matrices(self) -> int:
        return sum(part.is_matrix for part in self.parts)


class _Numbered:
    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes, self.rest = shapes, dict(shapes)
        self.order = {key: place for place, key in enumerate(shapes)}
        self._elements: dict[str, Elements] = defaultdict(lambda: defaultdict(dict))
        for key, shape in shapes.items():
            for match in itertools.islice(_LIST_INDEX.finditer(key), _MAX_NUMBERS):
                self._elements[key[: match.start()]][int(match[0])][key[match.end() :]] = shape

    def prefixes(self) -> list[str]:
        return sorted(self._elements, key=lambda prefix: (len(prefix), prefix))

    def elements(self, prefix: str) -> Elements:
        # Without the keys that another list has taken.
        found = {
            index: {end: shape for end, shape in element.items() if f"{prefix}{index}{end}" in self.rest}
            for index, element in self._elements[prefix].items()
        }
        return {index: element for index, element in found.items() if element}

    def take(self, prefixes: Iterable[str]) -> None:
        for prefix in prefixes:
            for index, element in self._elements[prefix].items():
                for end in element:
                    self.rest.pop(f"{prefix}{index}{end}", None)

    def parts(self, templates: Mapping[str, str], prefix: str) -> tuple[Part, ...]:
        # In the order of the keys that the templates stand for.
        ordered = sorted(templates.items(), key=lambda pair: self.order[pair[1]])
        return tuple(parts_of({template: self.shapes[key] for template, key in ordered}, prefix))


def split(shapes: Mapping[str, Shape], *, scattered: bool = False) -> tuple[list[Layers], dict[str, Shape]]:
    """Split a state dict into lists of layers and other keys.

    If `scattered` is True, sublayers have their own lists, such as attentions.{i} and networks.{i}.
    """
    keys, found = _Numbered(shapes), list[Layers]()
    for prefixes in _scattered(shapes) if scattered else ([prefix] for prefix in keys.prefixes()):
        layers = _layers(prefixes, keys)
        lists = [layers] if layers is not None else [] if scattered else _halves(prefixes[0], keys)
        if lists and all(one.num_matrices >= _MIN_MATRICES for one in lists):
            found += lists
            keys.take(prefixes)
    return found, keys.rest


def _scattered(shapes: Mapping[str, Shape]) -> list[list[str]]:
    # The lists of one side, such as attentions.{i} and norms.{i}, have the same count.
    groups: dict[tuple[str | None, int], list[str]] = defaultdict(list)
    keys = _Numbered(shapes)
    # A number that is a whole component is more likely an index than one inside a name.
    for prefix in sorted(keys.prefixes(), key=lambda prefix: not prefix.endswith(".")):
        layers = _layers([prefix], keys)
        if layers is not None:
            groups[side(prefix), layers.count].append(prefix)
            keys.take([prefix])
    return list(groups.values())


def parts_of(shapes: Mapping[str, Shape], prefix: str = "") -> list[Part]:
    """Join weights and biases to modules, without `prefix` in their paths."""
    owners: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for key in shapes:
        base, kind = leaf_field(key)
        owners[key.rpartition(".")[0], base].append((kind or "weight", key))
    modules: dict[tuple[str, str, bool], dict[str, str]] = defaultdict(dict)
    for (parent, base), found in owners.items():
        # W1, b1 and gain1, shift1 are two modules; alpha and bias are one.
        is_one = len({kind for kind, _ in found}) == len(found)
        for kind, key in found:
            is_gain = not is_one and bool(_GAIN.intersection(words(key.rpartition(".")[2])))
            modules[parent, base, is_gain][kind] = key
    parts: list[Part] = []
    for (parent, base, _), keys in modules.items():
        weight, bias = keys.get("weight"), keys.get("bias")
        path = (*parent.removeprefix(prefix).split("."), base.replace(" ", "_"))
        bias_size = math.prod(shapes[bias]) if bias else None
        parts.append(Part(tuple(filter(None, path)), shapes[weight or bias or ""], weight, bias, bias_size))
    if list(shapes) == sorted(shapes):  # numbers decide; otherwise the order of the state dict
        parts.sort(key=lambda part: natural(part.name))
    return [replace(part, place=place) for place, part in enumerate(parts)]


def _layers(prefixes: Sequence[str], keys: _Numbered) -> Layers | None:
    parent = prefixes[0]
    if len(prefixes) > 1:
        components = [prefix.split(".")[:-1] for prefix in prefixes]
        parent = "".join(f"{component}." for component in components[0][: common(components)])
    templates, extras, counts = dict[str, str](), list[str](), set[int]()
    for prefix in prefixes:
        elements = keys.elements(prefix)
        start, number = min(elements, default=0), len(elements)
        if not elements or start > 1 or max(elements) != start + number - 1:
            return None
        commons = _period(elements, start)
        if not commons:
            return None
        counts.add(number // len(commons))
        for residue, shared in enumerate(commons, start):
            index = _affine(len(commons), residue)
            templates |= {f"{prefix}{index}{end}": f"{prefix}{residue}{end}" for end in shared}
            members = range(residue, start + number, len(commons))
            extras += [f"{prefix}{i}{end}" for i in members for end in elements[i] if end not in shared]
    return Layers(parent, counts.pop(), keys.parts(templates, parent), tuple(extras)) if len(counts) == 1 else None


def _halves(prefix: str, keys: _Numbered) -> list[Layers]:
    """Read a list that holds the layers of both sides, one side after the other.

    Indices of the first side are written `{i<6}`, those of the second `{i+6}`. The result is empty for other lists.
    """
    elements = keys.elements(prefix)
    number = len(elements)
    if sorted(elements) != list(range(number)):
        return []
    cut = next((i for i in range(number) if elements[i].keys() != elements[0].keys()), number)
    if cut < _MIN_LAYERS or number - cut < _MIN_LAYERS:
        return []
    found = []
    for members, index in ((range(cut), f"{{i<{cut}}}"), (range(cut, number), _affine(1, cut))):
        first = elements[members[0]]
        if any(elements[i] != first for i in members):
            return []
        templates = {f"{prefix}{index}{end}": f"{prefix}{members[0]}{end}" for end in first}
        found.append(Layers(prefix, len(members), keys.parts(templates, prefix)))
    return found


def _period(elements: Elements, start: int) -> list[dict[str, Shape]]:
    # The period is 2 if attention and feed-forward network alternate.
    number = len(elements)
    for period in range(1, number // 2 + 1) if number > 1 else (1,):
        if number % period == 0:
            turns = [[elements[i] for i in range(start + turn, start + number, period)] for turn in range(period)]
            commons = [
                {end: shape for end, shape in first.items() if all(other.get(end) == shape for other in others)}
                for first, *others in turns
            ]
            if all(
                shared and all(len(element) <= len(shared) + _MAX_EXTRAS for element in turn)
                for turn, shared in zip(turns, commons, strict=True)
            ):
                return commons
    return []


def _affine(factor: int, offset: int) -> str:
    return "{" + ("" if factor == 1 else str(factor)) + "i" + (f"+{offset}" if offset else "") + "}"
