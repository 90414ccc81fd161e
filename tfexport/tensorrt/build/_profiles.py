"""Create the optimization profiles of all engines of a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tfexport.contract import NUM_CANDIDATES, Dim, GraphSpec, ModelSpec, TensorSpec, Variant
from tfexport.errors import ConfigError, raise_all
from tfexport.sources import SOURCE_LEN, SourceKind
from tfexport.tensorrt.config import (
    EngineConfig,
    EngineLimits,
    Profile,
    ShapeRange,
    decoder_plans,
    default_capacities,
    plan_contract,
    plan_names,
)

# Candidates of a step by default, and the limit of TensorRT's TopK.
MAX_CANDIDATES, TOPK_LIMIT = 256, 3840

# Tokens of a prompt that a decoder reads at once by default; a session splits longer prompts. The activations of a
# prefill grow linearly with it, in fp32 quadratically.
PREFIX_PIECE = 16


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
    raise_all(ConfigError, "engine", [*_problems(spec, variant, config)])
    limits = _limits(spec, variant, config)
    decoders = decoder_plans(variant, limits) if spec.has_decoder else {}
    ranges = _ranges(spec, variant, limits, config)
    plans = plan_names(variant if spec.has_decoder else None, limits)
    return Profiles(
        limits, {plan: _profiles(plan_contract(plan, spec, variant), ranges, decoders.get(plan)) for plan in plans}
    )


def _problems(spec: ModelSpec, variant: Variant, config: EngineConfig) -> Iterator[str]:
    longest = min(config.max_target_length or spec.max_target_length, spec.max_target_length)
    most = {
        "max_source_length": (spec.max_source_length, "the bundle has {}; export the bundle with more"),
        "max_target_length": (spec.max_target_length, "the bundle has {}; export the bundle with more"),
        "max_candidates": (min(spec.vocab, TOPK_LIMIT), "a step returns at most {}; lower it"),
        "max_prefill": (longest, "a target has at most {}; lower it"),
        "opt_batch": (config.max_batch, "max_batch is {}; lower it"),
        "opt_source_length": (config.max_source_length or spec.max_source_length, "the maximum is {}; lower it"),
    }
    for name, (limit, problem) in most.items():
        given = getattr(config, name)
        if given is not None and not limit:
            yield f"{name} is {given}; leave it out for an encoder-only bundle"
        elif given is not None and given > limit:
            yield f"{name} is {given}, {problem.format(limit)}"
    for name in ("max_source_length", "opt_source_length"):
        given = getattr(config, name)
        if given is not None and (fixed := spec.source.fits(given)) != given:
            yield f"{name} is {given}, but every source has {fixed} positions; leave it out"
    if config.capacities:
        listed = f"capacities are {', '.join(map(str, config.capacities))}"
        if not spec.has_decoder or variant != "static":
            yield f"{listed}, which are only for static decoders; leave them out"
        elif config.capacities[-1] > longest:
            yield f"{listed}, expected at most max_target_length, {longest}"


def _limits(spec: ModelSpec, variant: Variant, config: EngineConfig) -> EngineLimits:
    longest = config.max_target_length or spec.max_target_length
    capacities: tuple[int, ...] = ()
    if spec.has_decoder and variant == "static":
        shorter = tuple(capacity for capacity in config.capacities if capacity < longest)
        capacities = (*shorter, longest) if config.capacities else default_capacities(longest)
    return EngineLimits(
        max_batch=config.max_batch,
        max_source_length=spec.source.fits(config.max_source_length or spec.max_source_length),
        max_target_length=longest,
        max_candidates=config.max_candidates or min(spec.vocab, MAX_CANDIDATES),
        capacities=capacities,
    )


def _ranges(spec: ModelSpec, variant: Variant, limits: EngineLimits, config: EngineConfig) -> dict[str, Range]:
    # A session needs the smallest sizes, because it starts without past and its last source is a batch of one.
    least, longest, most = spec.source.fits(1), limits.max_source_length, limits.max_target_length
    batch = _up_to(limits.max_batch, config.opt_batch)
    lengths = Range(least, max(config.opt_source_length or (longest + 1) // 2, least), longest)
    ranges = {"batch": batch, SOURCE_LEN: lengths, **_input_ranges(spec.source, lengths)}
    if spec.has_decoder:
        prefill = _up_to(min(most, config.max_prefill or PREFIX_PIECE))
        candidates = Range(1, 1, limits.max_candidates)
        ranges |= {"rows": batch, "new_rows": batch, "target_len": prefill, "num_candidates": candidates}
        if variant == "concat":
            ranges["past_len"] = Range(0, (most - 1) // 2, most - 1)
        ranges["width"] = _widths(spec, most, longest)
    return ranges


def _widths(spec: ModelSpec, capacity: int, source_length: int) -> Range:
    # Elements in a row of a cache, which has `capacity` target tokens or a source's tokens.
    narrow, wide = sorted((spec.cache_heads * spec.head_dim, spec.cache_heads * spec.value_dim))
    return Range(narrow, wide * capacity, wide * max(capacity, source_length))


def _input_ranges(kind: SourceKind, lengths: Range) -> dict[str, Range]:
    """Return the ranges of the inputs' axes; sessions pad to whole positions."""
    sizes = [kind.sizes(length) for length in lengths]
    return {dim: Range(*(size[dim] for size in sizes)) for dim in sizes[0]}


def _up_to(most: int, usual: int | None = None) -> Range:
    return Range(1, usual or (most + 1) // 2, most)


def _dims(tensor: TensorSpec) -> tuple[Dim, ...]:
    # Profiles contain the value of a shape input, not its shape.
    return (NUM_CANDIDATES,) if tensor.name == NUM_CANDIDATES else tensor.shape


def _profiles(graph: GraphSpec, ranges: Mapping[str, Range], capacity: int | None) -> tuple[Profile, ...]:
    # A prefill has at least two tokens if the capacity allows it; a single token is a step. If the range includes one,
    # TensorRT-RTX 1.7.1 does not fuse attention of the concat variant from the third layer on, and needs gigabytes.
    if capacity is None:
        return (_profile(graph, ranges),)
    target = ranges["target_len"]
    most = min(target.max, capacity)
    prefill = Range(min(2, most), min(max(2, target.opt), most), most)
    fixed = {**ranges, "capacity": Range(capacity, capacity, capacity)}
    return tuple(_profile(graph, {**fixed, "target_len": length}) for length in (Range(1, 1, 1), prefill))


def _profile(graph: GraphSpec, ranges: Mapping[str, Range]) -> Profile:
    profile = {}
    for tensor in graph.inputs:
        sizes = [(dim, dim, dim) if isinstance(dim, int) else ranges[dim] for dim in _dims(tensor)]
        profile[tensor.name] = ShapeRange(*zip(*sizes, strict=True))
    return profile
