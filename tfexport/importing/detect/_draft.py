"""Draft layouts for a state dict from its names, indices and shapes."""

from __future__ import annotations

import heapq
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from tfexport.errors import CheckpointError
from tfexport.importing._buffers import is_causal_mask, is_position_table
from tfexport.importing.detect import _keys
from tfexport.importing.detect._front import read_front
from tfexport.importing.detect._keys import Layers, Part, Shape
from tfexport.importing.detect._layers import LIKELY, POSSIBLE, Choice, Layer, Reading, Style, read_layer
from tfexport.importing.detect._outside import Outside, target_of
from tfexport.importing.layout.layout import Layout
from tfexport.importing.layout.ops import SINUSOIDS
from tfexport.importing.reference.outputs import ReferenceOutputs
from tfexport.nn.switches import Value

# Lines of norm gains, of position tables, and of weights whose output is added to the residual stream.
_GAIN, _TABLE = re.compile(r" -> \S*norm\d?\]?\.weight"), re.compile(r" -> \S*\.pos\b")
_ADDED = re.compile(r" -> \S*\.(self\.o|cross\.o|ffn\.fc2)\.")
# Common factors in residual sums: on x, on the added output, on both.
_ON_X, _ON_ADDED, _ON_BOTH = (0.5, 2.0), (0.5, 0.1), math.sqrt(0.5)
# More than one unusual reading, less than two.
_UNUSUAL = 1.5 * POSSIBLE
_DERIVED_LENGTH = 1024
_ROTARY = Reading(arch={"positions": "rotary"})
# Among more modules, embeddings, tables, norms and outputs cannot be identified.
_MAX_OUTSIDE = 200
# Canonical names in the order of a layout file.
_ORDER = "weight bias enc dec out head embed pos rel_bias emb_norm layers norm self cross ffn norm1 norm2 norm3".split()
_ORDER += "q k v o fc1 gate fc2".split()
# A draft is one choice for each group of modules.
_Draft = tuple[Choice, ...]


def _and(draft: _Draft, cost: float, arch: Mapping[str, Value] | None = None) -> _Draft:
    return (*draft, (Reading(cost=cost, arch=arch or {}),))


def _with_fold(draft: _Draft, lines: re.Pattern[str], fold: str, cost: float) -> _Draft:
    def folded(one: Reading) -> Reading:
        return replace(one, lines=tuple(f"{line} |> {fold}" if lines.search(line) else line for line in one.lines))

    return _and(tuple(tuple(map(folded, choice)) for choice in draft), cost)


def drafts(tensors: Mapping[str, Tensor], reference: ReferenceOutputs | None = None) -> Iterator[Layout]:
    """Draft layouts for a state dict, the most likely first."""
    found = _Outline(tensors, reference).drafts()
    heap: list[tuple[float, int, int, tuple[int, ...]]] = []
    seen, drafted = set[tuple[int, tuple[int, ...]]](), set[str]()

    def picked(number: int, picks: Sequence[int]) -> list[Reading]:
        return [choice[pick] for choice, pick in zip(found[number], picks, strict=True)]

    def push(number: int, picks: tuple[int, ...]) -> None:
        if (number, picks) not in seen:
            cost = sum(reading.cost for reading in picked(number, picks))
            heapq.heappush(heap, (cost, len(seen) if any(picks) else 0, number, picks))
            seen.add((number, picks))

    for number, draft in enumerate(found):
        push(number, (0,) * len(draft))
    while heap:
        _, _, number, picks = heapq.heappop(heap)
        layout = _layout(picked(number, picks))
        if (text := repr(layout)) not in drafted:
            drafted.add(text)
            yield layout
        for place, choice in enumerate(found[number]):
            if picks[place] + 1 < len(choice):
                push(number, (*picks[:place], picks[place] + 1, *picks[place + 1 :]))


class _Outline:
    def __init__(self, tensors: Mapping[str, Tensor], reference: ReferenceOutputs | None) -> None:
        self.tensors, self.reference = tensors, reference
        has_bare = any(
            tensor.dim() == 2 and _keys.attention_role(_keys.words(key)) is not None
            for key, tensor in tensors.items()
            if _keys.is_bare(key)
        )
        self.usual = Style(has_bare, _keys.fused_order(word for key in tensors for word in _keys.words(key)) or "qkv")
        self.ignored = sorted(key for key, tensor in tensors.items() if _is_no_weight(key, tensor))
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items() if key not in {*self.ignored}}
        lists, rest = _keys.split(shapes)
        try:
            self._take(lists, rest)
        except CheckpointError:
            lists, rest = _keys.split(shapes, scattered=True)
            if not lists:
                raise
            self._take(lists, rest)
        extras = {key: side for side, found in self.sides.items() for key in found.extras}
        # T5 has one relative bias, [buckets, heads], for all layers of a side: in the first one, or outside of them.
        skip = _keys.common(key.split(".") for key in tensors)
        owners = extras | {key: _keys.side(".".join(key.split(".")[skip:])) for key in rest}
        biases = [key for key, side in owners.items() if side in self.sides and self._is_bias(key, shapes[key])]
        parts = _keys.parts_of({key: shape for key, shape in rest.items() if key not in biases})
        if len(parts) > _MAX_OUTSIDE:
            raise CheckpointError(
                f"{len(parts)} modules are outside of the layers, expected at most {_MAX_OUTSIDE}: {_listed(parts)}; "
                "remove tensors that are not weights of the model, or write a layout, see docs/reference/layouts.md"
            )
        self.dead = [key for key in extras if key not in biases]
        self.biases = Reading(tuple(f"{key} -> {owners[key]}.rel_bias.weight" for key in biases))
        self.front: Choice = ()
        if reference is not None and reference.source_ids.dim() == 3:
            self.front, used = read_front(parts, self.d_model, reference.source_ids.shape[2], skip)
            parts = [part for part in parts if part not in used]
        self.outside = Outside(parts, tensors, self.d_model, list(self.sides), reference)

    def _is_bias(self, key: str, shape: Shape) -> bool:
        is_named = {"rel", "relative", "bias"} & {*_keys.words(key)}
        return len(shape) == 2 and shape[1] < self.d_model and bool(is_named)

    def _take(self, lists: Sequence[Layers], rest: Mapping[str, Shape]) -> None:
        self.d_model = _d_model(rest, lists)
        self.sides = _sides(lists, self.tensors)
        self.first = self._layers(self.usual)

    def _layers(self, style: Style) -> dict[str, Layer]:
        read = {side: read_layer(found.parts, self.d_model, side, style) for side, found in self.sides.items()}
        for side, layer in read.items():
            if layer is None:
                raise CheckpointError(
                    f"layers {self.sides[side].prefix[:120]}* have no attention and feed-forward network of width "
                    f"{self.d_model} that names and shapes show: {_listed(self.sides[side].parts)}; write a layout "
                    "(docs/reference/layouts.md) or export it as your own module (docs/guides/your-own-module.md)"
                )
        return {side: layer for side, layer in read.items() if layer is not None}

    def drafts(self) -> list[_Draft]:
        usual, layers = self.usual, self.first.values()
        orders = sorted(map("".join, itertools.permutations("qkv")), key=lambda order: order != usual.order)
        cuts = [(order, cut) for order in orders for cut in ("split_rows", "split_heads")]
        is_fused, num_readings = any(layer.is_fused for layer in layers), max(layer.num_readings for layer in layers)
        found = []
        for in_out, (order, cut), number in itertools.product(
            (True, False) if usual.bare_is_in_out else (False,), cuts if is_fused else cuts[:1], range(num_readings)
        ):
            unusual = (in_out != usual.bare_is_in_out, order != usual.order, cut != usual.cut, number > 0)
            try:
                found.append(self._draft(Style(in_out, order, cut, number, POSSIBLE * sum(unusual))))
            except CheckpointError:  # this style finds no layers
                continue
        found += self._sums(found[0])
        if self.reference is not None and self._are_gains_around_zero():  # stored less 1
            folded = [_with_fold(draft, _GAIN, "add 1", LIKELY) for draft in found]
            found = folded + [_and(draft, POSSIBLE) for draft in found]
        tables = [line for choice in found[0] for line in choice[0].lines if _TABLE.search(line)]
        if any(not is_position_table(self.tensors[line.partition(" -> ")[0]]) for line in tables):
            found += [_with_fold(draft, _TABLE, "mul d_model ** -0.5", 2 * POSSIBLE) for draft in found]
        return found

    def _draft(self, style: Style) -> _Draft:
        outside = self.outside
        choices = [choice for layer in self._layers(style).values() for choice in layer.choices]
        final_ones: Choice = ()
        if any(line.endswith(" = ones") for choice in choices for line in choice[0].lines) and not outside.has_norm:
            # If the norms of the layers have no parameters, there may also be such norms after the layers.
            ones = tuple(f"derive {side}.norm.weight = ones" for side in self.sides)
            final_ones = (Reading(), Reading(ones, POSSIBLE))
        has_bias = bool(self.biases.lines)
        tables = () if outside.has_table or has_bias else self._computed_tables()
        choices += [self.front, *outside.choices, (self.biases,), tables, self._start(), final_ones]
        lines = [line for choice in choices if choice for line in choice[0].lines]
        arch: dict[str, Value] = {
            "norm": "layernorm" if any(re.search(r" -> .*norm.*\.bias", line) for line in lines) else "rms",
            "norm_eps": 1e-5,
            "norm_place": "post",
            "activation": "relu",
            "feed_forward": "mlp",
            "relative_bias": "t5" if has_bias else "none",
            "positions": "none" if has_bias and not outside.has_table else "table",
            "qk_norm": "none",
        }
        if self.reference and self.reference.head != "none":
            arch["head"] = self.reference.head
        if not outside.has_table:
            arch["max_length"] = _DERIVED_LENGTH
        usual = Reading(tuple(outside.derive), style.cost, (*self.ignored, *self.dead), arch)
        return ((usual,), *(choice for choice in choices if choice))

    def _sums(self, draft: _Draft) -> list[_Draft]:
        # DeepNet takes the factor on x from the number of layers.
        counts = [found.count for found in self.sides.values()]
        deep: tuple[float, ...] = ((2 * counts[0]) ** 0.25,)
        if len(counts) == 2:
            deep = (0.81 * (counts[0] ** 4 * counts[1]) ** (1 / 16), (3 * counts[1]) ** 0.25)

        def scaled(draft: _Draft, factors: Sequence[float], cost: float) -> _Draft:
            pairs = zip(self.sides, factors, strict=True)
            return _and(draft, cost, {f"{side}.residual_scale": factor for side, factor in pairs})

        places = {f"{side}.norm_place": "pre" for side in self.sides}
        parallel = [{"enc.parallel": "self", "dec.parallel": kind} for kind in ("self", "cross")]
        both = _with_fold(draft, _ADDED, f"mul {_ON_BOTH!r}", _UNUSUAL)
        return [
            *(scaled(draft, (factor,) * len(counts), _UNUSUAL) for factor in _ON_X),
            scaled(draft, deep, _UNUSUAL),
            *(_with_fold(draft, _ADDED, f"mul {factor!r}", _UNUSUAL) for factor in _ON_ADDED),
            scaled(both, (_ON_BOTH,) * len(counts), 0),
            *(_and(draft, _UNUSUAL, places | kinds) for kinds in parallel if len(counts) == 2),
        ]

    def _are_gains_around_zero(self) -> bool:
        # `record` draws gains around their initial value, which is 0 if they are stored less 1.
        means = [
            float(tensor.double().mean())
            for key, tensor in self.tensors.items()
            if tensor.is_floating_point() and tensor.dim() == 1 and _keys.leaf_field(key)[1] == "weight"
        ]
        return bool(means) and statistics.median(means) < 0.5

    def _computed_tables(self) -> Choice:
        attributes = self.reference.attributes if self.reference else {}
        tables = [name for name, tensor in attributes.items() if sum(n > 1 for n in tensor.shape) == 2]
        tables = [name for name in tables if _keys.POSITION.intersection(_keys.words(name))] or tables
        texts = [(f"attr {name} |> squeeze", LIKELY) for name in tables]
        # Some implementations count positions from the row after the padding id.
        rows = sorted({1, ((self.reference and self.reference.pad_source) or 0) + 1})
        for kind in SINUSOIDS:
            texts += [(f"sinusoid {kind}", LIKELY), *((f"sinusoid {kind} |> slice {n}", POSSIBLE) for n in rows)]
        first, *others = self.sides
        ties = [f"derive {side}.pos = tie {first}.pos" for side in others]
        readings = [Reading((f"derive {first}.pos = {text}", *ties), cost) for text, cost in texts]
        # Models with norms without bias often have rotary positions.
        has_bias = any(part.bias for found in self.sides.values() for part in found.parts if part.is_vector)
        if not has_bias or any(_keys.ROTARY.intersection(_keys.words(key)) for key in self.tensors):
            return (_ROTARY, *readings)
        return tuple(sorted((*readings, replace(_ROTARY, cost=POSSIBLE / 2)), key=lambda reading: reading.cost))

    def _start(self) -> Choice:
        # If every target starts with padding, the decoder starts from zeros. That row becomes zeros.
        ids, pad = (self.reference.target_ids, self.reference.pad_target) if self.reference else (None, None)
        if ids is None or set(ids[:, 0].tolist()) != {pad}:
            return ()
        return Reading((f"post dec.embed.weight |> zero_row {pad}",)), Reading(cost=POSSIBLE)


def _layout(picked: Sequence[Reading]) -> Layout:
    lines = [line for one in picked for line in one.lines]
    kinds = {kind: [line for line in lines if line.startswith(kind)] for kind in ("derive ", "post ")}
    derive = dict(line.removeprefix("derive ").split(" = ") for line in kinds["derive "])
    arch = {key: value for one in picked for key, value in one.arch.items()}
    arch |= {f"{side}.final_norm": any(f" {side}.norm." in line for line in lines) for side in ("enc", "dec")}
    arch["embedding_norm"] = any(".emb_norm." in line for line in lines)
    if any(text.startswith("attr ") for text in derive.values()):
        arch.pop("max_length", None)  # the recorded table has a length
    return Layout(
        name="found",
        map=compress([_bounded(line) for line in lines if not line.startswith(tuple(kinds))]),
        arch=arch,
        features=next((one.features for one in picked if one.features), None),
        derive=derive,
        post=tuple(line.removeprefix("post ") for line in kinds["post "]),
        ignore=tuple(re.sub(r"\{.*?\}", "*", key) for one in picked for key in one.ignored),
    )


def _bounded(line: str) -> str:
    if found := re.search(r"\{i<(\d+)\}", line):
        numbers = "{" + ",".join(map(str, range(int(found[1])))) + "}"
        return line.replace(found[0], numbers).replace("{i}", numbers)
    return line


def _is_no_weight(key: str, tensor: Tensor) -> bool:
    is_named = bool(_keys.leaf_field(key)[1])
    if _keys.ROTARY.intersection(_keys.words(key)) and not is_named:
        return True
    if not tensor.is_floating_point() or tensor.dim() == 0 or (tensor.numel() == 1 and not is_named):
        return True
    return is_causal_mask(tensor)


def _d_model(rest: Mapping[str, Shape], lists: Sequence[Layers]) -> int:
    if not lists:
        listed = ", ".join(key[:80] for key in sorted(rest)[:8])
        raise CheckpointError(
            f"no list of equal layers among {len(rest)} tensors ({listed} …); "
            "a layer has an index, attention and a feed-forward network; write a layout, see docs/reference/layouts.md"
        )
    votes: Counter[int] = Counter()
    for part in (part for found in lists for part in found.parts):
        if part.is_vector and max(part.shape, default=1) > 1:
            votes[max(part.shape)] += 4
        votes.update({size for size in part.shape if size > 1} if part.is_matrix else ())
    for shape in rest.values():
        if len(shape) > 1:
            votes[shape[-1]] += 4
    return votes.most_common(1)[0][0]


def _sides(lists: Sequence[Layers], keys: Mapping[str, Tensor]) -> dict[str, Layers]:
    # Without names, the decoder is the side with more matrices, because it has more attention.
    if len(lists) > 2:
        prefixes = ", ".join(found.prefix[:80] + "*" for found in lists[:8]) + (" …" if len(lists) > 8 else "")
        raise CheckpointError(f"{len(lists)} lists of layers ({prefixes}), expected an encoder and a decoder")
    skip = _keys.common(key.split(".") for key in keys)
    named = {_keys.side(".".join(found.prefix.split(".")[skip:])): found for found in lists}
    if len(lists) == 2 and set(named) == {"enc", "dec"}:
        return {"enc": named["enc"], "dec": named["dec"]}
    return dict(zip(("enc", "dec"), sorted(lists, key=lambda found: found.num_matrices), strict=False))


def _listed(parts: Sequence[Part]) -> str:
    shown = [f"{part.name[:80]} {list(part.shape)}" for part in parts[:12]]
    return ", ".join(shown) + (" …" if len(parts) > 12 else "")


_Row = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def compress(lines: Sequence[str]) -> tuple[str, ...]:
    """Merge lines that differ in one component of each side, using lists."""

    def place(line: str) -> list[int]:
        return [_ORDER.index(word) for word in target_of(line).split(".") if word in _ORDER]

    rows: list[_Row] = []
    for line in sorted(lines, key=place):
        rule, *ops = line.split(" |> ")
        source, target = rule.split(" -> ")
        rows.append((tuple(source.split(".")), tuple(target.split(".")), tuple(ops)))
    for right in (-1, -2, -3, 0):
        for left in (-1, -2, -3, -4, 0, 1, 2):
            rows = _merged(rows, left, right)
    return tuple(" |> ".join((f"{'.'.join(source)} -> {'.'.join(target)}", *ops)) for source, target, ops in rows)


def _merged(rows: Sequence[_Row], left: int, right: int) -> list[_Row]:

    def put(parts: tuple[str, ...], place: int, text: str) -> tuple[str, ...]:
        place %= len(parts)
        return (*parts[:place], text, *parts[place + 1 :])

    def lists_before(parts: tuple[str, ...], place: int) -> int:
        # The k-th lists of both sides belong together. The result is -1 if the component cannot become a list.
        if not -len(parts) <= place < len(parts) or set("{[") & set(parts[place]):
            return -1
        return sum("{" in part and "," in part for part in parts[: place % len(parts)])

    groups: dict[_Row, list[_Row]] = {}
    for source, target, ops in rows:
        rest = source, target, ops
        if lists_before(source, left) == lists_before(target, right) >= 0:
            rest = put(source, left, "\0"), put(target, right, "\0"), ops
        groups.setdefault(rest, []).append((source, target, ops))
    merged: list[_Row] = []
    for (source, target, ops), group in groups.items():
        sides = [(row[0][left], row[1][right]) for row in group] if len(group) > 1 else []
        lists = [words for words in zip(*sides, strict=True) if len(set(words)) == len(group)]
        if len(lists) == 2:
            one, other = ("{" + ",".join(words) + "}" for words in lists)
            merged.append((put(source, left, one), put(target, right, other), ops))
        else:
            merged += group
    return merged
