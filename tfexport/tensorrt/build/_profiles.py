"""Create the optimization profiles of all engines of a bundle.

A shape in trtexec's syntax sets dimensions, not tensors. "source_ids:4x64" sets batch = 4 and source_len = 64 in all
inputs of all engines, so that they are consistent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tfexport.contract import NUM_CANDIDATES, REORDER, Dim, GraphSpec, ModelSpec, TensorSpec, Variant
from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.precision import FLOAT, ITEM_BYTES
from tfexport.sources import FRAMES, SOURCE_LEN, FeatureSource, SourceKind
from tfexport.tensorrt.config import (
    EngineConfig,
    EngineLimits,
    Profile,
    Shape,
    ShapeRange,
    concatenates,
    decoder_plans,
    default_capacities,
    plan_contract,
    plan_names,
    updates_in_place,
)

# Candidates of a step by default, and the limit of TensorRT's TopK.
MAX_CANDIDATES, TOPK_LIMIT = 256, 3840
# TensorRT counts the elements of a tensor in 32 bits.
MAX_ELEMENTS = 2**31 - 1

# Tokens of a prompt that a decoder reads at once by default; a session splits longer prompts. The activations of a
# prefill grow linearly with it, in fp32 quadratically.
PREFIX_PIECE = 16

# Allowed minimum of each range; (1,) for all others. A session needs the smallest sizes, because it starts without past
# and its last source is a batch of one. A prefill of one token is a step.
_LEAST = {"past_len": (0,), "target_len": (1, 2)}

Bound = Literal["min", "opt", "max"]
_BOUNDS: tuple[Bound, ...] = ("min", "opt", "max")
_ENTRY = re.compile(r"\s*(.+):([0-9]{1,9}(?:x[0-9]{1,9})*)\s*")


class Range(NamedTuple):
    """Smallest, usual (tuned) and largest size of a dimension."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class Profiles:
    limits: EngineLimits
    engines: Mapping[str, tuple[Profile, ...]]  # by plan


def make_profiles(spec: ModelSpec, variant: Variant, config: EngineConfig) -> Profiles:
    """Derive the profiles of all engines; raise `ConfigError` with every problem."""
    problems = _limit_problems(spec, variant, config)
    raise_all(ConfigError, "engine", problems)
    limits = _limits(spec, variant, config)
    decoders = decoder_plans(variant, limits) if spec.has_decoder and spec.cache.grows else {}
    plans = plan_names(variant if spec.has_decoder else None, limits)
    graphs = {plan: plan_contract(plan, spec, variant) for plan in plans}
    # Sizes of the reorder follow from those of the decoder.
    inputs = [tensor for plan in plans if plan != REORDER for tensor in graphs[plan].inputs]
    # The syntax can name only the largest capacity.
    fixed = {"capacity": limits.max_target_length, **_fixed(spec.source)}
    dims = {tensor.name: tuple(fixed.get(str(dim), dim) for dim in _dims(tensor)) for tensor in inputs}
    bound = {bound: _bind(bound, config, dims, problems) for bound in _BOUNDS}
    ranges = _ranges(spec, variant, limits, max(PREFIX_PIECE, bound["opt"].get("target_len", 0)))
    _follow(spec.source, bound, problems)
    overridden = {name for sizes in bound.values() for name in sizes}
    for name in overridden & ranges.keys():
        ranges[name] = _override(ranges[name], {b: sizes[name] for b, sizes in bound.items() if name in sizes})
    problems += _range_problems(spec, ranges, overridden)
    raise_all(ConfigError, "engine", problems)
    if spec.has_decoder:
        ranges["width"] = _widths(spec, limits.max_target_length, ranges)
    largest = {name: size.max for name, size in ranges.items()}
    limits = replace(limits, max_batch=largest["batch"], max_source_length=largest[SOURCE_LEN])
    ranges |= _input_ranges(spec.source, ranges[SOURCE_LEN])
    if spec.has_decoder:
        limits = replace(limits, max_candidates=largest["num_candidates"])
        if concatenates(spec, variant):
            limits = replace(limits, max_target_length=largest["past_len"] + 1)
    engines = {plan: _profiles(graphs[plan], ranges, decoders.get(plan)) for plan in plans}
    raise_all(ConfigError, "engine", list(_size_problems(engines)))
    return Profiles(limits, engines)


def _limit_problems(spec: ModelSpec, variant: Variant, config: EngineConfig) -> list[str]:
    problems = []
    for name in ("max_source_length", "max_target_length"):
        wanted, most = getattr(config, name), getattr(spec, name)
        if name == "max_source_length" and wanted is not None and spec.source.fits(wanted) > wanted:
            fixed = f"every source has {spec.source.fits(wanted)} positions"
            problems.append(f"{name} is {wanted}, but {fixed}; leave it out")
        if wanted is not None and wanted > most:
            remedy = "export the bundle with more" if most else "leave it out for an encoder-only bundle"
            problems.append(f"{name} is {wanted}, the bundle has {most}; {remedy}")
    if config.capacities:
        most = config.max_target_length or spec.max_target_length
        listed = f"capacities are {', '.join(map(str, config.capacities))}"
        if not spec.has_decoder or not updates_in_place(spec, variant):
            problems.append(f"{listed}, which are only for static decoders; leave them out")
        elif config.capacities[-1] > most:
            problems.append(f"{listed}, expected at most max_target_length, {most}")
    return problems


def _limits(spec: ModelSpec, variant: Variant, config: EngineConfig) -> EngineLimits:
    longest = config.max_target_length or spec.max_target_length
    capacities: tuple[int, ...] = ()
    if spec.has_decoder and updates_in_place(spec, variant):
        shorter = tuple(capacity for capacity in config.capacities if capacity < longest)
        capacities = (*shorter, longest) if config.capacities else default_capacities(longest)
    return EngineLimits(
        max_batch=config.max_batch,
        max_source_length=spec.source.fits(config.max_source_length or spec.max_source_length),
        max_target_length=longest,
        max_candidates=min(spec.vocab, MAX_CANDIDATES),
        capacities=capacities,
    )


def _ranges(spec: ModelSpec, variant: Variant, limits: EngineLimits, piece: int) -> dict[str, Range]:
    # `target_len` is the size of a prefill, which reads `piece` tokens of a prompt at once.
    least, longest = spec.source.fits(1), limits.max_source_length
    ranges = {"batch": _up_to(limits.max_batch), SOURCE_LEN: Range(least, max((longest + 1) // 2, least), longest)}
    if spec.has_decoder:
        most = limits.max_target_length
        ranges |= {
            "rows": _up_to(limits.max_batch),
            "new_rows": _up_to(limits.max_batch),
            "target_len": _up_to(min(most, piece)),
            "num_candidates": Range(1, 1, limits.max_candidates),
        }
        if concatenates(spec, variant):
            ranges["past_len"] = Range(0, (most - 1) // 2, most - 1)
    return ranges


def _widths(spec: ModelSpec, capacity: int, ranges: Mapping[str, Range]) -> Range:
    # Elements in a row of a cache, which has `capacity` target tokens or a source's tokens, or of a state.
    if not spec.cache.grows:
        width = spec.cache.num_bytes(1, 0)[0] // ITEM_BYTES[FLOAT[spec.precision]]
        return Range(width, width, width)
    narrow, wide = sorted((spec.cache_heads * spec.head_dim, spec.cache_heads * spec.value_dim))
    longest = max(capacity, ranges["source_len"].max, ranges["past_len"].max if "past_len" in ranges else 0)
    return Range(narrow, wide * capacity, wide * longest)


def _input_ranges(kind: SourceKind, lengths: Range) -> dict[str, Range]:
    """Return the ranges of the inputs' axes; sessions pad to whole positions."""
    sizes = [kind.sizes(length) for length in lengths]
    return {dim: Range(*(size[dim] for size in sizes)) for dim in sizes[0]}


def _fixed(kind: SourceKind) -> dict[str, int]:
    """Return the dimensions that every source has, if all have one length."""
    positions = kind.fits(1)
    return {**kind.sizes(positions), SOURCE_LEN: positions} if positions == kind.fits(2) else {}


def _up_to(most: int) -> Range:
    return Range(1, (most + 1) // 2, most)


def _bind(
    bound: Bound, config: EngineConfig, named: Mapping[str, tuple[Dim, ...]], problems: list[str]
) -> dict[str, int]:
    option = f"{bound}_shapes"
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    for name, shape in _entries(option, getattr(config, option), problems):
        if name not in named:
            problems.append(f"{option} has {shortened(name)}, expected one of {', '.join(named)}")
            continue
        dims = named[name]
        spelled = "x".join(map(str, dims))
        if len(shape) != len(dims):
            problems.append(f"{option} has {name} with {len(shape)} sizes, expected {spelled}")
            continue
        for dim, size in zip(dims, shape, strict=True):
            if isinstance(dim, int):
                if size != dim:
                    problems.append(f"{option} has {size} in {name}, expected {dim} of {spelled}, which is fixed")
            elif sizes.setdefault(dim, size) != size:
                problems.append(f"{option} has {dim} {sizes[dim]} in {source[dim]} and {size} in {name}, expected one")
            else:
                source.setdefault(dim, name)
    return sizes


def _dims(tensor: TensorSpec) -> tuple[Dim, ...]:
    # Profiles contain the value of a shape input, not its shape.
    return (NUM_CANDIDATES,) if tensor.name == NUM_CANDIDATES else tensor.shape


def _entries(option: str, text: str, problems: list[str]) -> Iterator[tuple[str, Shape]]:
    # trtexec's syntax, "name:1x2,other:3". A name may contain dots and colons.
    seen = set()
    for entry in text.split(",") if text.strip() else ():
        match = _ENTRY.fullmatch(entry)
        if match is None:
            problems.append(f"{option} has {shortened(entry)}, expected name:1x2x3")
        elif match[1] in seen:
            problems.append(f"{option} has {match[1]} twice")
        else:
            seen.add(match[1])
            yield match[1], tuple(int(size) for size in match[2].split("x"))


def _follow(kind: SourceKind, bound: Mapping[Bound, dict[str, int]], problems: list[str]) -> None:
    # Each of `batch` and `rows` defaults to the other; `new_rows` always equals `rows`. Frames set the positions.
    for name, sizes in bound.items():
        if isinstance(kind, FeatureSource) and FRAMES in sizes:
            positions = kind.positions(frames := sizes.pop(FRAMES))
            if sizes.setdefault(SOURCE_LEN, positions) != positions:
                got = f"{frames} frames, which become {positions} positions, and source_len {sizes[SOURCE_LEN]}"
                problems.append(f"{name}_shapes has {got}; leave one of them out")
        for one, other in (("batch", "rows"), ("rows", "batch")):
            if one in sizes:
                sizes.setdefault(other, sizes[one])
        if "rows" in sizes:
            sizes["new_rows"] = sizes["rows"]


def _override(size: Range, bounds: Mapping[Bound, int]) -> Range:
    # An `opt` size that is not set is clamped to the bounds.
    least, most = bounds.get("min", size.min), bounds.get("max", size.max)
    return Range(least, bounds.get("opt", min(max(size.opt, least), most)), most)


def _range_problems(spec: ModelSpec, ranges: Mapping[str, Range], overridden: set[str]) -> list[str]:
    most = {
        "source_len": (spec.max_source_length, "the bundle has"),
        "target_len": (spec.max_target_length, "the bundle has"),
        "past_len": (spec.max_target_length - 1, "the bundle leaves"),
        "num_candidates": (min(spec.vocab, TOPK_LIMIT), "a step returns at most"),
    }
    problems = []
    for name, size in ranges.items():
        if name in overridden and name != "new_rows":
            if size.min not in _LEAST.get(name, (1,)):
                least = " or ".join(map(str, _LEAST.get(name, (1,))))
                problems.append(f"{name} begins at {size.min}, expected {least}, the smallest that a session uses")
            if not size.min <= size.opt <= size.max:
                problems.append(f"{name} has min {size.min}, opt {size.opt}, max {size.max}, expected them in order")
            if name in most and size.max > most[name][0]:
                problems.append(f"{name} reaches {size.max}, {most[name][1]} {most[name][0]}")
    # Each source has the same number of rows, its beams. One number limits sources and rows.
    batch = ranges["batch"]
    rows = ranges.get("rows", batch)
    for bound, of_batch, of_rows in (("min", batch.min, rows.min), ("opt", batch.opt, rows.opt)):
        if of_batch and of_rows % of_batch:
            problems.append(f"{bound} has batch {of_batch} and rows {of_rows}, expected a multiple")
    if rows.max != batch.max:
        problems.append(f"max has batch {batch.max} and rows {rows.max}, expected them equal")
    return problems


def _size_problems(engines: Mapping[str, tuple[Profile, ...]]) -> Iterator[str]:
    for plan, profiles in engines.items():
        largest = max((shape.max for profile in profiles for shape in profile.values()), key=math.prod)
        if (number := math.prod(largest)) > MAX_ELEMENTS:
            spelled = "x".join(map(str, largest))
            remedy = "lower max_batch or the maximum lengths"
            yield f"{plan} reads up to {spelled} = {number:,} elements, the limit is {MAX_ELEMENTS:,}; {remedy}"


def _profiles(graph: GraphSpec, ranges: Mapping[str, Range], capacity: int | None) -> tuple[Profile, ...]:
    # A prefill has at least two tokens, because a single token is a step. If the range includes one, TensorRT-RTX 1.7.1
    # does not fuse attention of the concat variant from the third layer on, and needs gigabytes.
    if capacity is None:
        return (_profile(graph, ranges),)
    target = ranges["target_len"]
    most = min(target.max, capacity)
    lengths = [Range(1, 1, 1), *([Range(2, min(max(2, target.opt), most), most)] if most > 1 else [])]
    fixed = {**ranges, "capacity": Range(capacity, capacity, capacity)}
    return tuple(_profile(graph, {**fixed, "target_len": length}) for length in lengths)


def _profile(graph: GraphSpec, ranges: Mapping[str, Range]) -> Profile:
    profile = {}
    for tensor in graph.inputs:
        sizes = [(dim, dim, dim) if isinstance(dim, int) else ranges[dim] for dim in _dims(tensor)]
        profile[tensor.name] = ShapeRange(*zip(*sizes, strict=True))
    return profile
