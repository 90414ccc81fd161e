"""The general matcher: from names, indices and shapes of a state dict to layouts that could read it.

It knows no project. What names leave open it proposes in every reading, the
likeliest first; whether one is right, only a golden tells.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tfexport.checkpoint.detect import words
from tfexport.checkpoint.detect.compress import compress
from tfexport.checkpoint.detect.embeddings import Reader
from tfexport.checkpoint.detect.parts import Layers, Part, Shape, parts_of, split
from tfexport.checkpoint.detect.roles import LIKELY, POSSIBLE, Choice, Layer, Reading, Style, read_layer
from tfexport.checkpoint.layout.layout import Layout
from tfexport.checkpoint.reference.golden import Golden
from tfexport.errors import CheckpointError
from tfexport.models.switches import Value

_INDEX = re.compile(r"\{.*?\}")
# Sinusoids that are computed, not stored, and the row of the table that belongs to position 0.
_COMPUTED = ("interleaved", "interleaved_exp", "halves_t2t", "halves_paper")
DERIVED_LENGTH = 1024


@dataclass(frozen=True)
class Proposal:
    """A layout that could read the checkpoint, and how far-fetched it is, from 0."""

    layout: Layout
    cost: int


@dataclass(frozen=True)
class _Reading:
    """The choices of one way to store matrices."""

    choices: tuple[Choice, ...]
    arch: Mapping[str, Value]
    derive: Mapping[str, str]
    ignored: tuple[str, ...]
    cost: int
    readings: int
    is_fused: bool


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
    first = _read(tensors, golden, usual)
    styles = itertools.islice(_styles(usual, first.readings, is_fused=first.is_fused), 1, None)
    readings = [first, *(_read(tensors, golden, style) for style in styles)]
    heap: list[tuple[int, int, int, tuple[int, ...]]] = []
    seen, proposed = set(), set()
    for number, reading in enumerate(readings):
        start = (0,) * len(reading.choices)
        heapq.heappush(heap, (_cost(reading, start), 0, number, start))
        seen.add((number, start))
    while heap:
        cost, _, number, picks = heapq.heappop(heap)
        layout = _layout(readings[number], picks, name)
        if (layout.map, tuple(layout.derive.items()), layout.ignore) not in proposed:
            proposed.add((layout.map, tuple(layout.derive.items()), layout.ignore))
            yield Proposal(layout, cost)
        for place, choice in enumerate(readings[number].choices):
            following = (*picks[:place], picks[place] + 1, *picks[place + 1 :])
            if following[place] < len(choice) and (number, following) not in seen:
                seen.add((number, following))
                heapq.heappush(heap, (_cost(readings[number], following), len(seen), number, following))


def _cost(reading: _Reading, picks: Sequence[int]) -> int:
    return reading.cost + sum(choice[pick].cost for choice, pick in zip(reading.choices, picks, strict=True))


def _layout(reading: _Reading, picks: Sequence[int], name: str) -> Layout:
    picked = [choice[pick] for choice, pick in zip(reading.choices, picks, strict=True)]
    lines = [line for one in picked for line in one.lines]
    arch, derive = dict(reading.arch), dict(reading.derive)
    for side in ("enc", "dec"):
        arch[f"{side}.final_norm"] = any(f" {side}.norm." in line for line in lines)
    arch["embedding_norm"] = any(".emb_norm." in line for line in lines)
    derived = [line for line in lines if line.startswith("derive ")]
    derive |= dict(line.removeprefix("derive ").split(" = ") for line in derived)
    return Layout(
        name=name,
        map=compress([line for line in lines if line not in derived]),
        arch=arch,
        derive=derive,
        ignore=tuple(
            _INDEX.sub("*", key) for key in (*reading.ignored, *(key for one in picked for key in one.ignored))
        ),
    )


def _read(tensors: Mapping[str, Tensor], golden: Golden | None, style: Style) -> _Reading:
    ignored = sorted(key for key, tensor in tensors.items() if _is_no_weight(key, tensor))
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items() if key not in ignored}
    try:
        layers, rest = split(shapes)
        d_model, sides, read = _read_layers(layers, rest, tensors, style)
    except CheckpointError:
        layers, rest = split(shapes, scattered=True)
        if not layers:
            raise
        d_model, sides, read = _read_layers(layers, rest, tensors, style)
    biases, extras = _relative_biases(sides, shapes)
    embeddings = Reader(parts_of(rest), tensors, d_model, list(sides), golden).found()
    unread = [part for layer in read.values() for part in layer.unread] + list(embeddings.unread)
    choices = [choice for layer in read.values() for choice in layer.choices] + list(embeddings.choices)
    choices += [biases] if biases else []
    has_bias = bool(biases)
    if not embeddings.has_table and not has_bias:
        choices.append(_computed_tables(golden, list(sides)))
    has_norm_bias = any("norm" in line and ".bias" in line.partition(" -> ")[2] for c in choices for line in c[0].lines)
    arch: dict[str, Value] = {
        "norm": "layernorm" if has_norm_bias else "rms",
        "norm_eps": 1e-5,
        "norm_place": "post",
        "activation": "relu",
        "feed_forward": "glu" if any(layer.has_gate for layer in read.values()) else "mlp",
        "relative_bias": "t5" if has_bias else "none",
        "positions": "none" if has_bias and not embeddings.has_table else "table",
    }
    if not embeddings.has_table:
        arch["max_length"] = DERIVED_LENGTH
    dead = [*extras, *(key for part in unread for key in part.keys)]
    return _Reading(
        tuple(choice for choice in choices if choice),
        arch,
        embeddings.derive,
        (*ignored, *dead),
        POSSIBLE * len(unread) + style.cost,
        max(layer.readings for layer in read.values()),
        any(layer.is_fused for layer in read.values()),
    )


def _read_layers(
    layers: Sequence[Layers], rest: Mapping[str, Shape], tensors: Mapping[str, Tensor], style: Style
) -> tuple[int, dict[str, Layers], dict[str, Layer]]:
    d_model = _d_model(rest, layers)
    sides = _sides(layers, tensors)
    read: dict[str, Layer] = {}
    for side, found in sides.items():
        layer = read_layer(found.parts, d_model, side, style)
        if layer is None:
            raise CheckpointError(
                f"layers {found.prefix}* have no attention and feed-forward network of width {d_model} that names and "
                f"shapes tell: {_listed(found.parts)}; write a layout, see docs/layouts.md"
            )
        read[side] = layer
    return d_model, sides, read


def _is_no_weight(key: str, tensor: Tensor) -> bool:
    """Say whether a tensor is a counter, a number or a causal mask: nothing that is learned."""
    is_named = bool(words.field(key.rpartition(".")[2])[1])
    if not tensor.is_floating_point() or tensor.dim() == 0 or (tensor.numel() == 1 and not is_named):
        return True
    rows, columns = tensor.shape[-2:] if tensor.dim() > 1 else (0, 1)
    if rows != columns or rows < 2 or tensor.numel() != rows * columns:
        return False
    square = tensor.reshape(rows, columns)
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
        listed = ", ".join(sorted(rest)[:8])
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
        prefixes = ", ".join(found.prefix + "*" for found in layers)
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
    shown = [f"{part.name} {list(part.shape)}" for part in parts[:12]]
    return ", ".join(shown) + (" …" if len(parts) > 12 else "")
