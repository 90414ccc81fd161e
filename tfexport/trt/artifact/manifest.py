"""What an engine says of itself: all that decides whether its plans may be loaded, read strictly."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfexport.bundle.contents import ENGINE_FORMAT_VERSION
from tfexport.bundle.manifest import FileEntry, read_tensors
from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.fields import Config
from tfexport.files.names import ENGINE_MANIFEST
from tfexport.files.sealed_json import collect, read_fields, read_list, read_map, read_object, read_text, seal, unseal
from tfexport.spec import ENCODER, REORDER, TensorSpec
from tfexport.trt.config import EngineConfig, EngineLimits, decoder_plans
from tfexport.trt.profile import Profile, ShapeRange

_SHA256 = re.compile("[0-9a-f]{64}")
_VERSION = re.compile(r"\d+(\.\d+)+\S*")


class BuildMachine(Config, subject="machine"):
    """Where an engine was built; the GPU and its driver are None where it was built without one."""

    system: str
    architecture: str
    gpu: str | None = None
    compute_capability: str | None = None
    driver: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """One serialised plan.

    Attributes:
        file: in the folder of the engine.
        content: its size and sha256.
        inputs: by name, dtype and dimensions, in order.
        outputs: likewise.
        aliases: output → the input whose memory it shares; present → past in the static form.
        profiles: by input name, in the order of their index; of a decoder step and prefill.
        layers: how many layers of each type the network has.
    """

    file: str
    content: FileEntry
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    profiles: tuple[Profile, ...]
    layers: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return {
            "file": self.file,
            **self.content.to_dict(),
            "inputs": [dataclasses.asdict(tensor) for tensor in self.inputs],
            "outputs": [dataclasses.asdict(tensor) for tensor in self.outputs],
            "aliases": dict(self.aliases),
            "profiles": [
                {name: dataclasses.asdict(shape) for name, shape in profile.items()} for profile in self.profiles
            ],
            "layers": dict(self.layers),
        }


@dataclass(frozen=True, kw_only=True)
class EngineManifest:
    """What engine.json says; flags and types by name, never by the number that one version gives them.

    Attributes:
        format_version: 1.
        library_version: of the target that built it, in full.
        config: how it was built, with everything decided: target, form, precision, lengths, compute capabilities.
        limits: the most that it takes; in the static form max_target_length is the capacity of the caches.
        flags: of the builder that were set; TF32 is not among them, so float32 is exact.
        machine: where it was built.
        sources: sha256 of every file of the bundle that it was made from, by name.
        plans: by name: encoder, those of `decoder_plans`, reorder.
        versions: of the tools that made it, by name.
        log: what the library said while it built; None in engines of before, whose log nothing names.
    """

    format_version: int
    library_version: str
    config: EngineConfig
    limits: EngineLimits
    flags: tuple[str, ...]
    machine: BuildMachine
    sources: Mapping[str, str]
    plans: Mapping[str, PlanEntry]
    versions: Mapping[str, str]
    log: FileEntry | None = None

    def __post_init__(self) -> None:
        """Check how the parts fit together.

        Raises:
            ConfigError: lists every contradiction.
        """
        problems = [*self._build_problems(), *self._plan_problems()]
        raise_all(ConfigError, ENGINE_MANIFEST, problems)

    def _build_problems(self) -> list[str]:
        config, machine = self.config, self.machine
        problems = [
            f"config.{name} is null, expected what was chosen"
            for name in ("target", "precision", "max_source_length")
            if getattr(config, name) is None
        ]
        if self.limits.capacities != config.capacities:
            problems.append(f"limits.capacities are {self.limits.capacities}, expected config's, {config.capacities}")
        if not _VERSION.fullmatch(self.library_version):
            problems.append(f"library_version is {shortened(self.library_version)}, expected a version such as 10.13.3")
        if config.target == "tensorrt" and not (machine.gpu and machine.compute_capability):
            problems.append("machine names no GPU, which a plan of tensorrt is bound to")
        if config.target == "tensorrt-rtx" and not config.compute_capabilities:
            problems.append("config.compute_capabilities is empty, which a plan of tensorrt-rtx is bound to")
        problems += [
            f"sources.{name[:80]} is {shortened(value)}, expected a sha256"
            for name, value in self.sources.items()
            if not _SHA256.fullmatch(value)
        ]
        if not self.sources:
            problems.append("sources is empty, expected the files that the engine was made from")
        return problems

    def _plan_problems(self) -> list[str]:
        form = self.config.form
        expected = [ENCODER, *([*decoder_plans(form, self.limits), REORDER] if form else [])]
        if sorted(self.plans) != sorted(expected):
            return [f"plans are {', '.join(sorted(self.plans)) or 'none'}, expected {', '.join(sorted(expected))}"]
        problems = []
        for name, plan in self.plans.items():
            if plan.file != f"{name}.plan":
                problems.append(f"plans.{name}.file is {shortened(plan.file)}, expected {name}.plan")
            wanted = 1 if name in (ENCODER, REORDER) else 2
            if len(plan.profiles) != wanted:
                problems.append(f"plans.{name} has {len(plan.profiles)} profiles, expected {wanted}")
            problems += [f"plans.{name}: {problem}" for problem in _name_problems(plan)]
        return problems

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        return {
            "format_version": self.format_version,
            "library_version": self.library_version,
            "config": self.config.to_dict(),
            "limits": self.limits.to_dict(),
            "flags": list(self.flags),
            "machine": self.machine.to_dict(),
            "sources": dict(self.sources),
            "plans": {name: plan.to_dict() for name, plan in self.plans.items()},
            "versions": dict(self.versions),
            "log": self.log.to_dict() if self.log else None,
        }

    def to_bytes(self) -> bytes:
        """Write the manifest as JSON: sorted keys, its own sum as `self_sha256`."""
        return seal(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineManifest:
        """Read a manifest strictly.

        Raises:
            ConfigError: lists every unknown, missing, wrongly typed and contradictory value.
        """
        return cls(**read_fields({"log": None, **data}, _READERS, ENGINE_MANIFEST))

    @classmethod
    def from_bytes(cls, raw: bytes) -> EngineManifest:
        """Read what `to_bytes` wrote.

        Raises:
            BundleError: not JSON, made by a newer version, or any byte was changed;
                lists every wrong value.
        """
        return unseal(
            raw,
            cls.from_dict,
            name=ENGINE_MANIFEST,
            format_version=ENGINE_FORMAT_VERSION,
            remedy="build it again with tfexport trt BUNDLE --force",
        )


def _name_problems(plan: PlanEntry) -> list[str]:
    """Say which names in a plan's profiles and aliases are none of its tensors."""
    inputs = {tensor.name: tensor for tensor in plan.inputs}
    outputs = {tensor.name for tensor in plan.outputs}
    problems = []
    for index, profile in enumerate(plan.profiles):
        problems += [f"profile {index} has no range for {name}" for name in inputs if name not in profile]
        problems += [f"profile {index} has {name[:80]!r}, which is no input" for name in profile if name not in inputs]
    problems += [
        f"aliases has {output[:80]!r}: {source[:80]!r}, expected an output and an input"
        for output, source in plan.aliases.items()
        if output not in outputs or source not in inputs
    ]
    return problems


class _PlanHead(FileEntry, subject="plan"):
    file: str


def _read_config(value: object) -> EngineConfig:
    """Read how an engine was built, also one from when weights could be stripped and replaced."""
    data = dict(read_object(value, "config"))
    data.pop("refit", None)  # it allowed what nothing did: the plans are whole
    if data.pop("strip_weights", False) is not False:
        raise ConfigError("config.strip_weights is set, and weights are no longer put into plans that lack them")
    return EngineConfig.from_dict(data, subject="config")


def _read_plan(value: object, name: str) -> PlanEntry:
    data = dict(read_object(value, name))
    problems: list[str] = []
    parts = {key: collect(problems, read, data.pop(key, None), f"{name}.{key}") for key, read in _PLAN_READERS.items()}
    head = collect(problems, lambda: _PlanHead.from_dict(data, subject=name))
    if head is None or problems:
        raise ConfigError("; ".join(problems))
    content = FileEntry(bytes=head.bytes, sha256=head.sha256)
    return PlanEntry(file=head.file, content=content, **parts)  # type: ignore[arg-type]


class _Range(Config, subject="range"):
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


def _read_profile(value: object, name: str) -> Profile:
    return read_map(value, name, _read_range)


def _read_range(value: object, name: str) -> ShapeRange:
    read = _Range.from_dict(value, subject=name)
    shapes = (read.min, read.opt, read.max)
    ascends = all(0 <= least <= usual <= most for least, usual, most in zip(*shapes, strict=False))
    if len(set(map(len, shapes))) > 1 or not ascends:
        raise ConfigError(f"{name} has {' '.join(map(str, shapes))[:80]}, expected shapes that ascend from 0")
    return ShapeRange(*shapes)


def _read_count(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name} is {shortened(value)}, expected 0 or more")
    return value


_PLAN_READERS: dict[str, Callable[[object, str], object]] = {
    "inputs": read_tensors,
    "outputs": read_tensors,
    "aliases": lambda value, name: read_map(value, name, read_text),
    "profiles": lambda value, name: read_list(value, name, _read_profile),
    "layers": lambda value, name: read_map(value, name, _read_count),
}
_READERS: dict[str, Callable[[Any], object]] = {
    "format_version": int,  # checked before everything else
    "library_version": lambda value: read_text(value, "library_version"),
    "config": _read_config,
    "limits": lambda value: EngineLimits.from_dict(value, subject="limits"),
    "flags": lambda value: read_list(value, "flags", read_text),
    "machine": lambda value: BuildMachine.from_dict(value, subject="machine"),
    "sources": lambda value: read_map(value, "sources", read_text),
    "plans": lambda value: read_map(value, "plans", _read_plan),
    "versions": lambda value: read_map(value, "versions", read_text),
    "log": lambda value: None if value is None else FileEntry.from_dict(value, subject="log"),
}
