"""Find the role of each module of a layer, by name and shape."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfexport.importing.detect import _keys
from tfexport.importing.detect._keys import Part, Shape
from tfexport.nn.config import FeaturesConfig
from tfexport.nn.switches import Value

# Costs of readings; the lowest cost comes first.
LIKELY, POSSIBLE, FAR = 0, 1, 3
# Maximum number of unused norms in a layer; if there are more, the used ones cannot be identified.
_MAX_DEAD_NORMS = 2
_MAX_PARTS = 100


@dataclass(frozen=True)
class Reading:
    """One way to read some modules: lines, ignored keys, switches and cost."""

    lines: tuple[str, ...] = ()
    cost: float = LIKELY
    ignored: tuple[str, ...] = ()
    arch: Mapping[str, Value] = field(default_factory=dict)
    features: FeaturesConfig | None = None


Choice = tuple[Reading, ...]


def unread(parts: Sequence[Part]) -> Reading:
    """Return the reading that ignores modules."""
    return Reading((), POSSIBLE * len(parts), tuple(key for part in parts for key in part.keys))


@dataclass(frozen=True)
class Style:
    """Conventions of one author."""

    bare_is_in_out: bool  # bare parameters are stored [in, out]
    order: str  # of fused projections, such as "qkv"
    cut: str = "split_rows"  # how they are split
    reading: int = 0  # number of a reading of projections without clear names
    cost: float = LIKELY


@dataclass(frozen=True)
class Layer:
    """Choices of a layer."""

    choices: tuple[Choice, ...]
    num_readings: int  # of projections without clear names
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
        role = _keys.attention_role(self.part.words)
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
        is_output = _keys.attention_role(part.words) == "o"
        turned = ("transpose",) if (sizes[2 if is_output else 1] == d_model) != is_output else ()
        inner = math.prod(sizes) // d_model
        if is_output:
            return _Matrix(part, d_model, inner, (*turned, "flatten", "transpose"), ("flatten",))
        return _Matrix(part, inner, d_model, (*turned, "flatten"), ("flatten",))
    rows, columns = sizes
    in_out = style.bare_is_in_out and part.weight is not None and _keys.is_bare(part.weight)
    if part.bias_size in (rows, columns) and rows != columns:
        in_out = part.bias_size == columns
    given = (("{h}" in part.name, "join_rows"), (len(part.shape) > 2, "squeeze"), (in_out, "transpose"))
    out, width = (columns, rows) if in_out else (rows, columns)
    return _Matrix(part, out, width, tuple(op for is_needed, op in given if is_needed))


def _attentions(groups: Sequence[Sequence[_Matrix]], vectors: Sequence[Part]) -> tuple[list[_Attention], list[Part]]:
    attentions = [_Attention(group) for group in groups]
    for part in vectors:
        role = _keys.attention_role(part.words)
        place = 0 if len(groups) == 1 else _place(part, groups)
        if part.weight is not None and part.about(_keys.NORM) and role in ("q", "k") and place is not None:
            attentions[place].norms.setdefault(role, part)
    for attention in attentions:
        if len(attention.norms) < 2:  # a norm of only queries is the norm of the sublayer, before them
            attention.norms.clear()
    taken = {part for attention in attentions for part in attention.norms.values()}
    return attentions, [part for part in vectors if part not in taken]


def _joined_heads(parts: Sequence[Part]) -> list[Part]:
    groups: dict[tuple[str, Shape], list[Part]] = defaultdict(list)
    for part in parts:
        hidden = _keys.INDEX.sub(lambda found: "#" * len(found[0]), part.name)
        for match in re.finditer(r"\d+", hidden):
            groups[part.name[: match.start()] + "{h}" + part.name[match.end() :], part.shape].append(part)
    left = {part: part for part in parts}
    for (name, shape), heads in groups.items():
        role = _keys.attention_role(_keys.words(_keys.INDEX.sub("", name)))
        is_heads = len(heads) > 1 and len(shape) == 2 and role in ("q", "k", "v") and shape[0] < shape[1]
        if is_heads and all(left.get(head) is head for head in heads):
            first, second, *_ = heads
            left[first] = replace(
                first,
                path=tuple(name.split(".")),
                shape=(shape[0] * len(heads), shape[1]),
                weight=_with_head(first.weight, second.weight),
                bias=_with_head(first.bias, second.bias),
            )
            for head in heads[1:]:
                del left[head]
    return list(left.values())


def _with_head(first: str | None, second: str | None) -> str | None:
    if first is None or second is None:
        return None
    pieces = zip(re.split(r"(\d+)", first), re.split(r"(\d+)", second), strict=False)
    return "".join(one if one == other else "{h}" for one, other in pieces)


def _network(maps: Sequence[_Matrix], d_model: int) -> list[_Matrix]:
    no_role = [m for m in maps if _keys.attention_role(m.part.words) in (None, "o")]
    named = [m for m in maps if m.part.about(_keys.FEED_FORWARD) and not m.part.about(_keys.ATTENTION)]
    silent = [m for m in no_role if not m.part.about(_keys.ATTENTION)]
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
        there = sorted((m for m in ordered if m is not back), key=lambda m: not m.part.about(_keys.GATE))
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
    by_role: dict[str | None, list[_Matrix]] = defaultdict(list)
    for m in maps:
        by_role[m.role].append(m)
    groups: list[list[_Matrix]] = [[], []]
    for pair in by_role.values():
        if len(pair) != 2:
            return []
        first, second = sorted(pair, key=lambda m: m.part.place)
        more, other = set(first.part.words) - {*second.part.words}, set(second.part.words) - {*first.part.words}
        if more & _keys.CROSS and not other & _keys.CROSS:
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
        are_cross = [bool((first - second) & _keys.CROSS), bool((second - first) & _keys.CROSS)]
        if are_cross[0] == are_cross[1]:
            # If both or neither name the other side, the one that is not called "self" is cross-attention.
            are_cross = [not (first - second) & _keys.SELF, not (second - first) & _keys.SELF]
        orders = [("self", "cross"), ("cross", "self")]
        if are_cross[0] != are_cross[1]:
            orders = orders[1:] if are_cross[0] else orders[:1]
        elif attentions[0].maps[0].part.place > attentions[1].maps[0].part.place:
            orders = orders[::-1]
    readings = []
    for cost, order in enumerate(orders):
        pairs = zip(attentions, order, strict=True)
        lines = [line for one, name in pairs for line in _projection_lines(one, d_model, f"{layer}.{name}", style)]
        readings.append(Reading(tuple(lines), cost, arch=attentions[0].arch))
    return tuple(readings)


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
    slots, side = len(sublayers), layer.partition(".")[0]
    gains = [part for part in norms if part.weight is not None]
    left = unread([part for part in norms if part.weight is None])
    names = [f"norm{place + 1}" for place in range(slots)]

    def read(order: Sequence[Part], targets: Sequence[str], cost: float, **arch: Value) -> Reading:
        pairs = [(target, part.norm_lines(f"{layer}.{target}")) for part, target in zip(order, targets, strict=True)]
        lines = (f"{line} |> copy" if "[" in target else line for target, made in pairs for line in made)
        dead = (key for part in gains if part not in order for key in part.keys)
        switches = {f"{side}.{name}": value for name, value in arch.items()}
        return Reading(tuple(lines), left.cost + cost, (*left.ignored, *dead), switches)

    if not norms:
        return (Reading(tuple(f"derive {layer}.{name}.weight = ones" for name in names)),)
    if len(gains) == slots - 1:  # one is shared, in parallel blocks or by sublayers that follow each other
        kinds = {"self": [f"[norm1/{names[-1]}]", *names[1:-1]], "cross": ["norm1", f"[norm2/{names[-1]}]"]}
        ways = list(itertools.product(itertools.permutations(gains), list(kinds.items())[: slots - 1]))
        parallel = [read(order, to, POSSIBLE, parallel=kind, norm_place="pre") for order, (kind, to) in ways]
        return (*parallel, *(read(order, targets, POSSIBLE) for order, (_, targets) in ways))
    readings = []
    if len(gains) == 2 * slots:
        after = [part for part in gains if {"post", "after"}.intersection(part.words)]
        orders = [[part for part in gains if part not in after] + after] if len(after) == slots else []
        orders += [gains[0::2] + gains[1::2], gains]
        targets = [*names, *(f"post_{name}" for name in names)]
        readings = [read(order, targets, POSSIBLE * min(n, 1), norm_place="sandwich") for n, order in enumerate(orders)]
    if not slots <= len(gains) <= slots + _MAX_DEAD_NORMS:
        return tuple(readings) or (unread(norms),)
    placed = {part: place for part in gains if (place := _place(part, sublayers)) is not None}
    for order in itertools.permutations(gains, slots):
        misplaced = sum(placed.get(part, place) != place for place, part in enumerate(order))
        free = [part for part in order if part not in placed]
        is_sorted = free in (sorted(free, key=lambda p: p.place), sorted(free, key=lambda p: _keys.natural(p.name)))
        readings.append(read(order, names, FAR * misplaced + (LIKELY if is_sorted else FAR if placed else POSSIBLE)))
    return tuple(sorted(readings, key=lambda reading: reading.cost))


def _place(part: Part, sublayers: Sequence[Sequence[_Matrix]]) -> int | None:
    depths = [max(_keys.common([part.path, m.part.path]) for m in group) for group in sublayers]
    if depths.count(max(depths)) == 1 and max(depths) > min(depths):
        return depths.index(max(depths))
    if "post" in part.words and not part.about(_keys.FEED_FORWARD):
        return None  # after attention: the norm of the next sublayer, or its own
    if part.about(_keys.FEED_FORWARD | {"final"}):
        return len(sublayers) - 1
    if len(sublayers) == 3 and part.about(_keys.CROSS) and "self" not in part.words:
        return 1
    return 0 if part.about(_keys.ATTENTION | {"self", "slf", "masked"}) else None
