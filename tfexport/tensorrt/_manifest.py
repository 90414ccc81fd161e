"""Define the manifest of an engine, which decides whether plans can be loaded."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import partial
from typing import Annotated, Self

from tfexport._io.names import BUILD_LOG, ENGINE_LAYERS, ENGINE_MANIFEST
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.strict_json import seal, unseal
from tfexport.bundle.contents import ENGINE_FORMAT_VERSION
from tfexport.config import Config, Count, Match, Sha256
from tfexport.contract import TensorSpec
from tfexport.errors import shortened
from tfexport.tensorrt.config import EngineConfig, EngineLimits, Profile, most_profiles, plan_names


class BuildMachine(Config, subject="machine"):
    """The machine that built an engine; GPU and driver are None if it had no GPU."""

    system: str
    architecture: str
    gpu: str | None = None
    compute_capability: str | None = None
    driver: str | None = None


class PlanEntry(FileEntry, subject="plan"):
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]  # output to the input whose memory it shares; present to past in the static variant
    profiles: tuple[Profile, ...]  # step and prefill for a decoder
    layers: Mapping[str, Count]  # of the network, by type
    kernels: Mapping[str, Count] = field(default_factory=dict)  # of all profiles, by name; empty if unknown

    def _problems(self) -> Iterator[str]:
        inputs = {tensor.name for tensor in self.inputs}
        outputs = {tensor.name for tensor in self.outputs}
        for index, profile in enumerate(self.profiles):
            yield from (f"profile {index} has no range for {name}" for name in sorted(inputs - profile.keys()))
            for name, shape in profile.items():
                shapes = (shape.min, shape.opt, shape.max)
                ascends = all(0 <= least <= usual <= most for least, usual, most in zip(*shapes, strict=False))
                if name not in inputs:
                    yield f"profile {index} has {name[:80]!r}, which is not an input"
                elif len(set(map(len, shapes))) > 1 or not ascends:
                    spelled = " ".join(map(str, shapes))[:80]
                    yield f"profiles[{index}].{name[:80]} has {spelled}, expected shapes that ascend from 0"
        for output, source in self.aliases.items():
            if output not in outputs or source not in inputs:
                yield f"aliases has {output[:80]!r}: {source[:80]!r}, expected an output and an input"


class EngineManifest(Config, subject=ENGINE_MANIFEST):
    """Contents of engine.json, with names of flags and types instead of numbers."""

    format_version: int
    library_version: Annotated[str, Match(r"\d+(\.\d+)+\S*", "a version such as 10.13.3")]
    config: EngineConfig  # resolved
    limits: EngineLimits
    flags: tuple[str, ...]  # of the builder
    machine: BuildMachine
    sources: Mapping[str, Sha256]  # of the bundle's files that the engine was built from
    plans: Mapping[str, PlanEntry]
    versions: Mapping[str, str]  # of the build tools
    log: FileEntry
    layers: FileEntry | None = None  # what the inspector reports of each plan

    def _problems(self) -> Iterator[str]:
        config, machine = self.config, self.machine
        for name in ("target", "precision", "max_source_length"):
            if getattr(config, name) is None:
                yield f"config.{name} is null, expected the resolved value"
        if self.limits.capacities != config.capacities:
            yield f"limits.capacities are {self.limits.capacities}, expected config's, {config.capacities}"
        if config.target == "tensorrt" and not (machine.gpu and machine.compute_capability):
            yield "machine names no GPU, expected the one that the plans of tensorrt are bound to"
        if config.target == "tensorrt-rtx" and not config.compute_capabilities:
            yield "config.compute_capabilities is empty, expected those that the plans of tensorrt-rtx are bound to"
        if not self.sources:
            yield "sources is empty, expected the files that the engine was built from"
        expected = plan_names(config.variant, self.limits)
        if sorted(self.plans) != sorted(expected):
            yield f"plans are {', '.join(sorted(self.plans)) or 'none'}, expected {', '.join(sorted(expected))}"
            return
        for name, plan in self.plans.items():
            if plan.file != f"{name}.plan":
                yield f"plans.{name}.file is {shortened(plan.file)}, expected {name}.plan"
            most = most_profiles(name, plan.inputs)
            if not 1 <= len(plan.profiles) <= most:
                yield f"plans.{name} has {len(plan.profiles)} profiles, expected at most {most}"

    @property
    def files(self) -> dict[str, FileEntry]:
        """All files of the engine except its manifest, signature and compiled kernels."""
        inspected = {} if self.layers is None else {ENGINE_LAYERS: self.layers}
        return {BUILD_LOG: self.log, **inspected, **{plan.file: plan for plan in self.plans.values()}}

    def to_bytes(self) -> bytes:
        return seal(self.to_dict())

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read a manifest from sealed JSON; raise `BundleError` with every invalid value."""
        read, remedy = (
            partial(cls.from_dict, subject=ENGINE_MANIFEST),
            "build it again with tfexport trt BUNDLE --force",
        )
        return unseal(raw, read, name=ENGINE_MANIFEST, format_version=ENGINE_FORMAT_VERSION, remedy=remedy)
