"""What the parts of a layer are: attentions, feed-forward network, norms, with every reading that names leave open."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfexport.importing.detect import words
from tfexport.importing.detect.parts import Part
from tfexport.nn.switches import QkNorm, Value

_NUMBER = re.compile(r"\d+")
_INDEX = re.compile(r"\{.*?\}")
# How far-fetched a reading is. Those that nothing speaks against come first.
LIKELY, POSSIBLE, FAR = 0, 1, 3
# More norms than sublayers: some are never used. Above this many nobody could tell which.
_MOST_DEAD_NORMS = 2
# A layer of so many modules, heads joined, is none.
_MOST_PARTS = 100


@dataclass(frozen=True)
class Reading:
    """One way to read some parts: lines of a layout, keys that it leaves out, switches, and how far-fetched it is."""

    lines: tuple[str, ...]
    cost: int = LIKELY
    ignored: tuple[str, ...] = ()
    arch: tuple[tuple[str, Value], ...] = ()


Choice = tuple[Reading, ...]


@dataclass(frozen=True)
class Matrix:
    """A linear map: what a part is, whichever way round it is stored; `bias_ops` is None where a bias takes `ops`."""

    part: Part
    out: int
    width: int
    ops: tuple[str, ...]
    bias_ops: tuple[str, ...] | None = None

    def lines(self, target: str, *more: str) -> tuple[str, ...]:
        """Write the lines that send it to the canonical `target`, with `more` ops; a bias may take all of them."""
        bias_ops = self.ops if self.bias_ops is None else self.bias_ops
        return tuple(
            " |> ".join((f"{key} -> {target}.{kind}", *ops, *more))
            for key, kind, ops in ((self.part.weight, "weight", self.ops), (self.part.bias, "bias", bias_ops))
            if key is not None
        )


@dataclass(frozen=True)
class Style:
    """What an author does everywhere alike.

    `bare_is_in_out`: matrices that are no module's weight are stored [in, out].
    `order` and `cut` are those of fused projections: in blocks or within each head.
    `reading` is the number of the reading of projections that no word tells apart.
    """

    bare_is_in_out: bool
    order: str
    cut: str
    reading: int
    cost: int


@dataclass(frozen=True)
class Layer:
    """The readings of a layer, a choice for each group of parts.

    `unread` fit nothing; `readings` counts the ways to tell its projections
    apart, `is_fused` says whether some of them are one matrix. `qk_norm` is the switch of that name.
    """

    choices: tuple[Choice, ...]
    unread: tuple[Part, ...]
    readings: int
    is_fused: bool
    has_gate: bool
    qk_norm: QkNorm


@dataclass(frozen=True)
class Attention:
    """The matrices of one attention, and the norms of its queries and keys by role; none, or both."""

    maps: tuple[Matrix, ...]
    norms: Mapping[str, Part]

    @property
    def qk_norm(self) -> QkNorm:
        """What the norms normalise: each head, or all of them together."""
        if not self.norms:
            return "none"
        rows = {_named(m): m.out for m in self.maps}
        is_all = all(max(part.shape) == rows.get(role) for role, part in self.norms.items())
        return "all" if is_all else "head"


def matrix(part: Part, d_model: int, *, bare_is_in_out: bool) -> Matrix:
    """Find out which way round a matrix is stored.

    A bias has the size of the output. Without one, modules store [out, in], and
    `bare_is_in_out` says what parameters without a module do. A first axis may count heads.
    """
    sizes = [size for size in part.shape if size > 1]
    if len(sizes) == 3:
        return _by_head(part, sizes, d_model)
    rows, columns = sizes
    in_out = bare_is_in_out and part.weight is not None and words.is_bare(part.weight)
    if part.bias_size in (rows, columns) and rows != columns:
        in_out = part.bias_size == columns
    ops = ["join_rows"] if "{h}" in part.name else []
    ops += ["squeeze"] if len(part.shape) > 2 else []
    out, width = (columns, rows) if in_out else (rows, columns)
    return Matrix(part, out, width, (*ops, *(["transpose"] if in_out else [])))


def _by_head(part: Part, sizes: Sequence[int], d_model: int) -> Matrix:
    """Read [heads, d_model, d_k] or [heads, d_k, d_model]; the output's axes lie the other way."""
    heads, rows, columns = sizes
    if words.attention_role(part.words) == "o":
        transposed: tuple[str, ...] = () if columns == d_model else ("transpose",)
        return Matrix(
            part, d_model, heads * rows * columns // d_model, (*transposed, "flatten", "transpose"), ("flatten",)
        )
    transposed = ("transpose",) if rows == d_model else ()
    return Matrix(part, heads * rows * columns // d_model, d_model, (*transposed, "flatten"), ("flatten",))


def read_layer(parts: Sequence[Part], d_model: int, side: str, style: Style) -> Layer | None:
    """Read the parts of a layer.

    Args:
        parts: of one list of layers.
        d_model: width of the model.
        side: "enc" or "dec".
        style: how matrices are stored.

    Returns:
        The readings; None when it has no attention and feed-forward network.
    """
    parts = _joined_heads(parts)
    if len(parts) > _MOST_PARTS:
        return None
    index = "{i}" if any("{i" in key or "i}" in key or "i+" in key for part in parts for key in part.keys) else "0"
    layer = f"{side}.layers.{index}"
    maps = [matrix(part, d_model, bare_is_in_out=style.bare_is_in_out) for part in parts if part.is_matrix]
    network = _network(maps, d_model)
    groups = _grouped([found for found in maps if found not in network])
    if not network or not groups:
        return None
    attentions, vectors = _attentions(groups, [part for part in parts if part.is_vector])
    choices = [
        _network_choice(network, d_model, f"{layer}.ffn"),
        *_attention_choices(attentions, d_model, layer, style),
    ]
    norms, unread = _norm_choice(vectors, [*groups, network], layer)
    readings = max(len(_roles(group)) for group in groups)
    is_fused = any(len(group) < 4 for group in groups)
    qk_norm = attentions[0].qk_norm
    return Layer((*choices, *norms), tuple(unread), readings, is_fused, _has_gate(network), qk_norm)


def _attentions(groups: Sequence[Sequence[Matrix]], vectors: Sequence[Part]) -> tuple[list[Attention], list[Part]]:
    """Give each attention the norms of its queries and keys; returns the vectors that are left too."""
    found: list[dict[str, Part]] = [{} for _ in groups]
    for part in vectors:
        role = words.attention_role(part.words)
        place = 0 if len(groups) == 1 else _place(part, groups)
        if part.weight is not None and set(part.words) & words.NORM and role in ("q", "k") and place is not None:
            found[place].setdefault(role, part)
    # A norm of queries alone is that of a sublayer, in front of them.
    pairs = [norms if len(norms) == 2 else {} for norms in found]
    taken = {part for norms in pairs for part in norms.values()}
    attentions = [Attention(tuple(group), norms) for group, norms in zip(groups, pairs, strict=True)]
    return attentions, [part for part in vectors if part not in taken]


def _joined_heads(parts: Sequence[Part]) -> list[Part]:
    """Replace parts that are equal but for one number, one for each attention head, by one with {h}."""
    groups: dict[tuple[str, tuple[int, ...]], list[Part]] = defaultdict(list)
    for part in parts:
        hidden = _INDEX.sub(lambda found: "#" * len(found[0]), part.name)
        for match in _NUMBER.finditer(hidden):
            groups[part.name[: match.start()] + "{h}" + part.name[match.end() :], part.shape].append(part)
    left = {part: part for part in parts}
    for (name, shape), heads in groups.items():
        role = words.attention_role(words.words(_INDEX.sub("", name)))
        is_heads = len(heads) > 1 and len(shape) == 2 and role in ("q", "k", "v") and shape[0] < shape[1]
        if is_heads and all(left.get(head) is head for head in heads):
            weight, bias = (_with_head([getattr(head, kind) for head in heads[:2]]) for kind in ("weight", "bias"))
            left[heads[0]] = Part(
                tuple(name.split(".")),
                (shape[0] * len(heads), shape[1]),
                weight,
                bias,
                heads[0].bias_size,
                heads[0].place,
            )
            for head in heads[1:]:
                del left[head]
    return list(left.values())


def _with_head(keys: Sequence[str | None]) -> str | None:
    """Write {h} for the number in which two keys differ."""
    first, second = keys
    if first is None or second is None:
        return None
    for one, other in zip(_NUMBER.finditer(first), _NUMBER.finditer(second), strict=False):
        if one[0] != other[0]:
            return first[: one.start()] + "{h}" + first[one.end() :]
    return first


def _network(maps: Sequence[Matrix], d_model: int) -> list[Matrix]:
    """Pick the feed-forward network: two matrices, or three with a gate."""

    def role(found: Matrix) -> bool:
        return words.attention_role(found.part.words) in ("q", "k", "v", "kv", "qkv")

    def about(found: Matrix, vocabulary: frozenset[str]) -> bool:
        return bool(set(found.part.words) & vocabulary)

    named = [m for m in maps if about(m, words.FEED_FORWARD) and not about(m, words.ATTENTION)]
    silent = [m for m in maps if not about(m, words.ATTENTION) and not role(m)]
    for candidates in (named, silent, [m for m in maps if not role(m)], list(maps)):
        if len(candidates) in (2, 3) and _is_network(candidates, d_model):
            return candidates
        for width in sorted({m.out for m in candidates if m.width == d_model}, reverse=True):
            wide = [m for m in candidates if width in (m.out, m.width) and width != d_model]
            if len(wide) in (2, 3) and _is_network(wide, d_model):
                return wide
    return []


def _is_network(maps: Sequence[Matrix], d_model: int) -> bool:
    """There and back: one matrix from the inner width to d_model, the rest from d_model to it, or to twice of it."""
    backs = [m for m in maps if m.out == d_model]
    return any(
        all(m.width == d_model and m.out in (back.width, 2 * back.width) for m in maps if m is not back)
        for back in backs
    )


def _has_gate(network: Sequence[Matrix]) -> bool:
    return len(network) == 3 or max(m.out for m in network) == 2 * max(m.width for m in network)


def _network_choice(network: Sequence[Matrix], d_model: int, target: str) -> Choice:
    ordered = sorted(network, key=lambda m: m.part.place)
    backs = [m for m in ordered if m.out == d_model and all(n.width == d_model for n in ordered if n is not m)]
    # Where the inner width is d_model too, the last one leads back.
    readings: list[Reading] = []
    for cost, back in enumerate(reversed(backs)):
        there = [m for m in ordered if m is not back]
        if len(there) == 2:
            # A matrix named gate is the one behind the activation, in LLaMA's words; the other one is linear.
            there.sort(key=lambda m: not set(m.part.words) & words.GATE)
            orders = [("fc1", "gate"), ("gate", "fc1")]
            readings += [
                Reading(
                    (*there[0].lines(f"{target}.{a}"), *there[1].lines(f"{target}.{b}"), *back.lines(f"{target}.fc2")),
                    cost + i,
                )
                for i, (a, b) in enumerate(orders)
            ]
        elif there[0].out == 2 * back.width:
            readings += [
                Reading((*there[0].lines(f"{target}.[{order}]", "split_rows"), *back.lines(f"{target}.fc2")), cost + i)
                for i, order in enumerate(("fc1/gate", "gate/fc1"))
            ]
        else:
            readings.append(Reading((*there[0].lines(f"{target}.fc1"), *back.lines(f"{target}.fc2")), cost))
    return tuple(readings)


def _grouped(maps: Sequence[Matrix]) -> list[list[Matrix]]:
    """Sort the matrices of attentions by attention: one or two groups; empty when that fails."""
    if not maps:
        return []
    if _roles(maps):
        return [list(maps)]
    for depth in range(1, max(len(m.part.path) for m in maps)):
        groups: dict[tuple[str, ...], list[Matrix]] = defaultdict(list)
        for m in maps:
            groups[m.part.path[:depth]].append(m)
        if len(groups) == 2 and all(_roles(group) for group in groups.values()):
            return list(groups.values())
    return _paired(maps)


def _paired(maps: Sequence[Matrix]) -> list[list[Matrix]]:
    """Two attentions whose matrices lie side by side: W_q_1 and W_q_2 differ in the word that tells them apart."""
    by_role: dict[str | None, list[Matrix]] = defaultdict(list)
    for m in maps:
        by_role[_named(m)].append(m)
    groups: list[list[Matrix]] = [[], []]
    for pair in by_role.values():
        if len(pair) != 2:
            return []
        first, second = sorted(pair, key=lambda m: m.part.place)
        if _is_cross(_more(first, second)) and not _is_cross(_more(second, first)):
            first, second = second, first
        groups[0].append(first)
        groups[1].append(second)
    return groups if all(_roles(group) for group in groups) else []


def _more(one: Matrix, other: Matrix) -> set[str]:
    return set(one.part.words) - set(other.part.words)


def _is_cross(found: set[str]) -> bool:
    return bool(found & words.CROSS)


def _roles(maps: Sequence[Matrix]) -> list[tuple[str, ...]]:
    """List the ways to read the matrices of one attention, each a role for every matrix; the likeliest first."""
    named = [_named(m) for m in maps]
    wanted = {4: ["q", "k", "v", "o"], 3: ["q", "kv", "o"], 2: ["qkv", "o"]}.get(len(maps))
    # A role that this many matrices cannot have, such as that of fused projections, belongs to another grouping.
    said = [role for role in named if role is not None]
    if wanted is None or ({"qkv", "kv"} & set(said)) - set(wanted) or len(set(said)) < len(said):
        return []
    if sorted(map(str, named)) == sorted(wanted):
        return [tuple(str(role) for role in named)]
    unsure = [i for i, role in enumerate(named) if role not in wanted or named.count(role) > 1]
    left = [role for role in wanted if named.count(role) != 1]
    unsure.sort(key=lambda i: maps[i].part.place)
    found = []
    for order in itertools.permutations(left):
        roles = list(named)
        for i, role in zip(unsure, order, strict=True):
            roles[i] = role
        if _shapes_fit(maps, roles):
            found.append(tuple(str(role) for role in roles))
    return found


def _named(found: Matrix) -> str | None:
    """Return the role that the words name; a square matrix among "qkv_nets" is no fused one."""
    role = words.attention_role(found.part.words)
    return None if role in ("qkv", "kv") and found.out == found.width else role


def _shapes_fit(maps: Sequence[Matrix], roles: Sequence[str | None]) -> bool:
    by_role = dict(zip(roles, maps, strict=True))
    out = by_role["o"]
    if "qkv" in by_role:
        return by_role["qkv"].out == 3 * out.width
    if "kv" in by_role:
        return by_role["kv"].out == 2 * out.width
    q, k, v = (by_role[role] for role in "qkv")
    # One small projection may serve all heads.
    is_shared = v.width < out.out and out.width % v.out == 0
    return q.out == k.out and q.width == k.width and (out.width == v.out or is_shared)


def _attention_choices(attentions: Sequence[Attention], d_model: int, layer: str, style: Style) -> list[Choice]:
    if len(attentions) == 1:
        return [(Reading(_projection_lines(attentions[0], d_model, f"{layer}.self", style)),)]
    first, second = ({word for m in one.maps for word in m.part.words} for one in attentions)
    by_name = [_is_cross(first - second), _is_cross(second - first)]
    if by_name[0] == by_name[1]:
        # Both name the other side, or none does; "self" is said of one alone.
        by_name = [not (first - second) & words.SELF, not (second - first) & words.SELF]
    if by_name[0] != by_name[1]:
        orders = [("cross", "self") if by_name[0] else ("self", "cross")]
    else:
        is_first = attentions[0].maps[0].part.place < attentions[1].maps[0].part.place
        orders = [("self", "cross"), ("cross", "self")][:: 1 if is_first else -1]
    return [
        tuple(
            Reading(
                (
                    *_projection_lines(attentions[0], d_model, f"{layer}.{a}", style),
                    *_projection_lines(attentions[1], d_model, f"{layer}.{b}", style),
                ),
                cost,
            )
            for cost, (a, b) in enumerate(orders)
        )
    ]


def _projection_lines(attention: Attention, d_model: int, target: str, style: Style) -> tuple[str, ...]:
    """Write the lines of one attention."""
    lines: list[str] = []
    found = _roles(attention.maps)
    for m, role in zip(attention.maps, found[min(style.reading, len(found) - 1)], strict=True):
        if role in ("qkv", "kv"):
            order = "/".join(part for part in style.order if part in role)
            lines += m.lines(f"{target}.[{order}]", style.cut)
        else:
            # A projection narrower than the model serves every head.
            shared = role != "o" and m.width < d_model
            lines += m.lines(f"{target}.{role}", *(["block_diag"] if shared else []))
    for role, part in attention.norms.items():
        lines += norm_lines(part, f"{target}.{role}_norm")
    return tuple(lines)


def _norm_choice(
    norms: Sequence[Part], sublayers: Sequence[Sequence[Matrix]], layer: str
) -> tuple[list[Choice], list[Part]]:
    """Give each sublayer its norm; without any parameters of norms, one that has none."""
    slots = len(sublayers)
    gains = [part for part in norms if part.weight is not None]
    unread = [part for part in norms if part.weight is None]
    if not norms:
        return [(Reading(tuple(f"derive {layer}.norm{place + 1}.weight = ones" for place in range(slots))),)], []
    if not slots <= len(gains) <= slots + _MOST_DEAD_NORMS:
        return [], [*gains, *unread]
    placed = {part: place for part in gains if (place := _place(part, sublayers)) is not None}
    readings = []
    for order in itertools.permutations(gains, slots):
        misplaced = sum(placed.get(part, place) != place for place, part in enumerate(order))
        free = [part for part in order if part not in placed]
        by_place, by_number = sorted(free, key=lambda p: p.place), sorted(free, key=lambda p: words.natural(p.name))
        is_natural = free in (by_place, by_number)
        dead = [part for part in gains if part not in order]
        cost = FAR * misplaced + (LIKELY if is_natural else POSSIBLE if not placed else FAR)
        lines = [line for place, part in enumerate(order) for line in norm_lines(part, f"{layer}.norm{place + 1}")]
        readings.append(Reading(tuple(lines), cost, tuple(key for part in dead for key in part.keys)))
    return [tuple(sorted(readings, key=lambda reading: reading.cost))], unread


def norm_lines(part: Part, target: str) -> tuple[str, ...]:
    """Write the lines of a norm; one number alone counts for every column."""
    ops = " |> expand" if max(part.shape, default=1) == 1 else ""
    keys = ((part.weight, "weight"), (part.bias, "bias"))
    return tuple(f"{key} -> {target}.{kind}{ops}" for key, kind in keys if key is not None)


def _place(part: Part, sublayers: Sequence[Sequence[Matrix]]) -> int | None:
    """Say to which sublayer a norm belongs: the one it lies in, or the one that its words name."""
    depths = [max(words.common([part.path, m.part.path]) for m in group) for group in sublayers]
    deepest = [i for i, depth in enumerate(depths) if depth == max(depths)]
    if len(deepest) == 1 and max(depths) > min(depths):
        return deepest[0]
    found = set(part.words)
    if "post" in found and not found & words.FEED_FORWARD:
        return None  # behind an attention, that is in front of the next sublayer, or this one's own
    if found & (words.FEED_FORWARD | {"final"}):
        return len(sublayers) - 1
    if len(sublayers) == 3 and found & words.CROSS and not found & {"self"}:
        return 1
    if found & (words.ATTENTION | {"self", "slf", "masked"}):
        return 0
    return None
