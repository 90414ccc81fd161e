"""What an engine says of itself: all that decides whether its plans may be loaded, read strictly."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from tfexport._io.names import ENGINE_MANIFEST
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.sealed_json import seal, unseal
from tfexport.bundle.contents import ENGINE_FORMAT_VERSION
from tfexport.config import Config, Count, Match, Sha256
from tfexport.contract import ENCODER, REORDER, TensorSpec
from tfexport.errors import ConfigError, shortened
from tfexport.tensorrt.config import EngineConfig, EngineLimits, decoder_plans
from tfexport.tensorrt.profile import Profile


class BuildMachine(Config, subject="machine"):
    """Where an engine was built; the GPU and its driver are None where it was built without one."""

    system: str
    architecture: str
    gpu: str | None = None
    compute_capability: str | None = None
    driver: str | None = None


class PlanEntry(FileEntry, subject="plan"):
    """One serialized plan.

    Attributes:
        file: in the folder of the engine.
        inputs: by name, dtype and dimensions, in order.
        outputs: the same.
        aliases: output → the input whose memory it shares; present → past in the static form.
        profiles: by input name, in the order of their index; of a decoder step and prefill.
        layers: how many layers of each type the network has.
    """

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    profiles: tuple[Profile, ...]
    layers: Mapping[str, Count]

    def _problems(self) -> Iterator[str]:
        for index, profile in enumerate(self.profiles):
            for name, shape in profile.items():
                shapes = (shape.min, shape.opt, shape.max)
                ascends = all(0 <= least <= usual <= most for least, usual, most in zip(*shapes, strict=False))
                if len(set(map(len, shapes))) > 1 or not ascends:
                    spelled = " ".join(map(str, shapes))[:80]
                    yield f"profiles[{index}].{name[:80]} has {spelled}, expected shapes that ascend from 0"


class EngineManifest(Config, subject=ENGINE_MANIFEST):
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
    library_version: Annotated[str, Match(r"\d+(\.\d+)+\S*", "a version such as 10.13.3")]
    config: EngineConfig
    limits: EngineLimits
    flags: tuple[str, ...]
    machine: BuildMachine
    sources: Mapping[str, Sha256]
    plans: Mapping[str, PlanEntry]
    versions: Mapping[str, str]
    log: FileEntry | None = None

    def _problems(self) -> list[str]:
        return [*self._build_problems(), *self._plan_problems()]

    def _build_problems(self) -> list[str]:
        config, machine = self.config, self.machine
        problems = [
            f"config.{name} is null, expected what was chosen"
            for name in ("target", "precision", "max_source_length")
            if getattr(config, name) is None
        ]
        if self.limits.capacities != config.capacities:
            problems.append(f"limits.capacities are {self.limits.capacities}, expected config's, {config.capacities}")
        if config.target == "tensorrt" and not (machine.gpu and machine.compute_capability):
            problems.append("machine names no GPU, which a plan of tensorrt is bound to")
        if config.target == "tensorrt-rtx" and not config.compute_capabilities:
            problems.append("config.compute_capabilities is empty, which a plan of tensorrt-rtx is bound to")
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

    def to_bytes(self) -> bytes:
        """Write the manifest as JSON: sorted keys, its own sum as `self_sha256`."""
        return seal(self.to_dict())

    @classmethod
    def _upgraded(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Drop settings of engines from when weights could be stripped and replaced."""
        config = data.get("config")
        if not isinstance(config, dict):
            return data
        if config.get("strip_weights", False) is not False:
            raise ConfigError("config.strip_weights is set, and weights are no longer put into plans that lack them")
        return data | {"config": {name: config[name] for name in config if name not in ("refit", "strip_weights")}}

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read what `to_bytes` wrote.

        Raises:
            BundleError: not JSON, made by a newer version, or any byte was changed;
                lists every wrong value.
        """
        return unseal(
            raw,
            lambda data: cls.from_dict(data, subject=ENGINE_MANIFEST),
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
