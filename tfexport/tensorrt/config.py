"""Configure engine builds: options, shape limits and optimization profiles."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from tfexport.config import Config, Ge, Help, Le, Match, Size, SizeOrZero
from tfexport.contract import DECODER, ENCODER, REORDER, GraphSpec, ModelSpec, TensorSpec, Variant, graph_contract
from tfexport.precision import Precision, Quantized, WeightType

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

# Options of `tfexport trt` whose name differs from the field's.
OPTION_NAMES = {
    "min_shapes": "--minShapes",
    "opt_shapes": "--optShapes",
    "max_shapes": "--maxShapes",
    "workspace_mib": "--workspace",
    "hardware_compatibility": "--hardware-compatibility-level",
    "compute_capabilities": "--compute-capability",
}


class EngineConfig(Config, subject="engine", former={"form": "variant"}):
    """Options for building TensorRT engines from the graphs of a bundle.

    The three `*_shapes` options override the profiles in trtexec's syntax, "source_ids:4x64,target_ids:4x1".
    """

    target: Annotated[
        Target | None,
        Help("Library to build with; auto selects tensorrt if it is installed and has a GPU, else tensorrt-rtx."),
    ] = None
    variant: Annotated[
        Variant | None, Help("Decoder variant; by default static if the bundle has it and the library supports it.")
    ] = None
    precision: Annotated[Precision | None, Help("By default that of the bundle.")] = None
    weights: Annotated[WeightType | None, Help("Store the matrices of linear layers in a narrower type.")] = None
    fp32_layers: Annotated[
        tuple[str, ...],
        Help(
            "Layers of fp16 or bf16 engines to compute in fp32, as named by --debug, such as 'decoder.layers.*.ffn.*'; "
            "can be given several times."
        ),
    ] = ()
    max_batch: Annotated[Size, Help("Maximum number of sources, and of hypotheses, in a batch.")] = 32
    max_source_length: Annotated[Size | None, Help("Maximum source tokens; by default the bundle's limit.")] = None
    max_target_length: Annotated[Size | None, Help("Maximum target tokens; by default the bundle's limit.")] = None
    capacities: Annotated[
        tuple[int, ...],
        Help(
            "Cache lengths below max-target-length to build static decoders for, such as 128,512. Each takes device "
            "memory for one more decoder. Chosen by default; the value of max-target-length builds one decoder."
        ),
    ] = ()
    min_shapes: Annotated[str, Help("Smallest shapes, as in trtexec.")] = ""
    opt_shapes: Annotated[str, Help("Shapes to tune for, as in trtexec.")] = ""
    max_shapes: Annotated[str, Help("Largest shapes, as in trtexec.")] = ""
    workspace_mib: Annotated[Size | None, Help("Maximum scratch memory of a layer in MiB.")] = None
    builder_optimization_level: Annotated[
        int | None, Ge(0), Le(5), Help("0 to 5; higher levels build longer for faster engines.")
    ] = None
    timing_cache: Annotated[str | None, Help("Directory to read and write kernel timings (tensorrt).")] = None
    version_compatible: Annotated[bool, Help("Let newer versions load the engines (tensorrt).")] = False
    hardware_compatibility: Annotated[
        HardwareCompatibility, Help("Which other GPUs can run the engines (tensorrt).")
    ] = "none"
    compute_capabilities: Annotated[
        tuple[str, ...],
        Match(r"[1-9][0-9]?\.[0-9]", "major.minor such as 8.6"),
        Help("GPUs to build for, such as 8.9; can be given several times (tensorrt-rtx)."),
    ] = ()

    def _problems(self) -> list[str]:
        problems = _capacity_problems(self.capacities)
        if self.variant == "contrib":
            problems.append("variant is contrib, which only ONNX Runtime supports; use static or concat")
        if self.variant == "concat" and self.capacities:
            problems.append("capacities are only for the static variant; leave them out or choose --variant static")
        return problems


class EngineLimits(Config, subject="limits"):
    """Largest shapes that the profiles of an engine accept."""

    max_batch: Size  # sources, and also hypotheses of all sources together
    max_source_length: Size
    max_target_length: SizeOrZero
    max_candidates: SizeOrZero  # that a step can return
    capacities: tuple[int, ...] = ()  # of the static decoders' caches, ascending to max_target_length

    def _problems(self) -> list[str]:
        problems = _capacity_problems(self.capacities)
        if self.capacities and self.capacities[-1] != self.max_target_length:
            problems.append(f"capacities end at {self.capacities[-1]}, expected {self.max_target_length}")
        return problems


def default_capacities(max_target_length: int) -> tuple[int, ...]:
    """Return 128, 512, 2048, … up to half of the limit, then the limit."""
    # A step reads whole caches and a beam reorder copies them, so short texts are faster in short caches.
    shorter, capacity = [], 128
    while 2 * capacity <= max_target_length:
        shorter.append(capacity)
        capacity *= 4
    return (*shorter, max_target_length)


def decoder_plan(variant: Variant, capacity: int, limits: EngineLimits) -> str:
    """Return the decoder plan's name; the largest capacity has the graph's name."""
    is_largest = capacity == limits.max_target_length
    return DECODER[variant] if is_largest else f"{DECODER[variant]}_{capacity}"


def decoder_plans(variant: Variant | None, limits: EngineLimits) -> dict[str, int]:
    """Return the capacity of every decoder plan by name, the smallest first."""
    capacities = limits.capacities or (limits.max_target_length,)
    return {decoder_plan(variant, capacity, limits): capacity for capacity in capacities} if variant else {}


def plan_names(variant: Variant | None, limits: EngineLimits) -> list[str]:
    """Return the names of all plans; only the encoder if `variant` is None."""
    return [ENCODER, *decoder_plans(variant, limits), REORDER] if variant else [ENCODER]


def plan_contract(plan: str, spec: ModelSpec, variant: Variant | None) -> GraphSpec:
    """Return the inputs and outputs of a plan."""
    return graph_contract(spec, plan if variant is None or plan in (ENCODER, REORDER) else DECODER[variant])


def most_profiles(plan: str, inputs: Iterable[TensorSpec]) -> int:
    """Return the maximum number of profiles: a decoder may have one for prompts."""
    return 2 if plan not in (ENCODER, REORDER) and any("target_len" in tensor.shape for tensor in inputs) else 1


def updates_in_place(spec: ModelSpec, variant: Variant | None) -> bool:
    """Return whether decoders write new keys and values where they read others."""
    return variant == "static" and spec.cache.grows


def concatenates(spec: ModelSpec, variant: Variant | None) -> bool:
    """Return whether decoders return longer caches, so all rows need one length."""
    return variant == "concat" and spec.cache.grows


def cache_aliases(plan: str, spec: ModelSpec, variant: Variant | None) -> dict[str, str]:
    """Map outputs to inputs of the caches that a plan writes in place."""
    if not updates_in_place(spec, variant) or plan in (ENCODER, REORDER):
        return {}
    return dict(zip(spec.cache.names("present"), spec.cache.names("past"), strict=True))


def cache_bytes(spec: ModelSpec, limits: EngineLimits) -> int:
    """Return the bytes of the KV caches of a full batch with beams."""
    cross = spec.cross.num_bytes(limits.max_batch, limits.max_source_length)
    target = spec.cache.num_bytes(limits.max_batch, limits.max_target_length)
    # The target's caches count twice, because a step of the concat variant and a reorder of beams copy them. One cache
    # at a time is enlarged, through a scratch buffer.
    return sum(cross) + 2 * sum(target) + max(cross + target, default=0)


def engine_key(config: EngineConfig, calibrated: Quantized | None = None) -> str:
    """Return the folder name of an engine, such as "tensorrt-rtx-static-fp16-int8".

    `calibrated` is the type of a bundle whose activations are quantized, and replaces the precision.
    """
    parts = (config.target, config.variant, calibrated or config.precision, config.weights)
    return "-".join(part for part in parts if part)


def _capacity_problems(capacities: tuple[int, ...]) -> list[str]:
    ascends = all(a < b for a, b in pairwise((0, *capacities)))
    return [] if ascends else [f"capacities are {', '.join(map(str, capacities))}, expected them to ascend from 1"]
