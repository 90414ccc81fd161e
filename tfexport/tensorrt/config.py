"""Configure engine builds: options, shape limits and optimization profiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from tfexport.config import Config, Ge, Help, Le, Match, Size, SizeOrZero
from tfexport.contract import DECODER, Form, ModelSpec, key_value_names
from tfexport.precision import Precision, WeightType

Target = Literal["tensorrt", "tensorrt-rtx"]
HardwareCompatibility = Literal["none", "ampere_plus", "same_compute_capability"]
Shape = tuple[int, ...]

# Profile indices of a decoder; other engines have only the first profile.
STEP, PREFILL = 0, 1


@dataclass(frozen=True)
class ShapeRange:
    """Shapes of one input in a profile; for the shape input `num_candidates`, values."""

    min: Shape
    opt: Shape
    max: Shape


Profile = Mapping[str, ShapeRange]  # by input name


class EngineConfig(Config, subject="engine"):
    """Options for building TensorRT engines from the graphs of a bundle.

    If an option is not set, the build uses the target that fits this machine, the static form if the target supports it
    for this model, the precision and lengths of the bundle, and otherwise the library's default. `max_batch` counts
    hypotheses: a source takes `num_beams` of them. The three `*_shapes` options override the profiles in trtexec's
    syntax: "source_ids:4x64,target_ids:4x1".
    """

    target: Annotated[
        Target | None,
        Help("Library to build with; auto takes tensorrt if it is installed and a GPU is there, else tensorrt-rtx."),
    ] = None
    form: Annotated[
        Form | None,
        Help("Of the decoder; static if the library takes it of this model and the bundle has it when not given."),
    ] = None
    precision: Annotated[Precision | None, Help("The bundle's own when not given.")] = None
    weights: Annotated[WeightType | None, Help("Store the matrices of linear maps in fewer bits.")] = None
    max_batch: Annotated[Size, Help("Most sources, and most hypotheses, at once.")] = 32
    max_source_length: Annotated[Size | None, Help("Most source tokens; the bundle's limit when not given.")] = None
    max_target_length: Annotated[Size | None, Help("Most target tokens; the bundle's limit when not given.")] = None
    capacities: Annotated[
        tuple[int, ...],
        Help(
            "Positions of the caches that decoders of the static form are built for besides max-target-length, such "
            "as 128,512; each is one more decoder in device memory. Chosen when not given; max-target-length alone "
            "means one."
        ),
    ] = ()
    min_shapes: Annotated[str, Help("Smallest shapes, as in trtexec.")] = ""
    opt_shapes: Annotated[str, Help("Shapes to tune for, as in trtexec.")] = ""
    max_shapes: Annotated[str, Help("Largest shapes, as in trtexec.")] = ""
    workspace_mib: Annotated[Size | None, Help("Scratch memory of a layer in MiB.")] = None
    builder_optimization_level: Annotated[
        int | None, Ge(0), Le(5), Help("0 to 5; higher builds longer for faster engines.")
    ] = None
    timing_cache: Annotated[str | None, Help("Directory of kernel timings, read and written (tensorrt).")] = None
    version_compatible: Annotated[bool, Help("Let newer versions load the engines (tensorrt).")] = False
    hardware_compatibility: Annotated[
        HardwareCompatibility, Help("Which other GPUs may run the engines (tensorrt).")
    ] = "none"
    compute_capabilities: Annotated[
        tuple[str, ...],
        Match(r"[1-9][0-9]?\.[0-9]", "major.minor such as 8.6"),
        Help("GPUs to build for, such as 8.9; may be given several times (tensorrt-rtx)."),
    ] = ()

    def _problems(self) -> list[str]:
        problems = _capacity_problems(self.capacities)
        if self.form == "contrib":
            problems.append("form is contrib, which is for ONNX Runtime alone; use static or concat")
        if self.form == "concat" and self.capacities:
            problems.append("capacities are for the static form; leave them out, or choose static")
        return problems


class EngineLimits(Config, subject="limits"):
    """Largest shapes that the profiles of an engine accept.

    Attributes:
        max_batch: sources, and also hypotheses of all sources together.
        max_source_length: tokens of a source.
        max_target_length: tokens of a target; in the static form the largest capacity of the caches.
        max_candidates: candidate tokens that a step can return.
        capacities: cache capacities of the decoders of the static form, ascending to max_target_length; empty for the
            concat form, for encoder-only bundles and for old engines with one decoder.
    """

    max_batch: Size
    max_source_length: Size
    max_target_length: SizeOrZero
    max_candidates: SizeOrZero
    capacities: tuple[int, ...] = ()

    def _problems(self) -> list[str]:
        problems = _capacity_problems(self.capacities)
        if self.capacities and self.capacities[-1] != self.max_target_length:
            problems.append(f"capacities end at {self.capacities[-1]}, expected {self.max_target_length}")
        return problems


def default_capacities(max_target_length: int) -> tuple[int, ...]:
    """Return 128, 512, 2048, … up to half of the limit, then the limit.

    A step reads whole caches and a beam reorder copies them, so short texts are faster in short caches.
    """
    shorter, capacity = [], 128
    while 2 * capacity <= max_target_length:
        shorter.append(capacity)
        capacity *= 4
    return (*shorter, max_target_length)


def decoder_plan(form: Form, capacity: int, limits: EngineLimits) -> str:
    """Return the decoder plan's name; the largest capacity has the graph's name."""
    is_largest = capacity == limits.max_target_length
    return DECODER[form] if is_largest else f"{DECODER[form]}_{capacity}"


def decoder_plans(form: Form, limits: EngineLimits) -> dict[str, int]:
    """Return the capacity of every decoder plan by name, the smallest first."""
    capacities = limits.capacities or (limits.max_target_length,)
    return {decoder_plan(form, capacity, limits): capacity for capacity in capacities}


def cache_aliases(spec: ModelSpec) -> dict[str, str]:
    """Map outputs to inputs of caches that a static decoder writes in place."""
    presents, pasts = (key_value_names(prefix, spec.layers) for prefix in ("present", "past"))
    return dict(zip(presents, pasts, strict=True))


def engine_key(config: EngineConfig) -> str:
    """Return the folder name of an engine, such as "tensorrt-rtx-static-fp16-int8"."""
    return "-".join(part for part in (config.target, config.form, config.precision, config.weights) if part)


def _capacity_problems(capacities: tuple[int, ...]) -> list[str]:
    ascends = all(a < b for a, b in pairwise((0, *capacities)))
    return [] if ascends else [f"capacities are {', '.join(map(str, capacities))}, expected them to ascend from 1"]
