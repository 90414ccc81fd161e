"""Find the layers of a state dict and the role of each module, by name and shape."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tfexport.nn.switches import Value

Shape = tuple[int, ...]
# Costs of readings; the lowest cost comes first.
LIKELY, POSSIBLE, FAR = 0, 1, 3
# Elements of a numbered list by index: shapes by the rest of the key.
Elements = dict[int, dict[str, Shape]]
_INDEX = re.compile(r"\{.*?\}")
# As in layout patterns: at most four digits, and no leading 0.
_LIST_INDEX = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,3})(?![0-9])")
# Attention has at least two matrices (if fused), and a feed-forward network too.
_MIN_MATRICES = 4
# Minimum number of layers of a side if one list holds both sides.
_MIN_LAYERS = 2
# A layer may have keys that others lack: the first one often holds a relative bias for all.
_MAX_EXTRAS = 2
# Maximum number of indices in a key: of layers, sublayers and heads.
_MAX_NUMBERS = 8
# Maximum number of unused norms in a layer; if there are more, the used ones cannot be identified.
_MAX_DEAD_NORMS = 2
# Maximum number of modules of a transformer layer after joining heads.
_MAX_PARTS = 100

# Words in names, and what they usually mean.

ENCODER = frozenset("enc encoder encoders encode encoding src source input inputs inp".split())
DECODER = frozenset("dec decoder decoders decode decoding tgt trg target targets output outputs outp".split())
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
NORM = frozenset("norm norms ln layernorm rms rmsnorm lnorm normalization normalisation".split())
FINAL = frozenset("final last f post top".split())
_GATE = frozenset("gate gated gating".split())
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
    # Python does not parse numbers of more than a few thousand digits.
    return tuple((1, int(piece)) if i % 2 else (0, piece) for i, piece in enumerate(re.split(r"(\d{1,18})", plain)))


def side(name: str) -> str | None:
    """Return the side that the first unambiguous component names, or None."""
    for component in name.split("."):
        found = words(component)
        is_decoder = bool(DECODER.intersection(found)) or any(_DECODES.match(word) for word in found)
        is_encoder = bool(ENCODER.intersection(found)) or any(_ENCODES.match(word) for word in found)
        if is_encoder != is_decoder:
            return "enc" if is_encoder else "dec"
    return None


def common(names: Iterable[Sequence[str]]) -> int:
    """Count the leading components that all names share."""
    return sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*names, strict=False)))


def leaf_field(key: str) -> tuple[str, str]:
    """Split the last component of a key into owner and "weight", "bias" or "".

    "in_proj_bias" gives ("in proj", "bias"), "W_q" gives ("q", "weight"), and "gamma" gives ("", "weight").
    """
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


# Modules and lists of layers.


@dataclass(frozen=True)
class Part:
    """A matrix or a gain with its bias; without a weight, the bias has `shape`.

    Layer indices in `path` are written "{i}", "{2i+1}" and so on. `place` counts the modules before this one.
    """

    path: tuple[str, ...]
    shape: Shape
    weight: str | None
    bias: str | None
    bias_size: int | None = None
    place: int = 0

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @cached_property
    def words(self) -> tuple[str, ...]:
        return words(_INDEX.sub("", self.name))

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
        """Map weight and bias to a canonical module; `bias_ops` defaults to `ops`."""
        kinds = ((self.weight, "weight", ops), (self.bias, "bias", ops if bias_ops is None else bias_ops))
        return tuple(" |> ".join((f"{key} -> {target}.{kind}", *of)) for key, kind, of in kinds if key is not None)

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
        self.rest = dict(shapes)
        self.order = {key: place for place, key in enumerate(shapes)}
        self._elements: dict[str, Elements] = {}
        for key, shape in shapes.items():
            for match in itertools.islice(_LIST_INDEX.finditer(key), _MAX_NUMBERS):
                elements = self._elements.setdefault(key[: match.start()], {})
                elements.setdefault(int(match[0]), {})[key[match.end() :]] = shape

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
    """Join weights and biases to modules; `prefix` is left out of their paths.

    The order is that of the state dict, in which its author defined the modules. If the names are sorted, numbers
    decide.
    """
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
    if list(shapes) == sorted(shapes):
        parts.sort(key=lambda part: natural(part.name))
    return [replace(part, place=place) for place, part in enumerate(parts)]


def _in_order(found: Mapping[str, tuple[int, Shape]], prefix: str) -> tuple[Part, ...]:
    return tuple(parts_of({key: shape for key, (_, shape) in sorted(found.items(), key=lambda kv: kv[1][0])}, prefix))


def _layers(prefixes: Sequence[str], keys: _Numbered) -> Layers | None:
    parent = prefixes[0]
    if len(prefixes) > 1:
        components = [prefix.split(".")[:-1] for prefix in prefixes]
        parent = "".join(f"{component}." for component in components[0][: common(components)])
    found: dict[str, tuple[int, Shape]] = {}
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
        counts.add(number // len(commons))
        for residue, shared in enumerate(commons, start):
            for end, shape in shared.items():
                template = f"{prefix}{_affine(len(commons), residue)}{end}"
                found[template] = keys.order[f"{prefix}{residue}{end}"], shape
            members = range(residue, start + number, len(commons))
            extras += [f"{prefix}{index}{end}" for index in members for end in elements[index] if end not in shared]
    return Layers(parent, counts.pop(), _in_order(found, parent), tuple(extras)) if len(counts) == 1 else None


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
        places = {
            f"{prefix}{index}{end}": (keys.order[f"{prefix}{members[0]}{end}"], shape) for end, shape in first.items()
        }
        found.append(Layers(prefix, len(members), _in_order(places, prefix)))
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


# Roles of the modules of a layer.


@dataclass(frozen=True)
class Reading:
    """One way to read some modules: lines, ignored keys, switches and cost."""

    lines: tuple[str, ...] = ()
    cost: float = LIKELY
    ignored: tuple[str, ...] = ()
    arch: Mapping[str, Value] = field(default_factory=dict)


Choice = tuple[Reading, ...]


def unread(parts: Sequence[Part]) -> Reading:
    """Return the reading that ignores modules."""
    return Reading((), POSSIBLE * len(parts), tuple(key for part in parts for key in part.keys))


@dataclass(frozen=True)
class Style:
    """Conventions of one author, such as whether bare parameters are stored [in, out].

    `order` and `cut` are those of fused projections. `reading` numbers the readings of projections without clear names.
    """

    bare_is_in_out: bool
    order: str
    cut: str = "split_rows"
    reading: int = 0
    cost: float = LIKELY


@dataclass(frozen=True)
class Layer:
    """Choices of a layer, and the number of ways to tell its projections apart."""

    choices: tuple[Choice, ...]
    num_readings: int
    is_fused: bool


@dataclass(frozen=True)
class _Matrix:
    # A linear map [out, width], and the folds that make it from the stored tensor.
    part: Part
    out: int
    width: int
    ops: tuple[str, ...]
    bias_ops: tuple[str, ...] | None = None

    def lines(self, target: str, *more: str) -> tuple[str, ...]:
        bias_ops = None if self.bias_ops is None else (*self.bias_ops, *more)
        return self.part.lines(target, *self.ops, *more, bias_ops=bias_ops)

    @property
    def role(self) -> str | None:
        # A square matrix in "qkv_nets" is not a fused projection.
        role = attention_role(self.part.words)
        return None if role in ("qkv", "kv") and self.out == self.width else role


@dataclass(frozen=True)
class _Attention:
    maps: Sequence[_Matrix]
    norms: dict[str, Part] = field(default_factory=dict)  # of queries and keys, by role

    @property
    def arch(self) -> dict[str, Value]:
        rows = {m.role: m.out for m in self.maps}
        is_all = all(max(part.shape) == rows.get(role) for role, part in self.norms.items())
        return {"qk_norm": "all" if is_all else "head"} if self.norms else {}


def read_layer(parts: Sequence[Part], d_model: int, side: str, style: Style) -> Layer | None:
    """Read the modules of a layer; None if attention or network are missing."""
    parts = _joined_heads(parts)
    if len(parts) > _MAX_PARTS:
        return None
    is_indexed = any(re.search(r"\{\d*i[+<}]", key) for part in parts for key in part.keys)
    layer = f"{side}.layers.{'{i}' if is_indexed else '0'}"
    maps = [_matrix(part, d_model, style) for part in parts if part.is_matrix]
    network = _network(maps, d_model)
    groups = _grouped([found for found in maps if found not in network])
    if not network or not groups:
        return None
    attentions, vectors = _attentions(groups, [part for part in parts if part.is_vector])
    choices = (
        _network_choice(network, d_model, f"{layer}.ffn"),
        _attention_choice(attentions, d_model, layer, style),
        _norm_choice(vectors, [*groups, network], layer),
    )
    return Layer(choices, max(len(_roles(group)) for group in groups), any(len(group) < 4 for group in groups))


def _matrix(part: Part, d_model: int, style: Style) -> _Matrix:
    # A bias has the size of the output. Without a bias, modules store [out, in], and the style decides for bare
    # parameters. The first axis may count heads.
    sizes = [size for size in part.shape if size > 1]
    if len(sizes) == 3:  # [heads, d_model, d_k] or [heads, d_k, d_model]; the output has the other order
        is_output = attention_role(part.words) == "o"
        turned = ("transpose",) if (sizes[2 if is_output else 1] == d_model) != is_output else ()
        inner = math.prod(sizes) // d_model
        if is_output:
            return _Matrix(part, d_model, inner, (*turned, "flatten", "transpose"), ("flatten",))
        return _Matrix(part, inner, d_model, (*turned, "flatten"), ("flatten",))
    rows, columns = sizes
    in_out = style.bare_is_in_out and part.weight is not None and is_bare(part.weight)
    if part.bias_size in (rows, columns) and rows != columns:
        in_out = part.bias_size == columns
    given = (("{h}" in part.name, "join_rows"), (len(part.shape) > 2, "squeeze"), (in_out, "transpose"))
    out, width = (columns, rows) if in_out else (rows, columns)
    return _Matrix(part, out, width, tuple(op for is_needed, op in given if is_needed))


def _attentions(groups: Sequence[Sequence[_Matrix]], vectors: Sequence[Part]) -> tuple[list[_Attention], list[Part]]:
    attentions = [_Attention(group) for group in groups]
    for part in vectors:
        role = attention_role(part.words)
        place = 0 if len(groups) == 1 else _place(part, groups)
        if part.weight is not None and part.about(NORM) and role in ("q", "k") and place is not None:
            attentions[place].norms.setdefault(role, part)
    for attention in attentions:
        if len(attention.norms) < 2:  # a norm of only queries is the norm of the sublayer, before them
            attention.norms.clear()
    taken = {part for attention in attentions for part in attention.norms.values()}
    return attentions, [part for part in vectors if part not in taken]


def _joined_heads(parts: Sequence[Part]) -> list[Part]:
    """Merge parts that differ in one number, the head, into one part with {h}."""
    groups: dict[tuple[str, Shape], list[Part]] = defaultdict(list)
    for part in parts:
        hidden = _INDEX.sub(lambda found: "#" * len(found[0]), part.name)
        for match in re.finditer(r"\d+", hidden):
            groups[part.name[: match.start()] + "{h}" + part.name[match.end() :], part.shape].append(part)
    left = {part: part for part in parts}
    for (name, shape), heads in groups.items():
        role = attention_role(words(_INDEX.sub("", name)))
        is_heads = len(heads) > 1 and len(shape) == 2 and role in ("q", "k", "v") and shape[0] < shape[1]
        if is_heads and all(left.get(head) is head for head in heads):
            joined = replace(
                heads[0],
                path=tuple(name.split(".")),
                shape=(shape[0] * len(heads), shape[1]),
                weight=_with_head(heads[0].weight, heads[1].weight),
                bias=_with_head(heads[0].bias, heads[1].bias),
            )
            left[heads[0]] = joined
            for head in heads[1:]:
                del left[head]
    return list(left.values())


def _with_head(first: str | None, second: str | None) -> str | None:
    if first is None or second is None:
        return None
    for one, other in zip(re.finditer(r"\d+", first), re.finditer(r"\d+", second), strict=False):
        if one[0] != other[0]:
            return first[: one.start()] + "{h}" + first[one.end() :]
    return first


def _network(maps: Sequence[_Matrix], d_model: int) -> list[_Matrix]:
    no_role = [m for m in maps if attention_role(m.part.words) in (None, "o")]
    named = [m for m in maps if m.part.about(FEED_FORWARD) and not m.part.about(ATTENTION)]
    silent = [m for m in no_role if not m.part.about(ATTENTION)]
    for candidates in (named, silent, no_role, list(maps)):
        if _is_network(candidates, d_model):
            return candidates
        for width in sorted({m.out for m in candidates if m.width == d_model} - {d_model}, reverse=True):
            wide = [m for m in candidates if width in (m.out, m.width)]
            if _is_network(wide, d_model):
                return wide
    return []


def _is_network(maps: Sequence[_Matrix], d_model: int) -> bool:
    # One matrix maps the inner width to d_model. The others map d_model to that width, or to twice that width.
    return len(maps) in (2, 3) and any(
        back.out == d_model
        and all(m.width == d_model and m.out in (back.width, 2 * back.width) for m in maps if m is not back)
        for back in maps
    )


def _network_choice(network: Sequence[_Matrix], d_model: int, target: str) -> Choice:
    ordered = sorted(network, key=lambda m: m.part.place)
    backs = [m for m in ordered if m.out == d_model and all(n.width == d_model for n in ordered if n is not m)]
    readings: list[Reading] = []
    # If the inner width equals d_model, the last matrix is fc2.
    for cost, back in enumerate(reversed(backs)):
        # As in LLaMA, the matrix named gate precedes the activation, and the other one is linear.
        there = sorted((m for m in ordered if m is not back), key=lambda m: not m.part.about(_GATE))
        orders = [("fc1", "gate"), ("gate", "fc1")]
        if len(there) == 2:
            ways = [(*there[0].lines(f"{target}.{a}"), *there[1].lines(f"{target}.{b}")) for a, b in orders]
        elif there[0].out == 2 * back.width:
            ways = [there[0].lines(f"{target}.[{a}/{b}]", "split_rows") for a, b in orders]
        else:
            ways = [there[0].lines(f"{target}.fc1")]
        arch: dict[str, Value] = {"feed_forward": "glu"} if len(ways) > 1 else {}
        readings += [Reading((*way, *back.lines(f"{target}.fc2")), cost + i, (), arch) for i, way in enumerate(ways)]
    return tuple(readings)


def _grouped(maps: Sequence[_Matrix]) -> list[list[_Matrix]]:
    if not maps:
        return []
    if _roles(maps):
        return [list(maps)]
    for depth in range(1, max(len(m.part.path) for m in maps)):
        groups: dict[tuple[str, ...], list[_Matrix]] = defaultdict(list)
        for m in maps:
            groups[m.part.path[:depth]].append(m)
        if len(groups) == 2 and all(_roles(group) for group in groups.values()):
            return list(groups.values())
    return _paired(maps)


def _paired(maps: Sequence[_Matrix]) -> list[list[_Matrix]]:
    """Separate two attentions of one module, whose matrices are W_q_1 and W_q_2."""
    by_role: dict[str | None, list[_Matrix]] = defaultdict(list)
    for m in maps:
        by_role[m.role].append(m)
    groups: list[list[_Matrix]] = [[], []]
    for pair in by_role.values():
        if len(pair) != 2:
            return []
        first, second = sorted(pair, key=lambda m: m.part.place)
        more, other = set(first.part.words) - {*second.part.words}, set(second.part.words) - {*first.part.words}
        if more & CROSS and not other & CROSS:
            first, second = second, first
        groups[0].append(first)
        groups[1].append(second)
    return groups if all(_roles(group) for group in groups) else []


def _roles(maps: Sequence[_Matrix]) -> list[tuple[str, ...]]:
    """List the ways to give each matrix of an attention a role, most likely first."""
    named = [m.role for m in maps]
    wanted = {4: ["q", "k", "v", "o"], 3: ["q", "kv", "o"], 2: ["qkv", "o"]}.get(len(maps))
    # A role that does not fit the number of matrices, such as a fused one, needs another grouping.
    given = [role for role in named if role is not None]
    if wanted is None or ({"qkv", "kv"} & set(given)) - set(wanted) or len(set(given)) < len(given):
        return []
    if sorted(given) == sorted(wanted):
        return [tuple(given)]
    unsure = sorted((i for i, role in enumerate(named) if role not in wanted), key=lambda i: maps[i].part.place)
    found = []
    for order in itertools.permutations(role for role in wanted if role not in named):
        places = dict(zip(unsure, order, strict=True))
        roles = tuple(places.get(i) or str(role) for i, role in enumerate(named))
        if _shapes_fit(dict(zip(roles, maps, strict=True))):
            found.append(roles)
    return found


def _shapes_fit(by_role: Mapping[str, _Matrix]) -> bool:
    out = by_role["o"]
    if "qkv" in by_role:
        return by_role["qkv"].out == 3 * out.width
    if "kv" in by_role:
        return by_role["kv"].out == 2 * out.width
    q, k, v = (by_role[role] for role in "qkv")
    # All heads may share one small projection.
    is_shared = v.width < out.out and out.width % v.out == 0
    return q.out == k.out and q.width == k.width and (out.width == v.out or is_shared)


def _attention_choice(attentions: Sequence[_Attention], d_model: int, layer: str, style: Style) -> Choice:
    if len(attentions) == 1:
        orders: list[tuple[str, ...]] = [("self",)]
    else:
        first, second = ({word for m in one.maps for word in m.part.words} for one in attentions)
        are_cross = [bool((first - second) & CROSS), bool((second - first) & CROSS)]
        if are_cross[0] == are_cross[1]:
            # If both or neither name the other side, the one that is not called "self" is cross-attention.
            are_cross = [not (first - second) & SELF, not (second - first) & SELF]
        orders = [("self", "cross"), ("cross", "self")]
        if are_cross[0] != are_cross[1]:
            orders = orders[1:] if are_cross[0] else orders[:1]
        elif attentions[0].maps[0].part.place > attentions[1].maps[0].part.place:
            orders = orders[::-1]
    return tuple(
        Reading(
            tuple(
                line
                for attention, name in zip(attentions, order, strict=True)
                for line in _projection_lines(attention, d_model, f"{layer}.{name}", style)
            ),
            cost,
            arch=attentions[0].arch,
        )
        for cost, order in enumerate(orders)
    )


def _projection_lines(attention: _Attention, d_model: int, target: str, style: Style) -> list[str]:
    lines: list[str] = []
    found = _roles(attention.maps)
    for m, role in zip(attention.maps, found[min(style.reading, len(found) - 1)], strict=True):
        if role in ("qkv", "kv"):
            lines += m.lines(f"{target}.[{'/'.join(part for part in style.order if part in role)}]", style.cut)
        else:
            # All heads share a projection that is narrower than the model.
            is_shared = role != "o" and m.width < d_model
            lines += m.lines(f"{target}.{role}", *(["block_diag"] if is_shared else []))
    for role, part in attention.norms.items():
        lines += part.norm_lines(f"{target}.{role}_norm")
    return lines


def _norm_choice(norms: Sequence[Part], sublayers: Sequence[Sequence[_Matrix]], layer: str) -> Choice:
    # If norms have no parameters, their gain is 1.
    slots = len(sublayers)
    gains = [part for part in norms if part.weight is not None]
    left = unread([part for part in norms if part.weight is None])
    if not norms:
        return (Reading(tuple(f"derive {layer}.norm{place + 1}.weight = ones" for place in range(slots))),)
    if not slots <= len(gains) <= slots + _MAX_DEAD_NORMS:
        return (unread(norms),)
    placed = {part: place for part in gains if (place := _place(part, sublayers)) is not None}
    readings = []
    for order in itertools.permutations(gains, slots):
        misplaced = sum(placed.get(part, place) != place for place, part in enumerate(order))
        free = [part for part in order if part not in placed]
        is_sorted = free in (sorted(free, key=lambda p: p.place), sorted(free, key=lambda p: natural(p.name)))
        cost = left.cost + FAR * misplaced + (LIKELY if is_sorted else FAR if placed else POSSIBLE)
        lines = (line for place, part in enumerate(order, 1) for line in part.norm_lines(f"{layer}.norm{place}"))
        dead = (key for part in gains if part not in order for key in part.keys)
        readings.append(Reading(tuple(lines), cost, (*left.ignored, *dead)))
    return tuple(sorted(readings, key=lambda reading: reading.cost))


def _place(part: Part, sublayers: Sequence[Sequence[_Matrix]]) -> int | None:
    depths = [max(common([part.path, m.part.path]) for m in group) for group in sublayers]
    if depths.count(max(depths)) == 1 and max(depths) > min(depths):
        return depths.index(max(depths))
    if "post" in part.words and not part.about(FEED_FORWARD):
        return None  # after attention: the norm of the next sublayer, or its own
    if part.about(FEED_FORWARD | {"final"}):
        return len(sublayers) - 1
    if len(sublayers) == 3 and part.about(CROSS) and "self" not in part.words:
        return 1
    return 0 if part.about(ATTENTION | {"self", "slf", "masked"}) else None
