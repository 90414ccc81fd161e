"""Build a plan from a network: builder options, profiles, timing cache, progress."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tfexport._io.atomic import whole_file
from tfexport.errors import EngineError, TfexportError, raise_all
from tfexport.tensorrt._library import PORTABLE, Library, load_library
from tfexport.tensorrt.build.network import Graph, Network, parse_graph
from tfexport.tensorrt.config import EngineConfig, Profile, Target
from tfexport.tensorrt.cuda import Gpu, need_gpu

MIB = 1024 * 1024
# A timing cache of a large network has a few megabytes.
MAX_TIMING_CACHE_BYTES = 1024 * MIB

# The oldest compute capability that supports float8 (Ada).
_FP8 = (8, 9)

_log = logging.getLogger(__name__)


def resolve_options(library: Library, config: EngineConfig, gpu: Gpu | None) -> EngineConfig:
    """Check the builder options and choose the compute capabilities, sorted."""
    capabilities, problems = _compute_capabilities(library, config.compute_capabilities, gpu)
    problems += _unsupported(library, config)
    problems += _fp8_problems(config, capabilities or ((gpu.compute_capability,) if gpu else ()))
    raise_all(EngineError, str(library), problems)
    return replace(config, compute_capabilities=capabilities)


def builder_flags(library: Library, config: EngineConfig) -> tuple[str, ...]:
    """Return the builder flags; "noTF32" clears TF32, so that float32 is exact."""
    # TensorRT-RTX guarantees only with this flag that CUDA graphs can be captured. Sessions allocate memory anyway.
    has_allocation_flag = hasattr(library.trt.BuilderFlag, "REQUIRE_USER_ALLOCATION")
    flags = {"REQUIRE_USER_ALLOCATION": has_allocation_flag, "VERSION_COMPATIBLE": config.version_compatible}
    return ("noTF32", *(flag for flag, is_set in flags.items() if is_set))


def build_engine(
    network: Network,
    profiles: Sequence[Profile],
    options: EngineConfig,
    on_progress: Callable[[float], None] = lambda done: None,
    gpu: Gpu | None = None,
) -> bytes:
    """Build a plan on the current GPU.

    `gpu` names it in the timing cache. `on_progress` gets the finished fraction, and may raise to cancel.
    """
    config = network.builder.create_builder_config()
    if config is None:
        raise EngineError(f"{network.subject}: cannot create a configuration: {network.log.reason()}")
    apply_options(network.library, config, options)
    cache = None
    if options.timing_cache:
        cache = attach_timing_cache(network.library, config, options.timing_cache, gpu or need_gpu())
    _add_profiles(network, config, profiles)
    monitor: Monitor = type("TensorRTProgress", (Monitor, network.library.trt.IProgressMonitor), {})(on_progress)
    config.progress_monitor = monitor
    memory = network.builder.build_serialized_network(network.definition, config)
    if monitor.error is not None:
        raise monitor.error
    if memory is None or not memory.nbytes:
        remedy = network.library.unlisted(options.compute_capabilities)
        raise EngineError(network.log.reason(), subject=f"{network.subject}: the engine cannot be built", remedy=remedy)
    if cache:
        save_timing_cache(config, cache)
    return bytes(memory)


def probe(library: str, model: str) -> dict[str, str]:
    """Build and load a small engine; return {"gpu": problem}, "" if this GPU works."""
    try:
        loaded = load_library(cast(Target, library))
        log = loaded.listen()
        runtime = loaded.runtime(log)
        network = parse_graph(loaded, Graph("probe", bytes.fromhex(model), Path("probe.onnx")))
        plan = build_engine(network, (), resolve_options(loaded, EngineConfig(), need_gpu()))
        if runtime.deserialize_cuda_engine(plan) is None:
            return {"gpu": f"{loaded} refuses an engine on this GPU: {log.reason()}"}
    except TfexportError as error:
        return {"gpu": str(error)}
    return {"gpu": ""}


def apply_options(library: Library, config: Any, options: EngineConfig) -> None:
    """Set the options of an `IBuilderConfig`; raise `EngineError` if it refuses one."""
    trt = library.trt
    config.clear_flag(trt.BuilderFlag.TF32)
    for name in builder_flags(library, options)[1:]:
        config.set_flag(getattr(trt.BuilderFlag, name))
    # For the inspector and profilers; the plan computes the same.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.max_aux_streams = 0  # one stream does everything in order
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib * MIB)
    if options.builder_optimization_level is not None:
        config.builder_optimization_level = options.builder_optimization_level
    if options.hardware_compatibility != "none":
        level = getattr(trt.HardwareCompatibilityLevel, options.hardware_compatibility.upper())
        config.hardware_compatibility_level = level
    if options.compute_capabilities:
        known = library.compute_capabilities()
        config.num_compute_capabilities = len(options.compute_capabilities)
        for i, capability in enumerate(options.compute_capabilities):
            if not config.set_compute_capability(known.get(capability, trt.ComputeCapability.CURRENT), i):
                raise EngineError(f"{library}: refuses compute capability {capability}")


def attach_timing_cache(library: Library, config: Any, directory: str, gpu: Gpu) -> Path:
    """Attach the timing cache of a version and GPU; return the file to save it to."""
    path = Path(directory) / f"{library.version}-{re.sub('[^A-Za-z0-9.]+', '-', gpu.name)}.timing"
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > MAX_TIMING_CACHE_BYTES):
            raise EngineError(f"timing cache {path}: not a file of at most {MAX_TIMING_CACHE_BYTES} bytes; remove it")
        known = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise EngineError(f"timing cache {path}: cannot be read ({error.strerror}); choose another one") from error
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise EngineError(f"timing cache {path}: {library} does not accept it; remove it")
    return path


def save_timing_cache(config: Any, path: Path) -> None:
    """Add the timings of a build to the file of `attach_timing_cache`.

    A failure is a warning, because the plan is built.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, waits=True) as draft:
            draft.write_bytes(_merged_timings(config, path))
    except (OSError, TfexportError) as error:
        _log.warning("timing cache %s: not saved, so later builds take longer: %s", path, error)


def _merged_timings(config: Any, path: Path) -> bytes:
    cache = config.get_timing_cache()
    if cache is not None and path.exists():  # another build may have written it since this one has read it
        known = config.create_timing_cache(path.read_bytes())
        if known is None or not cache.combine(known, ignore_mismatch=False):
            raise EngineError("the library does not combine it with this file; remove it")
    serialized = None if cache is None else cache.serialize()
    if serialized is None:
        raise EngineError("the library returns none")
    return bytes(serialized)


class Monitor:
    """Calls `on_progress` with the finished fraction of a build, 0 to 1, ascending."""

    def __init__(self, on_progress: Callable[[float], None]) -> None:
        super().__init__()
        self._on_progress = on_progress
        self._done = 0.0
        self._open: dict[str, tuple[int, int]] = {}  # steps reached and steps of each phase, the outermost first
        self.error: BaseException | None = None  # of `on_progress`; it must not pass through the library

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Start a phase."""
        self._reach(phase_name, 0, num_steps)

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Count a step, from 0, and return whether to continue."""
        if phase_name in self._open:
            self._reach(phase_name, step + 1, self._open[phase_name][1])
        return self.error is None

    def phase_finish(self, phase_name: str) -> None:
        """End a phase, possibly before its last step."""
        if phase_name in self._open:
            self._reach(phase_name, self._open[phase_name][1], self._open[phase_name][1])
            del self._open[phase_name]

    def _reach(self, phase: str, step: int, steps: int) -> None:
        self._open[phase] = step, steps
        part = 0.0
        for reached, total in reversed(self._open.values()):
            part = min(1.0, (reached + part) / total) if total else 0.0
        self._done = max(self._done, part)
        if self.error is None:
            try:
                self._on_progress(self._done)
            except BaseException as error:  # noqa: BLE001 - raised again by `build_engine`
                self.error = error


def _compute_capabilities(
    library: Library, wanted: Sequence[str], gpu: Gpu | None
) -> tuple[tuple[str, ...], list[str]]:
    # The library's enum is older than its kernels. For a capability that it does not name, it can only build on a GPU
    # that has it, and for no other at the same time. A build or load shows whether the library has kernels for it.
    known = library.compute_capabilities()
    if not known:
        listed = f"compute capability {', '.join(wanted)}: it builds only for the local GPU"
        return (), [f"{listed}; leave it out or choose --target tensorrt-rtx"] if wanted else []
    here = gpu.compute_capability if gpu else None
    chosen = wanted or ((here,) if here else PORTABLE)
    if here and here not in known and set(chosen) == {here}:
        return (here,), []
    unknown = [capability for capability in chosen if capability not in known]
    local = "only the local GPU" if here else "a local GPU, and there is none"
    listed = f"compute capability {', '.join(unknown)}: it builds for {', '.join(known)}, or for {local}"
    problems = [f"{listed}; choose one of them, or --target tensorrt on such a GPU"] if unknown else []
    return tuple(capability for capability in known if capability in chosen), problems


def _unsupported(library: Library, config: EngineConfig) -> Iterator[str]:
    # A build would fail on these options or silently ignore them.
    if config.hardware_compatibility != "none":
        level = config.hardware_compatibility.upper()
        if library.builds_without_gpu:
            yield "hardware compatibility has no effect in this library; name the GPUs with --compute-capability"
        elif not hasattr(library.trt.HardwareCompatibilityLevel, level):
            yield f"hardware compatibility {config.hardware_compatibility} is newer than this version; upgrade it"
    if library.builds_without_gpu and config.version_compatible:
        yield "engines run only with their own version; leave --version-compatible out"
    if library.builds_without_gpu and config.timing_cache is not None:
        yield "a timing cache has no effect, because tactics are not timed; leave --timing-cache out"


def _fp8_problems(config: EngineConfig, capabilities: Sequence[str]) -> list[str]:
    too_old = [capability for capability in capabilities if tuple(map(int, capability.split("."))) < _FP8]
    if config.weights != "fp8" or not too_old:
        return []
    need = f"weights fp8 need compute capability {'.'.join(map(str, _FP8))} or newer, not {', '.join(too_old)}"
    return [f"{need}; name newer ones with --compute-capability, or choose int8"]


def _add_profiles(network: Network, config: Any, profiles: Sequence[Profile]) -> None:
    for index, profile in enumerate(profiles):
        made = network.builder.create_optimization_profile()
        if made is None:
            raise EngineError(f"{network.subject}: cannot create a profile: {network.log.reason()}")
        for tensor in network.inputs:
            shapes = profile[tensor.name]
            set_range = made.set_shape_input if tensor.is_shape_tensor else made.set_shape
            set_range(tensor.name, shapes.min, shapes.opt, shapes.max)
        if not made or config.add_optimization_profile(made) != index:
            raise EngineError(f"{network.subject}: profile {index} is refused: {network.log.reason()}")
