"""Which settings a build takes with one of the libraries, and which are refused as they would fail or do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tfexport.errors import EngineError, raise_all
from tfexport.trt.config import EngineConfig
from tfexport.trt.library import Library

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What a builder is told, by name; None leaves the library its default.

    Attributes:
        flags: of `BuilderFlag`, set. TF32, which the libraries set by themselves, is cleared, so that float32
            means float32: "noTF32", as trtexec calls it.
        max_aux_streams: 0, so that one stream does everything in one order.
        workspace_bytes: scratch memory that a layer may use.
        optimization_level: 0 to 5.
        hardware_compatibility: of `HardwareCompatibilityLevel`, in lower case.
        compute_capabilities: such as "8.6"; empty where the GPU at hand decides.
    """

    flags: tuple[str, ...]
    max_aux_streams: int
    workspace_bytes: int | None
    optimization_level: int | None
    hardware_compatibility: str
    compute_capabilities: tuple[str, ...]


def choose_options(library: Library, settings: EngineConfig, compute_capabilities: tuple[str, ...]) -> BuildOptions:
    """Decide what a builder of this library is told; builds nothing.

    Args:
        library: to build with.
        settings: as the user gave them.
        compute_capabilities: from `Library.choose_compute_capabilities`.

    Raises:
        EngineError: lists every setting that this library does not take, with the reason.
    """
    raise_all(EngineError, f"{library.target} {library.version}", list(_refusals(library, settings)))
    flags = ["noTF32"]
    # TensorRT-RTX promises only then that a CUDA graph can be captured; contexts are given their memory anyway.
    if hasattr(library.trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        flags.append("REQUIRE_USER_ALLOCATION")
    if settings.version_compatible:
        flags.append("VERSION_COMPATIBLE")
    return BuildOptions(
        flags=tuple(flags),
        max_aux_streams=0,
        workspace_bytes=settings.workspace_mib and settings.workspace_mib * MIB,
        optimization_level=settings.builder_optimization_level,
        hardware_compatibility=settings.hardware_compatibility,
        compute_capabilities=compute_capabilities,
    )


def _refusals(library: Library, settings: EngineConfig) -> Iterator[str]:
    if settings.hardware_compatibility != "none":
        level = settings.hardware_compatibility.upper()
        if library.builds_without_gpu:
            yield "hardware compatibility is ignored by this library; name the GPUs with --compute-capability"
        elif not hasattr(library.trt.HardwareCompatibilityLevel, level):
            yield f"hardware compatibility {settings.hardware_compatibility} is newer than this version; upgrade it"
    if not library.builds_without_gpu:
        return
    if settings.version_compatible:
        yield "engines are bound to their version, there is no runtime for others; leave --version-compatible out"
    if settings.timing_cache is not None:
        yield "a timing cache has no effect, tactics are not timed; leave --timing-cache out"


def apply_options(library: Library, config: Any, options: BuildOptions) -> None:
    """Tell an `IBuilderConfig`.

    Args:
        library: that made it.
        config: changed in place.
        options: from `choose_options`.

    Raises:
        EngineError: a compute capability is refused.
    """
    trt = library.trt
    config.clear_flag(trt.BuilderFlag.TF32)
    for name in options.flags:
        if name != "noTF32":
            config.set_flag(getattr(trt.BuilderFlag, name))
    config.max_aux_streams = options.max_aux_streams
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
            if not config.set_compute_capability(known[capability], i)
        ]
        if refused:
            raise EngineError(f"{library.target} {library.version}: refuses compute capability {', '.join(refused)}")
