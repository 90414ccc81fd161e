"""How engines are built, and the most that they take."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Literal

from tfexport.errors import shortened
from tfexport.fields import Config, size_problems
from tfexport.spec import DECODER, Form, Precision, WeightType

Target = Literal["tensorrt", "tensorrt-rtx"]
HardwareCompatibility = Literal["none", "ampere_plus", "same_compute_capability"]


class EngineConfig(Config, subject="engine"):
    """How the graphs of a bundle become TensorRT engines.

    None and empty mean: the target that fits this machine, the static form where
    the target takes it of this model, the bundle's own precision and lengths, the
    library's own default. `max_batch` counts hypotheses: a source takes num_beams
    of them. `weights` stores the matrices of linear maps narrower than the graph
    computes. The three shapes override the profile, in the spelling of trtexec:
    "source_ids:4x64,target_ids:4x1". `compute_capabilities` are written "8.6".
    `capacities` are the positions of the caches that decoders of the static form
    are built for, besides max_target_length; empty for those of `default_capacities`.
    """

    target: Target | None = None
    form: Form | None = None
    precision: Precision | None = None
    weights: WeightType | None = None
    max_batch: int = 32
    max_source_length: int | None = None
    max_target_length: int | None = None
    capacities: tuple[int, ...] = ()
    min_shapes: str = ""
    opt_shapes: str = ""
    max_shapes: str = ""
    workspace_mib: int | None = None
    builder_optimization_level: int | None = None
    timing_cache: str | None = None
    version_compatible: bool = False
    hardware_compatibility: HardwareCompatibility = "none"
    compute_capabilities: tuple[str, ...] = ()

    def _problems(self) -> list[str]:
        problems = size_problems(self, "max_batch", "max_source_length", "max_target_length", "workspace_mib")
        if self.form == "contrib":
            problems.append("form is contrib, which is for ONNX Runtime alone; use static or concat")
        if self.form == "concat" and self.capacities:
            problems.append("capacities are for the static form; leave them out, or choose static")
        problems += _capacity_problems(self.capacities)
        level = self.builder_optimization_level
        if level is not None and not 0 <= level <= 5:
            problems.append(f"builder_optimization_level is {level}, expected 0 to 5")
        problems += [
            f"compute_capabilities has {shortened(value)}, expected major.minor such as 8.6"
            for value in self.compute_capabilities
            if not re.fullmatch(r"[1-9][0-9]?\.[0-9]", value)
        ]
        return problems


class EngineLimits(Config, subject="limits"):
    """The most that engines take: the largest shapes of their profiles.

    Attributes:
        max_batch: sources, and hypotheses of all sources together.
        max_source_length: tokens of a source.
        max_target_length: tokens of a target; in the static form the capacity of the caches.
        max_candidates: best tokens a step can return.
        capacities: positions of the caches that there are decoders of the static form for, ascending to
            max_target_length; empty for the concat form, for an encoder alone and for engines of one decoder that
            were built before there could be several.
    """

    max_batch: int
    max_source_length: int
    max_target_length: int
    max_candidates: int
    capacities: tuple[int, ...] = ()

    def _problems(self) -> list[str]:
        problems = [
            *size_problems(self, "max_batch", "max_source_length"),
            *size_problems(self, "max_target_length", "max_candidates", least=0),
            *_capacity_problems(self.capacities),
        ]
        if self.capacities and self.capacities[-1] != self.max_target_length:
            problems.append(f"capacities end at {self.capacities[-1]}, expected {self.max_target_length}")
        return problems


def default_capacities(max_target_length: int) -> tuple[int, ...]:
    """Choose the capacities of decoders: the limit, and 128 and its fourfolds up to half of it.

    A step reads and beams move whole caches: those of a short text in a short cache cost little.
    """
    shorter, capacity = [], 128
    while 2 * capacity <= max_target_length:
        shorter.append(capacity)
        capacity *= 4
    return (*shorter, max_target_length)


def decoder_plan(form: Form, capacity: int, limits: EngineLimits) -> str:
    """Name the plan of the decoder whose caches have a capacity; the largest has the name of its graph."""
    is_largest = capacity == limits.max_target_length
    return DECODER[form] if is_largest else f"{DECODER[form]}_{capacity}"


def decoder_plans(form: Form, limits: EngineLimits) -> dict[str, int]:
    """Return the capacity of every decoder by the name of its plan, the smallest first."""
    capacities = limits.capacities or (limits.max_target_length,)
    return {decoder_plan(form, capacity, limits): capacity for capacity in capacities}


def _capacity_problems(capacities: tuple[int, ...]) -> list[str]:
    ascends = all(a < b for a, b in pairwise((0, *capacities)))
    return [] if ascends else [f"capacities are {', '.join(map(str, capacities))}, expected them to ascend from 1"]


def engine_key(config: EngineConfig) -> str:
    """Name the folder of an engine by what was chosen, such as "tensorrt-rtx-static-fp16-int8"."""
    return "-".join(part for part in (config.target, config.form, config.precision, config.weights) if part)
