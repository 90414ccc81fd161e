"""The general matcher: from names, indices and shapes of a state dict to layouts that could read it.

It knows no project. What names leave open it proposes in every reading, the
likeliest first; whether one is right, only a golden tells.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tfexport.errors import CheckpointError
from tfexport.importing.detect import words
from tfexport.importing.detect.compress import compress
from tfexport.importing.detect.embeddings import EmbeddingsAndHead, Reader
from tfexport.importing.detect.parts import Layers, Part, Shape, parts_of, split
from tfexport.importing.detect.roles import FAR, LIKELY, POSSIBLE, Choice, Layer, Reading, Style, read_layer
from tfexport.importing.layout.layout import Layout
from tfexport.importing.reference.golden import Golden
from tfexport.importing.reference.randomise import is_position_table
from tfexport.nn.switches import Value

_INDEX = re.compile(r"\{.*?\}")
# Lines of gains, and of tables of positions.
_GAIN, _TABLE = re.compile(r" -> \S*norm\d?\.weight"), re.compile(r" -> \S*\.pos\b")
_HALF_A_GAIN = 0.5
# Lines of what is added to a residual stream, and factors that people write in its sums.
_ADDED = re.compile(r" -> \S*\.(self\.o|cross\.o|ffn\.fc2)\.")
_ROOT_OF_HALF = math.sqrt(0.5)
_ON_BOTH, _ON_ADDED = (0.5, 2.0), (0.5, 0.1)
# Behind all that one other reading explains, before what needs two.
_UNUSUAL = 1.5 * POSSIBLE
_BELOW = re.compile(r"\{i<(\d+)\}")
# Sinusoids that are computed, not stored, and the row of the table that belongs to position 0.
_COMPUTED = ("interleaved", "interleaved_exp", "halves_t2t", "halves_paper", "columns")
DERIVED_LENGTH = 1024
_ROTARY = Reading((), arch=(("positions", "rotary"),))
# Embeddings, tables, norms and the output are a handful; behind so many modules nothing is told apart.
_MOST_OUTSIDE = 200


@dataclass(frozen=True)
class Proposal:
    """A layout that could read the checkpoint, and how far-fetched it is, from 0."""

    layout: Layout
    cost: float


@dataclass(frozen=True)
class _Reading:
    """The choices of one way to store matrices."""

    choices: tuple[Choice, ...]
    arch: Mapping[str, Value]
    derive: Mapping[str, str]
    ignored: tuple[str, ...]
    cost: float
    readings: int
    is_fused: bool

    def lines(self) -> Iterator[str]:
        """List the likeliest lines."""
        return (line for choice in self.choices for line in choice[0].lines)


@dataclass(frozen=True)
class _Outline:
    """What every convention of an author leaves as it is: the layers of each side, and what lies outside of them."""

    sides: Mapping[str, Layers]
    d_model: int
    ignored: tuple[str, ...]
    extras: tuple[str, ...]
    biases: Choice
    embeddings: EmbeddingsAndHead
    tables: Choice
    start: Choice


def proposals(
    tensors: Mapping[str, Tensor], golden: Golden | None = None, *, name: str = "found"
) -> Iterator[Proposal]:
    """Propose layouts, the likeliest first.

    Args:
        tensors: the state dict.
        golden: tells the vocabularies, the padding id and tables kept outside of the state dict.
        name: of the layouts.

    Yields:
        Proposals whose switches are the likeliest of each kind; presence of norms, gates and biases is as the keys say.

    Raises:
        CheckpointError: no layers with attention and feed-forward network are found, or parts of them fit nothing;
            says what was found.
    """
    named = words.fused_order(word for key in tensors for word in words.words(key)) or "qkv"
    usual = Style(_has_bare(tensors), named, "split_rows", 0, LIKELY)
    outline = _outline(tensors, golden, usual)
    first = _read(outline, usual)
    styles = itertools.islice(_styles(usual, first.readings, is_fused=first.is_fused), 1, None)
    readings = _variants([first, *_others(outline, styles), *_sums(first, outline)], tensors, golden)
    heap: list[tuple[float, int, int, tuple[int, ...]]] = []
    seen, proposed = set(), set()
    for number, reading in enumerate(readings):
        start = (0,) * len(reading.choices)
        heapq.heappush(heap, (_cost(reading, start), 0, number, start))
        seen.add((number, start))
    while heap:
        cost, _, number, picks = heapq.heappop(heap)
        layout = _layout(readings[number], picks, name)
        said = (layout.map, frozenset(layout.arch.items()), tuple(layout.derive.items()), layout.post, layout.ignore)
        if said not in proposed:
            proposed.add(said)
            yield Proposal(layout, cost)
        for place, choice in enumerate(readings[number].choices):
            following = (*picks[:place], picks[place] + 1, *picks[place + 1 :])
            if following[place] < len(choice) and (number, following) not in seen:
                seen.add((number, following))
                heapq.heappush(heap, (_cost(readings[number], following), len(seen), number, following))


def _others(outline: _Outline, styles: Iterable[Style]) -> Iterator[_Reading]:
    """Read by other conventions; one by which there are no layers is none."""
    for style in styles:
        try:
            yield _read(outline, style)
        except CheckpointError:
            continue


def _sums(reading: _Reading, outline: _Outline) -> Iterator[_Reading]:
    """Vary the residual sums: factors on x, which DeepNet takes from the layers, on what is added to it, or on both."""
    layers = [found.count for found in outline.sides.values()]
    scales = [(scale,) * len(layers) for scale in _ON_BOTH]
    if len(layers) == 2:
        scales.append((0.81 * (layers[0] ** 4 * layers[1]) ** (1 / 16), (3 * layers[1]) ** 0.25))
    else:
        scales.append(((2 * layers[0]) ** 0.25,))
    for scale in scales:
        arch = {f"{side}.residual_scale": factor for side, factor in zip(outline.sides, scale, strict=True)}
        yield replace(reading, arch={**reading.arch, **arch}, cost=reading.cost + _UNUSUAL)
    for factor in _ON_ADDED:
        yield _folded(reading, _ADDED, f"mul {factor!r}", _UNUSUAL)
    both = _folded(reading, _ADDED, f"mul {_ROOT_OF_HALF!r}", _UNUSUAL)
    yield replace(both, arch={**both.arch, **{f"{side}.residual_scale": _ROOT_OF_HALF for side in outline.sides}})


def _variants(readings: Sequence[_Reading], tensors: Mapping[str, Tensor], golden: Golden | None) -> list[_Reading]:
    """Add what no key tells of all gains, or of all tables of positions: gain - 1 is stored, a table is scaled down."""
    if golden is not None and _are_around_zero(tensors):
        readings = [
            *(_folded(reading, _GAIN, "add 1", LIKELY) for reading in readings),
            *(replace(reading, cost=reading.cost + POSSIBLE) for reading in readings),
        ]
    if any(_is_learned(line, tensors) for line in readings[0].lines()):
        readings = [*readings, *(_folded(reading, _TABLE, "mul d_model ** -0.5", 2 * POSSIBLE) for reading in readings)]
    return list(readings)


def _is_learned(line: str, tensors: Mapping[str, Tensor]) -> bool:
    """Say whether a line is that of a table of positions that is stored and no sinusoid."""
    return bool(_TABLE.search(line)) and not is_position_table(tensors[line.partition(" -> ")[0]])


def _are_around_zero(tensors: Mapping[str, Tensor]) -> bool:
    """Say whether the gains of the norms, which a golden draws around what they began with, lie around 0 and not 1."""
    means = [
        float(tensor.double().mean())
        for key, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.dim() == 1 and words.field(key.rpartition(".")[2])[1] == "weight"
    ]
    return bool(means) and statistics.median(means) < _HALF_A_GAIN


def _folded(reading: _Reading, lines: re.Pattern[str], fold: str, cost: float) -> _Reading:
    """Put a fold behind all lines of a kind."""
    choices = tuple(
        tuple(
            replace(one, lines=tuple(f"{line} |> {fold}" if lines.search(line) else line for line in one.lines))
            for one in choice
        )
        for choice in reading.choices
    )
    return replace(reading, choices=choices, cost=reading.cost + cost)


def _cost(reading: _Reading, picks: Sequence[int]) -> float:
    return reading.cost + sum(choice[pick].cost for choice, pick in zip(reading.choices, picks, strict=True))


def _layout(reading: _Reading, picks: Sequence[int], name: str) -> Layout:
    picked = [choice[pick] for choice, pick in zip(reading.choices, picks, strict=True)]
    lines = [line for one in picked for line in one.lines]
    arch, derive = {**reading.arch, **{k: v for one in picked for k, v in one.arch}}, dict(reading.derive)
    for side in ("enc", "dec"):
        arch[f"{side}.final_norm"] = any(f" {side}.norm." in line for line in lines)
    arch["embedding_norm"] = any(".emb_norm." in line for line in lines)
    derived = [line for line in lines if line.startswith("derive ")]
    derive |= dict(line.removeprefix("derive ").split(" = ") for line in derived)
    post = [line for line in lines if line.startswith("post ")]
    if any(text.startswith("attr ") for text in derive.values()):
        arch.pop("max_length", None)  # the table that the golden brings has one
    return Layout(
        name=name,
        map=compress([_bounded(line) for line in lines if line not in (*derived, *post)]),
        arch=arch,
        derive=derive,
        post=tuple(line.removeprefix("post ") for line in post),
        ignore=tuple(
            _INDEX.sub("*", key) for key in (*reading.ignored, *(key for one in picked for key in one.ignored))
        ),
    )


def _bounded(line: str) -> str:
    """Write the layers of a side that begins a list of both as numbers: {i<2} is {0,1}."""
    found = _BELOW.search(line)
    if found is None:
        return line
    numbers = "{" + ",".join(map(str, range(int(found[1])))) + "}"
    return line.replace(found[0], numbers).replace("{i}", numbers)


def _outline(tensors: Mapping[str, Tensor], golden: Golden | None, usual: Style) -> _Outline:
    ignored = {key for key, tensor in tensors.items() if _is_no_weight(key, tensor)}
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items() if key not in ignored}
    layers, rest = split(shapes)
    try:
        d_model, sides = _sided(layers, rest, tensors, usual)
    except CheckpointError:
        layers, rest = split(shapes, scattered=True)
        if not layers:
            raise
        d_model, sides = _sided(layers, rest, tensors, usual)
    outside = parts_of(rest)
    if len(outside) > _MOST_OUTSIDE:
        raise CheckpointError(
            f"{len(outside)} modules lie outside of the layers, expected embeddings, tables of positions, norms and an "
            f"output: {_listed(outside)}; leave out what is no weight of the model, or write a layout, see "
            "docs/layouts.md"
        )
    biases, extras = _relative_biases(sides, shapes)
    embeddings = Reader(outside, tensors, d_model, list(sides), golden).found()
    tables = () if embeddings.has_table or biases else _computed_tables(golden, list(sides))
    # A norm without bias is one of the same years as positions that are turned in.
    is_recent = not any(part.bias for found in sides.values() for part in found.parts if part.is_vector)
    if tables and (is_recent or any(words.ROTARY & set(words.words(key)) for key in tensors)):
        tables = (_ROTARY, *tables)
    elif tables:
        tables = (*tables, replace(_ROTARY, cost=FAR))
    return _Outline(sides, d_model, tuple(sorted(ignored)), tuple(extras), biases, embeddings, tables, _start(golden))


def _sided(
    layers: Sequence[Layers], rest: Mapping[str, Shape], tensors: Mapping[str, Tensor], usual: Style
) -> tuple[int, dict[str, Layers]]:
    """Find the width and the list of each side, and check that the usual convention reads them."""
    d_model = _d_model(rest, layers)
    sides = _sides(layers, tensors)
    _read_layers(sides, d_model, usual)
    return d_model, sides


def _read_layers(sides: Mapping[str, Layers], d_model: int, style: Style) -> dict[str, Layer]:
    read: dict[str, Layer] = {}
    for side, found in sides.items():
        layer = read_layer(found.parts, d_model, side, style)
        if layer is None:
            raise CheckpointError(
                f"layers {found.prefix[:120]}* have no attention and feed-forward network of width {d_model} that "
                f"names and shapes tell: {_listed(found.parts)}; write a layout, see docs/layouts.md, or export the "
                "model as your own module, see docs/your-own-module.md"
            )
        read[side] = layer
    return read


def _read(outline: _Outline, style: Style) -> _Reading:
    read = _read_layers(outline.sides, outline.d_model, style)
    embeddings, has_bias = outline.embeddings, bool(outline.biases)
    choices = [choice for layer in read.values() for choice in layer.choices]
    final_ones = _final_ones(choices, embeddings, list(read))
    choices += [*embeddings.choices, outline.biases, outline.tables, outline.start, final_ones]
    choices = [choice for choice in choices if choice]
    has_norm_bias = any("norm" in line and ".bias" in line.partition(" -> ")[2] for c in choices for line in c[0].lines)
    arch: dict[str, Value] = {
        "norm": "layernorm" if has_norm_bias else "rms",
        "norm_eps": 1e-5,
        "norm_place": "post",
        "activation": "relu",
        "feed_forward": "glu" if any(layer.has_gate for layer in read.values()) else "mlp",
        "relative_bias": "t5" if has_bias else "none",
        "positions": "none" if has_bias and not embeddings.has_table else "table",
        "qk_norm": next(iter(read.values())).qk_norm,
    }
    if not embeddings.has_table:
        arch["max_length"] = DERIVED_LENGTH
    unread = [*(part for layer in read.values() for part in layer.unread), *embeddings.unread]
    dead = [*outline.extras, *(key for part in unread for key in part.keys)]
    return _Reading(
        tuple(choices),
        arch,
        embeddings.derive,
        (*outline.ignored, *dead),
        POSSIBLE * len(unread) + style.cost,
        max(layer.readings for layer in read.values()),
        any(layer.is_fused for layer in read.values()),
    )


def _start(golden: Golden | None) -> Choice:
    """Where every target starts with the padding, the decoder starts by itself, from zeros: let that row be zeros."""
    if golden is None or golden.target_ids is None or set(golden.target_ids[:, 0].tolist()) != {golden.pad_target}:
        return ()
    return Reading((f"post dec.embed.weight |> zero_row {golden.pad_target}",)), Reading((), POSSIBLE)


def _final_ones(layers: Sequence[Choice], embeddings: EmbeddingsAndHead, sides: Sequence[str]) -> Choice:
    """Where the norms of the layers have no parameters, there may be such norms behind the layers too."""
    has_none = any(line.endswith(" = ones") for choice in layers for line in choice[0].lines)
    has_own = any(".norm." in line for choice in embeddings.choices for line in choice[0].lines)
    if not has_none or has_own:
        return ()
    return Reading(()), Reading(tuple(f"derive {side}.norm.weight = ones" for side in sides), POSSIBLE)


def _is_no_weight(key: str, tensor: Tensor) -> bool:
    """Say whether a tensor is a counter, a number, a causal mask or frequencies: nothing that is learned."""
    is_named = bool(words.field(key.rpartition(".")[2])[1])
    if words.ROTARY & set(words.words(key)) and not is_named:
        return True
    if not tensor.is_floating_point() or tensor.dim() == 0 or (tensor.numel() == 1 and not is_named):
        return True
    rows, columns = tensor.shape[-2:] if tensor.dim() > 1 else (0, 1)
    if rows != columns or rows < 2 or tensor.numel() != rows * columns:
        return False
    square = tensor.reshape(rows, columns)
    corner = square[-1, 0]
    # Read whole only where the first entries are those of a mask; a matrix of weights shows at once.
    if square[0, 0] != corner or square[1, 0] != corner or square[0, 0] == square[0, 1]:
        return False
    below, above = square[torch.ones_like(square).tril() > 0], square[torch.ones_like(square).triu(1) > 0]
    return bool((below == below[0]).all()) and bool((above == above[0]).all()) and bool(below[0] != above[0])


def _styles(first: Style, readings: int, *, is_fused: bool) -> Iterator[Style]:
    """List the conventions that one author keeps to, the usual one first."""
    orders = sorted(map("".join, itertools.permutations("qkv")), key=lambda order: order != first.order)
    cuts = [(order, cut) for order in orders for cut in ("split_rows", "split_heads")]
    bare = (True, False) if first.bare_is_in_out else (False,)
    for in_out, (order, cut), reading in itertools.product(bare, cuts if is_fused else cuts[:1], range(readings)):
        unusual = (in_out != first.bare_is_in_out, order != first.order, cut != first.cut, reading > 0)
        yield Style(in_out, order, cut, reading, POSSIBLE * sum(unusual))


def _has_bare(tensors: Mapping[str, Tensor]) -> bool:
    """Say whether there are matrices that are no module's weight."""
    return any(
        tensor.dim() == 2 and words.attention_role(words.words(key)) is not None
        for key, tensor in tensors.items()
        if words.is_bare(key)
    )


def _d_model(rest: Mapping[str, Shape], layers: Sequence[Layers]) -> int:
    """Return the width that most norms, embeddings and matrices share."""
    if not layers:
        listed = ", ".join(key[:80] for key in sorted(rest)[:8])
        raise CheckpointError(
            f"no list of equal layers among {len(rest)} tensors ({listed} …); "
            "a layer has an index, attention and a feed-forward network; write a layout, see docs/layouts.md"
        )
    votes: Counter[int] = Counter()
    for part in (part for found in layers for part in found.parts):
        if part.is_vector and max(part.shape, default=1) > 1:
            votes[max(part.shape)] += 4
        votes.update({size for size in part.shape if size > 1} if part.is_matrix else ())
    for shape in rest.values():
        if len(shape) > 1:
            votes[shape[-1]] += 4
    return votes.most_common(1)[0][0]


def _sides(layers: Sequence[Layers], keys: Mapping[str, Tensor]) -> dict[str, Layers]:
    """Say which list is the encoder's and which the decoder's: by name, or because a decoder has more attention."""
    if len(layers) > 2:
        prefixes = ", ".join(found.prefix[:80] + "*" for found in layers[:8]) + (" …" if len(layers) > 8 else "")
        raise CheckpointError(f"{len(layers)} lists of layers ({prefixes}), expected an encoder and a decoder")
    skip = words.common(key.split(".") for key in keys)
    named = {words.side(".".join(found.prefix.split(".")[skip:])): found for found in layers}
    if len(layers) == 2 and set(named) == {"enc", "dec"}:
        return {"enc": named["enc"], "dec": named["dec"]}
    ordered = sorted(layers, key=lambda found: len(found.matrices))
    return dict(zip(("enc", "dec"), ordered, strict=False))


def _relative_biases(sides: Mapping[str, Layers], shapes: Mapping[str, Shape]) -> tuple[Choice, list[str]]:
    """Find T5's bias by distance: [buckets, heads], once for all layers of a side. Returns what else one layer has."""
    lines, others = [], []
    for side, found in sides.items():
        for key in found.extras:
            if len(shapes[key]) == 2 and {"rel", "relative", "bias"} & set(words.words(key)):
                lines.append(f"{key} -> {side}.rel_bias.weight")
            else:
                others.append(key)
    return ((Reading(tuple(lines)),) if lines else ()), others


def _computed_tables(golden: Golden | None, sides: Sequence[str]) -> Choice:
    """Positions that the state dict lacks: tables that the golden brings, or a sinusoid of each kind."""
    kept = [
        name for name, tensor in (golden.attributes if golden else {}).items() if sum(n > 1 for n in tensor.shape) == 2
    ]
    kept = [name for name in kept if set(words.words(name)) & words.POSITION] or kept
    readings = []
    for name in kept:
        squeeze = " |> squeeze"
        readings.append((f"attr {name}{squeeze}", LIKELY))
    pad = golden.pad_source if golden is not None else None
    for kind in _COMPUTED:
        readings.append((f"sinusoid {kind}", LIKELY))
        # Some count positions from behind the id of the padding.
        readings += [(f"sinusoid {kind} |> slice {rows}", POSSIBLE) for rows in sorted({1, (pad or 0) + 1})]
    first, *others = sides
    return tuple(
        Reading((f"derive {first}.pos = {text}", *(f"derive {side}.pos = tie {first}.pos" for side in others)), cost)
        for text, cost in readings
    )


def _listed(parts: Sequence[Part]) -> str:
    shown = [f"{part.name[:80]} {list(part.shape)}" for part in parts[:12]]
    return ", ".join(shown) + (" …" if len(parts) > 12 else "")
