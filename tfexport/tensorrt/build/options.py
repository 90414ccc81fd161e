"""What a builder is told: resolved from what the user wants and the library can, then applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfexport.errors import EngineError, raise_all
from tfexport.tensorrt.config import EngineConfig
from tfexport.tensorrt.cuda import Gpu
from tfexport.tensorrt.library import PORTABLE, Library

MIB = 1024 * 1024
# The oldest GPUs with float8 (Ada).
_FP8 = (8, 9)


@dataclass(frozen=True, kw_only=True)
class BuilderOptions:
    """What a builder is told, by name; None leaves the library its default.

    Attributes:
        flags: of `BuilderFlag`, set. TF32, which the libraries set by themselves, is cleared, so that float32
            means float32: "noTF32", as trtexec calls it.
        workspace_bytes: scratch memory that a layer may use.
        optimization_level: 0 to 5.
        hardware_compatibility: of `HardwareCompatibilityLevel`, in lower case.
        compute_capabilities: such as "8.6", each once, in order; one that the library has no name for is that of the
            GPU at hand; empty where that GPU decides.
        timing_cache: directory of the kernels' timings, read and written; None for none.
    """

    flags: tuple[str, ...]
    workspace_bytes: int | None
    optimization_level: int | None
    hardware_compatibility: str
    compute_capabilities: tuple[str, ...]
    timing_cache: str | None


def resolve_options(library: Library, config: EngineConfig, gpu: Gpu | None) -> BuilderOptions:
    """Decide what a builder of this library is told; builds nothing.

    Args:
        library: to build with.
        config: what the user wants.
        gpu: of this machine, None without one.

    Raises:
        EngineError: lists everything that this library does not take, would ignore or cannot do, with the remedy.
    """
    capabilities, problems = _compute_capabilities(library, config.compute_capabilities, gpu)
    problems += _unsupported(library, config)
    problems += _fp8_problems(config, capabilities or ((gpu.compute_capability,) if gpu else ()))
    raise_all(EngineError, f"{library.target} {library.version}", problems)
    flags = ["noTF32"]
    # TensorRT-RTX promises only then that a CUDA graph can be captured; contexts are given their memory anyway.
    if hasattr(library.trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        flags.append("REQUIRE_USER_ALLOCATION")
    if config.version_compatible:
        flags.append("VERSION_COMPATIBLE")
    return BuilderOptions(
        flags=tuple(flags),
        workspace_bytes=config.workspace_mib and config.workspace_mib * MIB,
        optimization_level=config.builder_optimization_level,
        hardware_compatibility=config.hardware_compatibility,
        compute_capabilities=capabilities,
        timing_cache=config.timing_cache,
    )


def _compute_capabilities(
    library: Library, wanted: Sequence[str], gpu: Gpu | None
) -> tuple[tuple[str, ...], list[str]]:
    """Choose what an engine is built for: what is wanted, the GPU that is there, or all that the library takes.

    The library's enum lags behind its kernels: what it does not name can be built for all the same, as the GPU at hand
    and by itself. Whether there are kernels for it, the library says when it builds or loads.
    """
    known = library.compute_capabilities()
    if not known:
        listed = f"compute capability {', '.join(wanted)}: it builds for the GPU at hand"
        return (), [f"{listed}; leave it out or choose --target tensorrt-rtx"] if wanted else []
    here = gpu.compute_capability if gpu else None
    chosen = wanted or ((here,) if here else PORTABLE)
    if here and here not in known and set(chosen) == {here}:
        return (here,), []
    unknown = [capability for capability in chosen if capability not in known]
    at_hand = "the GPU at hand alone" if here else "a GPU at hand, and there is none"
    listed = f"compute capability {', '.join(unknown)}: it builds for {', '.join(known)}, or for {at_hand}"
    problems = [f"{listed}; choose among them, or --target tensorrt on such a GPU"] if unknown else []
    return tuple(capability for capability in known if capability in chosen), problems


def _unsupported(library: Library, config: EngineConfig) -> Iterator[str]:
    """Say what a build would fail of, or ignore without a word."""
    if config.hardware_compatibility != "none":
        level = config.hardware_compatibility.upper()
        if library.builds_without_gpu:
            yield "hardware compatibility is ignored by this library; name the GPUs with --compute-capability"
        elif not hasattr(library.trt.HardwareCompatibilityLevel, level):
            yield f"hardware compatibility {config.hardware_compatibility} is newer than this version; upgrade it"
    if library.builds_without_gpu and config.version_compatible:
        yield "engines are bound to their version, there is no runtime for others; leave --version-compatible out"
    if library.builds_without_gpu and config.timing_cache is not None:
        yield "a timing cache has no effect, tactics are not timed; leave --timing-cache out"


def _fp8_problems(config: EngineConfig, capabilities: Sequence[str]) -> list[str]:
    """Refuse float8 for GPUs that do not have it."""
    too_old = [capability for capability in capabilities if tuple(map(int, capability.split("."))) < _FP8]
    if config.weights != "fp8" or not too_old:
        return []
    least, listed = ".".join(map(str, _FP8)), ", ".join(too_old)
    need = f"weights fp8 need compute capability {least} or newer, not {listed}"
    return [f"{need}; name newer ones with --compute-capability, or choose int8"]


def apply_options(library: Library, config: Any, options: BuilderOptions) -> None:
    """Tell an `IBuilderConfig`.

    Args:
        library: that made it.
        config: changed in place.
        options: from `resolve_options`.

    Raises:
        EngineError: a compute capability is refused.
    """
    trt = library.trt
    config.clear_flag(trt.BuilderFlag.TF32)
    for name in options.flags:
        if name != "noTF32":
            config.set_flag(getattr(trt.BuilderFlag, name))
    config.max_aux_streams = 0  # one stream does everything in one order
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.hardware_compatibility != "none":
        level = getattr(trt.HardwareCompatibilityLevel, options.hardware_compatibility.upper())
        config.hardware_compatibility_level = level
    if options.compute_capabilities:
        known = library.compute_capabilities()
        config.num_compute_capabilities = len(options.compute_capabilities)
        refused = [
            capability
            for i, capability in enumerate(options.compute_capabilities)
            if not config.set_compute_capability(known.get(capability, trt.ComputeCapability.CURRENT), i)
        ]
        if refused:
            raise EngineError(f"{library.target} {library.version}: refuses compute capability {', '.join(refused)}")
