"""Draft layouts for a state dict from its names, indices and shapes.

`_layers` reads the lists of layers. This module reads embeddings, position tables and all other modules.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tfexport.errors import CheckpointError
from tfexport.importing.detect import _layers as of
from tfexport.importing.detect._layers import FAR, LIKELY, POSSIBLE, Choice, Layer, Layers, Part, Reading, Shape, Style
from tfexport.importing.layout.layout import Layout
from tfexport.importing.layout.ops import SINUSOIDS
from tfexport.importing.reference.outputs import ReferenceOutputs
from tfexport.importing.reference.weights import is_position_table
from tfexport.nn.switches import Value

# Lines of norm gains, of position tables, and of weights whose output is added to the residual stream.
_GAIN, _TABLE = re.compile(r" -> \S*norm\d?\.weight"), re.compile(r" -> \S*\.pos\b")
_ADDED = re.compile(r" -> \S*\.(self\.o|cross\.o|ffn\.fc2)\.")
# Common factors in residual sums: on x, on the added output, on both.
_ON_X, _ON_ADDED, _ON_BOTH = (0.5, 2.0), (0.5, 0.1), math.sqrt(0.5)
# More than the cost of one unusual reading, less than that of two.
_UNUSUAL = 1.5 * POSSIBLE
# Rows that a learned table may have before position 0: the padding id plus 1, as in fairseq, or one row.
_OFFSETS = (2, 1)
_DERIVED_LENGTH = 1024
_ROTARY = Reading(arch={"positions": "rotary"})
# A model has few embeddings, tables, norms and outputs; among more modules they cannot be identified.
_MAX_OUTSIDE = 200
# Each norm has several possible places, so further norms are not read.
_MAX_NORMS = 5
# Canonical names in the order of a layout file.
_ORDER = (
    ("enc", "dec", "out"),
    ("embed", "pos", "rel_bias", "emb_norm", "layers", "norm"),
    ("self", "cross", "ffn", "norm1", "norm2", "norm3", "rel_bias"),
    ("q", "k", "v", "o", "fc1", "gate", "fc2"),
    ("weight", "bias"),
)


# A draft is one choice for each group of modules.
_Draft = tuple[Choice, ...]


def _and(draft: _Draft, cost: float, arch: Mapping[str, Value] | None = None) -> _Draft:
    return (*draft, (Reading(cost=cost, arch=arch or {}),))


def _with_fold(draft: _Draft, lines: re.Pattern[str], fold: str, cost: float) -> _Draft:
    def folded(one: Reading) -> Reading:
        return replace(one, lines=tuple(f"{line} |> {fold}" if lines.search(line) else line for line in one.lines))

    return _and(tuple(tuple(map(folded, choice)) for choice in draft), cost)


def drafts(
    tensors: Mapping[str, Tensor], reference: ReferenceOutputs | None = None, *, name: str = "found"
) -> Iterator[Layout]:
    """Draft layouts for a state dict, the most likely first.

    `reference` adds the vocabularies, the padding id and the tables outside of the state dict.

    Raises:
        CheckpointError: There are no layers with attention and a feed-forward network, or their parts do not fit.
    """
    found = _Outline(tensors, reference).drafts()
    heap: list[tuple[float, int, int, tuple[int, ...]]] = []
    seen = set[tuple[int, tuple[int, ...]]]()
    drafted = set[object]()

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
        layout = _layout(picked(number, picks), name)
        text = (layout.map, frozenset(layout.arch.items()), tuple(layout.derive.items()), layout.post, layout.ignore)
        if text not in drafted:
            drafted.add(text)
            yield layout
        for place, choice in enumerate(found[number]):
            if picks[place] + 1 < len(choice):
                push(number, (*picks[:place], picks[place] + 1, *picks[place + 1 :]))


class _Outline:
    def __init__(self, tensors: Mapping[str, Tensor], reference: ReferenceOutputs | None) -> None:
        self.tensors, self.reference = tensors, reference
        has_bare = any(
            tensor.dim() == 2 and of.attention_role(of.words(key)) is not None
            for key, tensor in tensors.items()
            if of.is_bare(key)
        )
        self.usual = Style(has_bare, of.fused_order(word for key in tensors for word in of.words(key)) or "qkv")
        self.ignored = sorted(key for key, tensor in tensors.items() if _is_no_weight(key, tensor))
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items() if key not in {*self.ignored}}
        lists, rest = of.split(shapes)
        try:
            self._take(lists, rest)
        except CheckpointError:
            lists, rest = of.split(shapes, scattered=True)
            if not lists:
                raise
            self._take(lists, rest)
        parts = of.parts_of(rest)
        if len(parts) > _MAX_OUTSIDE:
            raise CheckpointError(
                f"{len(parts)} modules are outside of the layers, expected embeddings, tables of positions, norms and "
                f"an output: {_listed(parts)}; leave out what is no weight of the model, or write a layout, see "
                "docs/reference/layouts.md"
            )
        extras = {key: side for side, found in self.sides.items() for key in found.extras}
        # T5 has one relative bias, [buckets, heads], for all layers of a side.
        biases = [k for k in extras if len(shapes[k]) == 2 and {"rel", "relative", "bias"} & {*of.words(k)}]
        self.dead = [key for key in extras if key not in biases]
        self.biases = Reading(tuple(f"{key} -> {extras[key]}.rel_bias.weight" for key in biases))
        self.outside = _Outside(parts, tensors, self.d_model, list(self.sides), reference)

    def _take(self, lists: Sequence[Layers], rest: Mapping[str, Shape]) -> None:
        self.d_model = _d_model(rest, lists)
        self.sides = _sides(lists, self.tensors)
        self.first = self._layers(self.usual)

    def _layers(self, style: Style) -> dict[str, Layer]:
        read = {side: of.read_layer(found.parts, self.d_model, side, style) for side, found in self.sides.items()}
        for side, layer in read.items():
            if layer is None:
                raise CheckpointError(
                    f"layers {self.sides[side].prefix[:120]}* have no attention and feed-forward network of width "
                    f"{self.d_model} that names and shapes tell: {_listed(self.sides[side].parts)}; write a layout, "
                    "see docs/reference/layouts.md, or export the model as your own module, see "
                    "docs/guides/your-own-module.md"
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
            found = [_with_fold(draft, _GAIN, "add 1", LIKELY) for draft in found] + [
                _and(draft, POSSIBLE) for draft in found
            ]
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
        choices += [*outside.choices, (self.biases,), tables, self._start(), final_ones]
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

        both = _with_fold(draft, _ADDED, f"mul {_ON_BOTH!r}", _UNUSUAL)
        return [
            *(scaled(draft, (factor,) * len(counts), _UNUSUAL) for factor in _ON_X),
            scaled(draft, deep, _UNUSUAL),
            *(_with_fold(draft, _ADDED, f"mul {factor!r}", _UNUSUAL) for factor in _ON_ADDED),
            scaled(both, (_ON_BOTH,) * len(counts), 0),
        ]

    def _are_gains_around_zero(self) -> bool:
        # `record` draws gains around their initial value, which is 0 if they are stored less 1.
        means = [
            float(tensor.double().mean())
            for key, tensor in self.tensors.items()
            if tensor.is_floating_point() and tensor.dim() == 1 and of.leaf_field(key)[1] == "weight"
        ]
        return bool(means) and statistics.median(means) < 0.5

    def _computed_tables(self) -> Choice:
        attributes = self.reference.attributes if self.reference else {}
        kept = [name for name, tensor in attributes.items() if sum(n > 1 for n in tensor.shape) == 2]
        kept = [name for name in kept if of.POSITION.intersection(of.words(name))] or kept
        texts = [(f"attr {name} |> squeeze", LIKELY) for name in kept]
        # Some implementations count positions from the row after the padding id.
        rows = sorted({1, ((self.reference and self.reference.pad_source) or 0) + 1})
        for kind in SINUSOIDS:
            texts += [(f"sinusoid {kind}", LIKELY), *((f"sinusoid {kind} |> slice {n}", POSSIBLE) for n in rows)]
        first, *others = self.sides
        ties = [f"derive {side}.pos = tie {first}.pos" for side in others]
        readings = [Reading((f"derive {first}.pos = {text}", *ties), cost) for text, cost in texts]
        # Models with norms without bias often have rotary positions.
        has_bias = any(part.bias for found in self.sides.values() for part in found.parts if part.is_vector)
        if not has_bias or any(of.ROTARY.intersection(of.words(key)) for key in self.tensors):
            return (_ROTARY, *readings)
        return (*readings, replace(_ROTARY, cost=FAR))

    def _start(self) -> Choice:
        # If every target starts with padding, the decoder starts from zeros. That row becomes zeros.
        reference = self.reference
        if (
            reference is None
            or reference.target_ids is None
            or set(reference.target_ids[:, 0].tolist()) != {reference.pad_target}
        ):
            return ()
        return Reading((f"post dec.embed.weight |> zero_row {reference.pad_target}",)), Reading(cost=POSSIBLE)


def _layout(picked: Sequence[Reading], name: str) -> Layout:
    lines = [line for one in picked for line in one.lines]
    kinds = {kind: [line for line in lines if line.startswith(kind)] for kind in ("derive ", "post ")}
    derive = dict(line.removeprefix("derive ").split(" = ") for line in kinds["derive "])
    arch = {key: value for one in picked for key, value in one.arch.items()}
    arch |= {f"{side}.final_norm": any(f" {side}.norm." in line for line in lines) for side in ("enc", "dec")}
    arch["embedding_norm"] = any(".emb_norm." in line for line in lines)
    if any(text.startswith("attr ") for text in derive.values()):
        arch.pop("max_length", None)  # the recorded table has a length
    return Layout(
        name=name,
        map=compress([_bounded(line) for line in lines if not line.startswith(tuple(kinds))]),
        arch=arch,
        derive=derive,
        post=tuple(line.removeprefix("post ") for line in kinds["post "]),
        ignore=tuple(re.sub(r"\{.*?\}", "*", key) for one in picked for key in one.ignored),
    )


def _bounded(line: str) -> str:
    """Replace {i<2}, used if a list holds the layers of both sides, by {0,1}."""
    if found := re.search(r"\{i<(\d+)\}", line):
        numbers = "{" + ",".join(map(str, range(int(found[1])))) + "}"
        return line.replace(found[0], numbers).replace("{i}", numbers)
    return line


def _is_no_weight(key: str, tensor: Tensor) -> bool:
    is_named = bool(of.leaf_field(key)[1])
    if of.ROTARY.intersection(of.words(key)) and not is_named:
        return True
    if not tensor.is_floating_point() or tensor.dim() == 0 or (tensor.numel() == 1 and not is_named):
        return True
    rows, columns = tensor.shape[-2:] if tensor.dim() > 1 else (0, 1)
    if rows != columns or rows < 2 or tensor.numel() != rows * columns:
        return False
    square = tensor.reshape(rows, columns)
    below, above = square[0, 0], square[0, 1]
    # Read the whole matrix only if its corner looks like a mask.
    if below == above or below != square[-1, 0]:
        return False
    return torch.equal(square, torch.where(torch.ones_like(square).tril() > 0, below, above))


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
    skip = of.common(key.split(".") for key in keys)
    named = {of.side(".".join(found.prefix.split(".")[skip:])): found for found in lists}
    if len(lists) == 2 and set(named) == {"enc", "dec"}:
        return {"enc": named["enc"], "dec": named["dec"]}
    return dict(zip(("enc", "dec"), sorted(lists, key=lambda found: found.num_matrices), strict=False))


def _listed(parts: Sequence[Part]) -> str:
    shown = [f"{part.name[:80]} {list(part.shape)}" for part in parts[:12]]
    return ", ".join(shown) + (" …" if len(parts) > 12 else "")


class _Outside:
    # `derive` has the lines of tensors without a key of their own.
    def __init__(
        self,
        parts: Sequence[Part],
        tensors: Mapping[str, Tensor],
        d_model: int,
        sides: Sequence[str],
        reference: ReferenceOutputs | None,
    ) -> None:
        self.tensors, self.d_model, self.sides = tensors, d_model, sides
        self.vocab = reference.logits.shape[2] if reference is not None and reference.logits is not None else None
        self.largest_id = int(reference.source_ids.max()) if reference is not None else 0
        self.skip = of.common(key.split(".") for key in tensors)
        self.choices: list[Choice] = []
        self.derive: list[str] = []
        tables = [part for part in parts if self._is_table(part, parts)]
        transposed = [part for part in parts if self._is_transposed(part)]
        wide = [part for part in parts if part not in tables and part.is_matrix and part.shape[-1] == d_model]
        outputs = [*transposed, *(part for part in wide if self._is_output(part))] if "dec" in sides else []
        if not outputs and "dec" in sides and len(wide) > 2:
            # If no name shows the output, it is the last of three tables. With two tables, it is tied to one of them.
            outputs = [part for part in wide if not part.about(of.EMBEDDING)][-1:]
        embeddings = [part for part in wide if part not in outputs]
        tables = tables or self._likely_tables(embeddings)
        self._embeddings([part for part in embeddings if part not in tables])
        if "dec" in sides:
            self._outputs(outputs, [p for p in parts if p.weight is None and p.is_vector and self._is_vocab(p)])
        self._tables(tables)
        self._norms([part for part in parts if self._is_norm(part)])
        lines = [line for choice in self.choices for reading in choice for line in reading.lines]
        used = {line.split(" ->")[0] for line in lines}
        self.has_table = any(_target(line).endswith(".pos") for line in lines)
        self.has_norm = any(".norm." in line for choice in self.choices if choice for line in choice[0].lines)
        self.choices = [choice for choice in self.choices if choice]
        self.choices.append((of.unread([part for part in parts if not set(part.keys) & used]),))

    def _side(self, part: Part) -> str | None:
        return of.side(".".join(part.keys[0].split(".")[self.skip :])) if len(self.sides) > 1 else "enc"

    def _is_table(self, part: Part, parts: Sequence[Part]) -> bool:
        sizes = [size for size in part.shape if size > 1]
        if part.weight is None or len(sizes) != 2 or sizes[1] != self.d_model or part.bias is not None:
            return False
        if part.about(of.POSITION) or is_position_table(self.tensors[part.weight]):
            return True
        # A bare parameter is a table if the embeddings are modules, or if it has an axis for the batch.
        wide = (other for other in parts if other.is_matrix and other.shape[-1] == self.d_model)
        is_usual = any(not of.is_bare(other.weight or "") and not self._is_output(other) for other in wide)
        is_embedding = part.about(of.EMBEDDING) and len(part.shape) == 2
        return of.is_bare(part.weight) and not is_embedding and (is_usual or len(part.shape) > 2)

    def _is_transposed(self, part: Part) -> bool:
        # Stored as [d_model, vocab], for x @ W.
        if len(part.shape) != 2 or part.shape[0] != self.d_model or part.shape[1] == self.d_model:
            return False
        return part.weight is not None and of.is_bare(part.weight) and part.shape[1] in (part.bias_size, self.vocab)

    def _is_output(self, part: Part) -> bool:
        is_named = part.about(of.OUTPUT) and not part.about(of.EMBEDDING) and self.vocab in (None, part.shape[0])
        return part.bias is not None or is_named

    def _likely_tables(self, embeddings: Sequence[Part]) -> list[Part]:
        # By size: too few rows for the ids. By name: unnamed ones next to named embeddings.
        small = [part for part in embeddings if part.shape[0] <= self.largest_id and part.shape[0] != self.vocab]
        silent = [part for part in embeddings if not part.about(of.EMBEDDING | {"tok", "token", "tokens"})]
        named = [part for part in embeddings if part not in silent]
        # One embedding with all ids serves both sides.
        is_joint = len(named) == 1 and self.vocab in (None, named[0].shape[0]) and self.largest_id < named[0].shape[0]
        is_enough = len(self.sides) < len(embeddings) or is_joint
        return small or (silent if len(silent) <= len(self.sides) and is_enough else [])

    def _is_vocab(self, part: Part) -> bool:
        size = max(part.shape, default=1)
        return size != 1 and self.vocab in (None, size)

    def _is_norm(self, part: Part) -> bool:
        size = max(part.shape, default=1)
        # A single number belongs to a norm if it also has a bias; otherwise it is a constant of the code.
        is_norm = size == self.d_model or (size == 1 and part.bias is not None)
        return part.is_vector and part.weight is not None and is_norm

    def _embeddings(self, parts: Sequence[Part]) -> None:
        # Equal tables under different names count as one.
        own = {side: [part for part in parts if self._side(part) == side] for side in self.sides}
        shared: list[Part] = []
        for part in (part for part in parts if self._side(part) is None):
            twin = next((side for side in self.sides for other in own[side] if self._are_same(part, other)), None)
            (own[twin] if twin else shared).append(part)
        for side in self.sides:
            same = [part for part in own[side] if self._are_same(part, own[side][0])]
            if same:
                self.choices.append((Reading(tuple(f"{part.weight} -> {side}.embed.weight" for part in same)),))
        free = [side for side in self.sides if not own[side]]
        if len(free) == 2 and len(shared) >= 2:
            pairs = itertools.permutations(sorted(shared, key=lambda part: part.place)[:2])
            self.choices.append(
                tuple(
                    Reading((f"{a.weight} -> enc.embed.weight", f"{b.weight} -> dec.embed.weight"), cost)
                    for cost, (a, b) in enumerate(pairs)
                    if self.vocab in (None, b.shape[0])
                )
            )
            return
        if free and shared:
            readings = (Reading((f"{part.weight} -> {free[0]}.embed.weight",), i) for i, part in enumerate(shared))
            self.choices.append(tuple(readings))
            free = free[1:]
        if free and len(self.sides) == 2:
            other = "enc" if free == ["dec"] else "dec"
            self.derive.append(f"derive {free[0]}.embed.weight = tie {other}.embed.weight")

    def _are_same(self, one: Part, other: Part) -> bool:
        return torch.equal(self.tensors[one.weight or ""], self.tensors[other.weight or ""])

    def _outputs(self, outputs: Sequence[Part], biases: Sequence[Part]) -> None:
        if not outputs:
            self.derive.append("derive out.weight = tie dec.embed.weight")
        readings = []
        for cost, part in enumerate(outputs):
            ops = ["squeeze"] if len(part.shape) > 2 else ["transpose"] if self._is_transposed(part) else []
            others = tuple(key for other in outputs if other is not part for key in other.keys)
            readings.append(Reading(part.lines("out", *ops, bias_ops=()), cost, others))
        self.choices.append(tuple(readings))
        if biases and not any(part.bias for part in outputs):
            self.choices.append((Reading((f"{biases[0].bias} -> out.bias |> squeeze",)),))

    def _tables(self, tables: Sequence[Part]) -> None:
        given: dict[str, Part] = {}
        for part in tables:
            given.setdefault(self._side(part) or "", part)
        unnamed = [part for part in tables if self._side(part) is None]
        for side in self.sides:
            if side not in given and unnamed:
                given[side] = unnamed.pop(0)
            if side in given:
                key, shape = given[side].weight or "", given[side].shape
                line = f"{key} -> {side}.pos" + (" |> squeeze" if len(shape) > 2 else "")
                cost = FAR if is_position_table(self.tensors[key]) else POSSIBLE
                offsets = (Reading((f"{line} |> slice {rows}",), cost) for rows in _OFFSETS)
                self.choices.append((Reading((line,)), *offsets))
        for side, other in (("enc", "dec"), ("dec", "enc")):
            if side in given and other in self.sides and other not in given:
                self.derive.append(f"derive {other}.pos = tie {side}.pos")

    def _norms(self, norms: Sequence[Part]) -> None:
        # A norm follows the embedding or the last layer, of one side or of both, or it is not used.
        readings = []
        for picked in itertools.product(*(self._norm_places(part, norms) for part in norms[:_MAX_NORMS])):
            lines = tuple(line for reading in picked for line in reading.lines)
            targets = [_target(line) for line in lines]
            embedded = {target[:3] for target in targets if ".emb_norm" in target}
            # Both sides have a norm after the embedding, or neither has.
            if len(set(targets)) == len(targets) and embedded in (set(), set(self.sides)):
                ignored = tuple(key for reading in picked for key in reading.ignored)
                readings.append(Reading(lines, sum(one.cost for one in picked), ignored))
        self.choices.append(tuple(sorted(readings, key=lambda reading: reading.cost)))

    def _norm_places(self, part: Part, norms: Sequence[Part]) -> list[Reading]:
        is_embedding = part.about(of.EMBEDDING)
        unusual = FAR if is_embedding or part.about(of.FINAL) else POSSIBLE
        costs = {"emb_norm": LIKELY if is_embedding else unusual, "norm": unusual if is_embedding else LIKELY}
        side = self._side(part)
        if side is not None:
            options = [Reading(part.norm_lines(f"{side}.{place}"), cost) for place, cost in costs.items()]
        else:
            # The last norm follows the decoder, the first the encoder. A norm after embeddings serves both.
            silent = [n for n in norms if self._side(n) is None and not n.about(of.EMBEDDING)]
            usual = {"dec": silent[-1:] == [part], "enc": len(silent) > 1 and silent[0] is part}
            options = [
                Reading(part.norm_lines(f"{owner}.norm"), costs["norm"] + (LIKELY if usual[owner] else POSSIBLE))
                for owner in self.sides
            ]
            for (place, cost), more in zip(costs.items(), (LIKELY, POSSIBLE), strict=True):
                kinds = [kind for key, kind in ((part.weight, "weight"), (part.bias, "bias")) if key is not None]
                tied = (f"derive dec.{place}.{kind} = tie enc.{place}.{kind}" for kind in kinds)
                options.append(Reading((*part.norm_lines(f"enc.{place}"), *tied), cost + more))
        return [*sorted(options, key=lambda reading: reading.cost), Reading(cost=2 * FAR, ignored=tuple(part.keys))]


def _target(line: str) -> str:
    return line.removeprefix("derive ").split(" = ")[0].split(" -> ")[-1].split(" |> ")[0]


_Row = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def compress(lines: Sequence[str]) -> tuple[str, ...]:
    """Merge lines that differ in one component of each side, using lists."""

    def place(line: str) -> list[int]:
        return [order.index(word) for word in _target(line).split(".") for order in _ORDER if word in order]

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
    """Merge rows that differ only in the `left` source and `right` target component."""

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
