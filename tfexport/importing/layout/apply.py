"""Apply a layout: convert a state dict to the canonical model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from tfexport.config import MAX_SIZE
from tfexport.errors import CheckpointError, ConfigError, raise_all, shortened
from tfexport.importing.layout._grammar import Match, Names, matches
from tfexport.importing.layout.layout import (
    SIDES,
    Derived,
    Layout,
    Line,
    override,
    parse_derived,
    parse_line,
    parse_post,
)
from tfexport.importing.layout.ops import Context, Step, product, run, sinusoid
from tfexport.importing.layout.sizes import check_shapes, expected_shapes, read_config, read_tokens
from tfexport.nn.config import TransformerConfig
from tfexport.nn.switches import Value
from tfexport.nn.transformer import Transformer, on_meta

# Decoding needs these ids, but comparing does not.
PLACEHOLDERS: dict[str, Value] = {"tokens.pad": 0, "tokens.start": 0, "tokens.eos": 0}
_MAX_HEADS = 64
_EMBEDDING = "enc.embed.weight"
_CROSS = re.compile(r"dec\.layers\.\d+\.cross\.[kv]\.weight")
FOLDED_PROJECTION = "post enc.proj"  # the use of tensors that this fold reads or changes
# Architectures that the canonical model does not support, and the patterns of their keys.
_UNSUPPORTED = {
    "relative positions by Shaw": r"rel(ative)?_(pos(itions?)?_?)?(keys?|values?|k|v)(_emb\w*)?\b",
    "a mixture of experts": r"experts?\b|\brouter\b",
    "a copy mechanism": r"copy_?(attn|gen)|pointer_?gen|\bp_gen\b",
    "talking heads": r"talking",
    "an adaptive softmax": r"adaptive_softmax|out_layers\.\d+",
    "memory tokens": r"mem(ory)?_(kv|tokens?|keys?)\b",
    "a recurrent layer": r"weight_(ih|hh)_l\d|\b(lstm|gru)\b",
}


class LineUse(NamedTuple):
    """A layout line, the keys it used, and the canonical tensors it made or changed."""

    line: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Canonical:
    """A checkpoint in canonical form; tied tensors have each of their names."""

    config: TransformerConfig
    tensors: dict[str, Tensor]
    lines: tuple[LineUse, ...]
    notes: tuple[str, ...] = ()

    def model(self) -> Transformer:
        """Make the model in eval mode; it shares the tensors."""
        with on_meta():
            model = Transformer(self.config)
        model.load_state_dict(self.tensors, assign=True)
        model._tie()
        return model.eval()


def apply_layout(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    *,
    heads: int | None = None,
    settings: Mapping[str, Value] | None = None,
    attributes: Mapping[str, Tensor] | None = None,
) -> Canonical:
    """Convert a state dict to the canonical model; every key and line must match.

    The values are read only if all names and shapes fit. `settings` replace the layout's switches and tokens.
    `attributes` are tensors outside of the state dict, for `derive: attr`. The CheckpointError lists every problem.
    """
    layout = override(layout, {**(settings or {}), **({} if heads is None else {"num_heads": heads})})
    execution = _Execution(layout, tensors, attributes or {})
    problems = execution.problems
    # Checked only if names do not fit, because an ignored buffer may have any name.
    problems += unsupported(tensors) if problems else []
    used = {key for *_, pair in execution.pairs for key in pair.sources}
    problems += [
        f"key {key[:120]} holds {str(tensor.dtype).removeprefix('torch.')}, expected floating point"
        for key, tensor in tensors.items()
        if key in used and not tensor.is_floating_point()
    ]
    for keys in layout.assert_tied:
        first, *others = [key for key in keys if key in tensors] or [""]
        problems += [
            f"{first} and {other} differ, but the layout ties them"
            for other in others
            if not _same(tensors[first], tensors[other])
        ]
    sizes, config, filled = _checked(execution)
    # Problems of both sides are reported once.
    raise_all(CheckpointError, f"layout {layout.name}", list(dict.fromkeys(problems)))
    assert config is not None
    made = execution.run(tensors, sizes)
    raise_all(CheckpointError, f"layout {layout.name}", problems or _not_finite(made, execution))
    made |= {name: next(iter(made.values())).new_zeros(shape) for name, shape in filled.items()}
    notes = (f"{len(filled)} missing biases are set to 0, {next(iter(filled))} first",) if filled else ()
    complete = {name: made[name].contiguous() for name in expected_shapes(config)}
    if config.decoder is not None:  # equal tables are stored once
        table = complete["dec.embed.weight"]
        is_tied = _EMBEDDING in complete and _same(complete[_EMBEDDING], table)
        is_output = _same(complete["out.weight"], table)
        config = replace(config, tie_embeddings=is_tied, tie_output=is_output)
    return Canonical(config, complete, tuple(execution.uses), notes)


def setting_conflicts(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Value],
    attributes: Mapping[str, Tensor] | None = None,
) -> list[str] | None:
    """Describe settings that do not fit; None if the layout itself does not."""
    heads = possible_heads(layout, tensors, attributes)
    usual = override(layout, {**PLACEHOLDERS, "num_heads": heads[0]}) if heads else layout
    found = []
    for changes in ({}, settings):
        try:
            execution = _Execution(override(usual, changes), tensors, attributes or {})
        except ConfigError as error:  # a token without an id
            found.append(list(error.problems))
            continue
        _checked(execution)
        found.append(list(dict.fromkeys(execution.problems)))
    return found[1] if heads and not found[0] else None


def fits_names(layout: Layout, keys: Iterable[str]) -> bool:
    """Return whether every key matches exactly one line, and every line a key."""
    lines = [parse_line(text) for text in layout.map]
    is_ignored, used = _ignored(layout), set[int]()
    for key in keys:
        taking = [number for number, line in enumerate(lines) if line.rule.match(key)]
        if len(taking) + is_ignored(key) != 1:
            return False
        used.update(taking)
    return all(line.optional or number in used for number, line in enumerate(lines))


def unmatched(layout: Layout, keys: Iterable[str]) -> tuple[list[str], list[str], bool]:
    """Return the keys without a line, ignored keys, and whether all lines match."""
    lines = [parse_line(text) for text in layout.map]
    is_ignored, used, left, ignored = _ignored(layout), set[int](), list[str](), list[str]()
    for key in keys:
        taking = [number for number, line in enumerate(lines) if line.rule.match(key)]
        used.update(taking)
        if is_ignored(key):
            ignored.append(key)
        elif not taking:
            left.append(key)
    return left, ignored, all(line.optional or number in used for number, line in enumerate(lines))


def possible_heads(
    layout: Layout, tensors: Mapping[str, Tensor], attributes: Mapping[str, Tensor] | None = None
) -> list[int]:
    """Return the head counts that the shapes allow; empty if the names do not fit."""
    execution = _Execution(override(layout, {"num_heads": 1}), tensors, attributes or {})
    _, made = _on_meta(execution)
    rows = {name: tensor.shape[0] for name, tensor in made.items() if tensor.dim()}
    attentions = [name[: -len("q.weight")] for name in rows if name.endswith((".self.q.weight", ".cross.q.weight"))]
    is_turned = layout.switch("positions") == "rotary"

    def fits(heads: int, attention: str) -> bool:
        query = rows[f"{attention}q.weight"]
        key, value = (rows.get(f"{attention}{part}.weight", query) for part in "kv")
        width = query // heads
        if query % heads or (is_turned and width % 2):
            return False
        if key % width or heads % (key // width) or value % (key // width):
            return False
        return rows.get(f"{attention}q_norm.weight", query) in (query, width)

    most = _MAX_HEADS if attentions else 0
    return [heads for heads in range(1, most + 1) if all(fits(heads, attention) for attention in attentions)]


def unsupported(keys: Iterable[str]) -> list[str]:
    """List the unsupported architectures that keys reveal, with the first key of each."""
    keys = list(keys)
    kinds = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _UNSUPPORTED.items()}
    firsts = {name: next(filter(pattern.search, keys), "") for name, pattern in kinds.items()}
    problem = "which the canonical model does not support"
    return [f"key {key[:120]} looks like {name}, {problem}" for name, key in firsts.items() if key]


def _on_meta(execution: _Execution) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]]:
    layout = execution.layout
    meta = {key: tensor.to("meta") for key, tensor in execution.tensors.items()}
    names: dict[str, float] = {"d_model": 1.0, "num_heads": 1.0, "d_k": 1.0, **read_tokens(layout)}
    widths = execution.widths(meta, names)
    if widths is None:
        return {}, {}
    sizes = {side: {**names, "d_model": float(widths[side])} for side in SIDES}
    for side in SIDES:
        if isinstance(heads := layout.switch("num_heads", side), int) and heads > 0:
            sizes[side]["num_heads"] = float(heads)
    return sizes, execution.run(meta, sizes)


def _checked(
    execution: _Execution,
) -> tuple[dict[str, dict[str, float]], TransformerConfig | None, dict[str, tuple[int, ...]]]:
    """Return sizes, configuration and missing biases; append every problem."""
    sizes, meta = _on_meta(execution)
    shapes = {name: tuple(tensor.shape) for name, tensor in meta.items()}
    config = read_config(execution.layout, shapes, sizes, execution.problems) if shapes else None
    return sizes, config, check_shapes(config, shapes, execution.problems) if config else {}


def _not_finite(made: Mapping[str, Tensor], execution: _Execution) -> list[str]:
    origin = {target: pair.sources[0] for *_, pair in execution.pairs for target in pair.targets}
    return [
        f"{origin.get(name, name)[:120]} holds NaN or infinity; take a checkpoint from before the training diverged"
        for name, tensor in made.items()
        if not tensor.isfinite().all()
    ]


def _ignored(layout: Layout) -> Callable[[str], bool]:
    # Keys without wildcards are looked up, which is faster.
    whole = frozenset(layout.ignore)
    patterns = [pattern for pattern in layout.ignore if set("*?[") & set(pattern)]
    return lambda key: key in whole or any(fnmatchcase(key, pattern) for pattern in patterns)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, or on "meta" could be equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Two NaN count as equal, so that only the error about NaN is raised.
    return one.is_meta or one is other or torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True)


class _Execution:
    """A layout matched with a state dict; it runs for shapes, then for values."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], attributes: Mapping[str, Tensor]) -> None:
        self.layout, self.tensors, self.attributes = layout, tensors, attributes
        self.problems: list[str] = []
        self.uses: list[LineUse] = []
        self.pairs: list[tuple[int, Line, Match]] = []  # with the number of the line, from 1
        used: dict[str, int] = {}
        for number, text in enumerate(layout.map, 1):
            line = parse_line(text)
            found = matches(line.rule, tensors)
            if not found and not line.optional:
                self.problems.append(f"map {number} {shortened(text)}: no key matches")
            self.pairs += [(number, line, pair) for pair in found]
            self.problems += [
                f"key {key[:120]} is used twice, by map {used[key]} and map {number}"
                for pair in found
                for key in pair.sources
                if used.setdefault(key, number) != number
            ]
        is_ignored = _ignored(layout)
        self.problems += [
            f"key {key[:120]} is {'both used and ignored' if key in used else 'not used; map or ignore it'}"
            for key in tensors
            if (key in used) == is_ignored(key)
        ]

    def widths(self, meta: Mapping[str, Tensor], names: Names) -> dict[str, int] | None:
        """Return d_model of both sides."""
        # An encoder of features or images has no table.
        if self.layout.features is None and self.layout.image is None:
            width = self._width(_EMBEDDING, meta, names)
            return None if width is None else dict.fromkeys(SIDES, width)
        width = self._width("enc.layers.0.norm1.weight", meta, names)
        has_decoder = any(target.startswith("dec.") for *_, pair in self.pairs for target in pair.targets)
        other = self._width("dec.embed.weight", meta, names) if has_decoder else width
        return None if width is None or other is None else {"enc": width, "dec": other}

    def _width(self, name: str, meta: Mapping[str, Tensor], names: Names) -> int | None:
        expected = ["vocab", "d_model"] if name.endswith("embed.weight") else ["d_model"]
        for number, line, pair in self.pairs:
            if name in pair.targets:
                found = self._run_pair(number, line, pair, meta, names)
                shape = list(found[pair.targets.index(name)].shape) if found else []
                if len(shape) == len(expected):
                    return shape[-1]
                self.problems.append(f"{pair.sources[0]} becomes {name} {shape}, expected [{', '.join(expected)}]")
                return None
        self.problems.append(f"{name} is missing; map a key to it")
        return None

    def run(self, tensors: Mapping[str, Tensor], names: Mapping[str, Names]) -> dict[str, Tensor]:
        # `tensors` may be on "meta"; `names` has the sizes of "enc" and "dec".
        made: dict[str, Tensor] = {}
        origin: dict[str, str] = {}
        used: dict[int, list[Match]] = {}
        for number, line, pair in self.pairs:
            used.setdefault(number, []).append(pair)
            parts = self._run_pair(number, line, pair, tensors, names[_side(pair.targets[0])])
            for name, tensor in zip(pair.targets, parts, strict=False):
                if name in made and not _same(made[name], tensor):
                    self.problems.append(f"{name} comes from {origin[name]} and from {pair.sources[0]}, which differ")
                made.setdefault(name, tensor)
                origin.setdefault(name, pair.sources[0])
        self.uses = [
            LineUse(
                self.layout.map[number - 1],
                tuple(key for pair in own for key in pair.sources),
                tuple(dict.fromkeys(name for pair in own for name in pair.targets)),
            )
            for number, own in used.items()
        ]
        for target, text in self.layout.derive.items():
            given = [
                name
                for name in _of_layers(target, made)
                if name not in made and self._derive(name, parse_derived(text), made, Context(names[_side(name)]))
            ]
            if given:
                self.uses.append(LineUse(f"derive {target}: {text}", (), tuple(given)))
        for number, text in enumerate(self.layout.post, 1):
            line = parse_post(text)
            found = [match.targets[0] for match in matches(line.rule, made)]
            if not found:
                self.problems.append(f"post {number} {shortened(text)}: no tensor matches")
            changed = {}
            for name in found:
                context = Context(names[_side(name)], target=name, made=made)
                if folded := self._folded(f"post {number}: {name}", line.steps, [made[name]], context):
                    changed[name] = folded[0]
            made |= changed
            self.uses.append(LineUse(f"post {text}", (), tuple(changed)))
        self._fold_projection(made)
        return made

    def _fold_projection(self, made: dict[str, Tensor]) -> None:
        """Fold `enc.proj`, a linear map between the sides, into cross-attention."""
        if (weight := made.pop("enc.proj.weight", None)) is None:
            return
        bias, changed = made.pop("enc.proj.bias", None), dict[str, Tensor]()
        for name in [name for name in made if _CROSS.fullmatch(name)]:
            before, offset = made[name], name.replace("weight", "bias")
            try:
                changed[name] = product(before, weight)
                if bias is not None:
                    changed[offset] = product(before, bias, made.get(offset))
            except CheckpointError as error:
                self.problems.append(f"enc.proj before {name}: {error}")
        made |= changed
        self.uses.append(LineUse(FOLDED_PROJECTION, (), ("enc.proj.weight", "enc.proj.bias", *changed)))

    def _run_pair(
        self, number: int, line: Line, pair: Match, tensors: Mapping[str, Tensor], names: Names
    ) -> list[Tensor]:
        context = Context(names, len(pair.targets))
        if line.rule.joins_heads and len(pair.sources) != context.heads:
            problem = f"{pair.targets[0]} has {len(pair.sources)} heads, expected {context.heads}"
            self.problems.append(f"map {number}: {problem}")
            return []
        place = f"map {number}: {pair.sources[0][:120]}"
        return self._folded(place, line.steps, [tensors[key] for key in pair.sources], context)

    def _derive(self, name: str, derived: Derived, made: dict[str, Tensor], context: Context) -> bool:
        start = self._start(derived, _side(name), made, context)
        if isinstance(start, str):
            self.problems.append(f"derive {name}: {start}")
            return False
        if next(iter(made.values()), start).is_meta:
            start = start.to("meta")
        folded = self._folded(f"derive {name}", derived.steps, [start], context)
        if folded:
            made[name] = folded[0]
        return bool(folded)

    def _start(self, derived: Derived, side: str, made: Mapping[str, Tensor], context: Context) -> Tensor | str:
        width, argument = int(context.names["d_model"]), derived.argument
        if derived.kind == "tie":
            return made.get(argument, f"{argument} is missing")
        if derived.kind == "attr":
            known = ", ".join(self.attributes) or "nothing"
            missing = f"no tensor {argument} outside of the state dict, only {known}; record reference outputs"
            return self.attributes.get(argument, missing)
        if derived.kind == "ones":
            return next(iter(made.values())).new_ones(width)
        length = self.layout.switch("max_length", side)
        if not isinstance(length, int) or not 0 < length <= MAX_SIZE:
            return "the length of a computed table is not known; give --set max_length=N"
        cut = sum(context.whole(step.arguments[0]) for step in derived.steps if step.name == "slice")
        return sinusoid(argument, length + cut, width)

    def _folded(self, place: str, steps: Sequence[Step], tensors: Sequence[Tensor], context: Context) -> list[Tensor]:
        try:
            parts = run(steps, tensors, context)
        except (CheckpointError, ConfigError, RuntimeError, IndexError) as error:
            self.problems.append(f"{place} {list(tensors[0].shape)}: {str(error).splitlines()[0]}")
            return []
        if len(parts) != context.parts:
            self.problems.append(f"{place} becomes {len(parts)} tensors, the line names {context.parts}")
            return []
        return parts


def _side(name: str) -> str:
    return "enc" if name.startswith("enc.") else "dec"


def _of_layers(target: str, made: Iterable[str]) -> list[str]:
    if "{i}" not in target:
        return [target]
    before, after = target.split("{i}")
    indices = {name.removeprefix(before).split(".")[0] for name in made if name.startswith(before)}
    return [f"{before}{index}{after}" for index in sorted(indices, key=int)]
