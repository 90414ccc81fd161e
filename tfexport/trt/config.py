"""How engines are built, and the most that they take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tfexport.errors import shortened
from tfexport.fields import Config, size_problems
from tfexport.spec import Form, Precision, WeightType

Target = Literal["tensorrt", "tensorrt-rtx"]
HardwareCompatibility = Literal["none", "ampere_plus", "same_compute_capability"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config, subject="engine"):
    """How the graphs of a bundle become TensorRT engines.

    None and empty mean: the target that fits this machine, the static form where
    the target has a layer for it, the bundle's own precision and lengths, the
    library's own default. `max_batch` counts hypotheses: a source takes num_beams
    of them. `weights` stores the matrices of linear maps narrower than the graph
    computes. The three shapes override the profile, in the spelling of trtexec:
    "source_ids:4x64,target_ids:4x1". `compute_capabilities` are written "8.6".
    """

    target: Target | None = None
    form: Form | None = None
    precision: Precision | None = None
    weights: WeightType | None = None
    max_batch: int = 32
    max_source_length: int | None = None
    max_target_length: int | None = None
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
        level = self.builder_optimization_level
        if level is not None and not 0 <= level <= 5:
            problems.append(f"builder_optimization_level is {level}, expected 0 to 5")
        problems += [
            f"compute_capabilities has {shortened(value)}, expected major.minor such as 8.6"
            for value in self.compute_capabilities
            if not re.fullmatch(r"[1-9][0-9]?\.[0-9]", value)
        ]
        return problems


@dataclass(frozen=True, kw_only=True)
class EngineLimits(Config, subject="limits"):
    """The most that engines take: the largest shapes of their profiles.

    Attributes:
        max_batch: sources, and hypotheses of all sources together.
        max_source_length: tokens of a source.
        max_target_length: tokens of a target; in the static form the capacity of the caches.
        max_candidates: best tokens a step can return.
    """

    max_batch: int
    max_source_length: int
    max_target_length: int
    max_candidates: int

    def _problems(self) -> list[str]:
        return [
            *size_problems(self, "max_batch", "max_source_length"),
            *size_problems(self, "max_target_length", "max_candidates", least=0),
        ]


def engine_key(config: EngineConfig) -> str:
    """Name the folder of an engine by what was chosen, such as "tensorrt-rtx-static-fp16-int8"."""
    return "-".join(part for part in (config.target, config.form, config.precision, config.weights) if part)
