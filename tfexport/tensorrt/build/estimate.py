"""What a build would make and need, without building: the answer of `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tfexport.contract import ENCODER, REORDER, ModelSpec, Precision
from tfexport.export.describe import weight_bytes
from tfexport.export.memory import activation_bytes
from tfexport.tensorrt.build.network import Graph
from tfexport.tensorrt.build.resolve import ResolvedBuild
from tfexport.tensorrt.config import EngineConfig, EngineLimits, engine_key
from tfexport.tensorrt.profile import PREFILL, STEP, Profile

_BOUNDS = ("min", "opt", "max")
_ITEM_BYTES: dict[Precision, int] = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Device memory in bytes at the largest shapes.

    Attributes:
        weights: of all plans; each holds its own, every decoder too.
        caches: self-attention and cross-attention keys and values of one batch with beams.
        activations: what the encoder or a step needs, whichever is more, while it computes node by node. The
            library's own number, which may be less or a few times more, is in the build log.
        prefill: what the first prompt of several tokens adds to the activations; 0 for an encoder alone.
    """

    weights: int
    caches: int
    activations: int
    prefill: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What `build_engines` would do.

    Attributes:
        name: of the engine in its bundle.
        library_version: of the target, in full.
        config: with everything decided.
        limits: the most that the engine would take.
        flags: of the builder, by name.
        profiles: by plan, in the order of their index.
        memory: at the largest shapes.
    """

    name: str
    library_version: str
    config: EngineConfig
    limits: EngineLimits
    flags: tuple[str, ...]
    profiles: dict[str, tuple[Profile, ...]]
    memory: Memory

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Write everything for the terminal."""
        config, memory = self.config, self.memory
        kind = ", ".join(part for part in (config.form, config.precision, config.weights) if part)
        lines = [
            f"would build {self.name} with {config.target} {self.library_version}: {kind}",
            f"  for    {', '.join(config.compute_capabilities) or 'the GPU at hand'}",
            f"  flags  {', '.join(self.flags)}",
            *("", "Limits", *(f"  {name:<18} {_spell(value)}" for name, value in asdict(self.limits).items())),
        ]
        for plan, profiles in self.profiles.items():
            for index, profile in enumerate(profiles):
                lines += ["", f"Plan {plan}{_kind(plan, index)}", *_ranges(profile)]
        sizes = (f"  {name:<12} {size / 1e6:>10.1f} MB" for name, size in asdict(memory).items())
        return [*lines, "", "Device memory at these limits, about", *sizes]


def estimate(resolved: ResolvedBuild, graphs: Sequence[Graph]) -> Estimate:
    """Estimate what a resolved build would make and need.

    Args:
        resolved: with nothing left open.
        graphs: that would become plans.

    Raises:
        GraphError: the sizes inside a graph cannot be told.
    """
    limits = resolved.profiles.limits
    # Reordering has nothing between its input and its output.
    computing = [graph for graph in graphs if graph.name != REORDER]
    decoders = [graph for graph in computing if graph.name != ENCODER]
    return Estimate(
        name=engine_key(resolved.config),
        library_version=resolved.library.version,
        config=resolved.config,
        limits=limits,
        flags=resolved.options.flags,
        profiles=dict(resolved.profiles.engines),
        memory=Memory(
            weights=sum(weight_bytes(graph.data) for graph in graphs),
            caches=cache_bytes(resolved.spec, limits),
            activations=max(_activations(resolved, graph, STEP) for graph in computing),
            prefill=max((_activations(resolved, graph, PREFILL) for graph in decoders), default=0),
        ),
    )


def _activations(resolved: ResolvedBuild, graph: Graph, index: int) -> int:
    """Say what a plan needs at the largest shapes of a profile."""
    profile = resolved.profiles.engines[graph.name][index]
    sizes = {
        dim: size
        for tensor in resolved.contract(graph.name).inputs
        for dim, size in zip(tensor.shape, profile[tensor.name].max, strict=True)
        if isinstance(dim, str)
    }
    return activation_bytes(graph.path, sizes)


def cache_bytes(spec: ModelSpec, limits: EngineLimits) -> int:
    """Size the keys and values of a full batch with beams.

    Those of the target are there twice: a step of the concat form and a reorder of beams write from the one to the
    other.

    Args:
        spec: of the model, in the precision of the engine.
        limits: of the engine.
    """
    token = spec.layers * spec.cache_heads * (spec.head_dim + spec.value_dim) * _ITEM_BYTES[spec.precision]
    longest = 2 * limits.max_target_length + limits.max_source_length
    # One cache at a time becomes longer, in a buffer of its own.
    one = spec.cache_heads * max(spec.head_dim, spec.value_dim) * _ITEM_BYTES[spec.precision]
    return limits.max_batch * (token * longest + one * max(limits.max_target_length, limits.max_source_length))


def _spell(limit: int | tuple[int, ...]) -> str:
    return str(limit) if isinstance(limit, int) else ", ".join(map(str, limit)) or "none"


def _kind(plan: str, index: int) -> str:
    if plan in (ENCODER, REORDER):
        return ""
    return ", step" if index == STEP else ", prefill"


def _ranges(profile: Profile) -> Iterator[str]:
    """List the inputs of a profile; those of all layers share a line."""
    rows: list[tuple[str, ...]] = [("", *_BOUNDS)]
    for name, shape in profile.items():
        stem, _, layer = name.partition(".")
        if layer in ("", "0"):
            spelled = ("x".join(map(str, getattr(shape, bound))) for bound in _BOUNDS)
            rows.append((f"{stem}.*" if layer else stem, *spelled))
    width = max(len(row[0]) for row in rows)
    for name, *shapes in rows:
        yield f"  {name:<{width}}" + "".join(f"{shape:>16}" for shape in shapes)
