"""From an engine in a bundle to plans that run: refuse what does not fit here, then deserialise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfexport.bundle.bundle import Bundle
from tfexport.errors import EngineError
from tfexport.tensorrt.artifact.compatibility import explain, incompatibilities, rebuild_command, this_machine
from tfexport.tensorrt.artifact.manifest import EngineManifest
from tfexport.tensorrt.artifact.store import StoredEngine, choose_engine
from tfexport.tensorrt.library import Library, load_library
from tfexport.tensorrt.log import Log


@dataclass(frozen=True)
class Engine:
    """An engine in memory.

    Attributes:
        manifest: what it says of itself.
        library: the library that runs it.
        plans: an `ICudaEngine` by plan name; the session that drives them owns them.
        path: its folder.
        log: of the runtime, for the reasons of later failures.
        runtime: that made the plans, kept as long as they are.
    """

    manifest: EngineManifest
    library: Library
    plans: Mapping[str, Any]
    path: Path
    log: Log
    runtime: Any


def load_engine(bundle: Bundle, name: str | None = None) -> Engine:
    """Load an engine of a bundle onto the first GPU.

    Everything that can be checked without the library is checked first: every
    byte, the bundle it was made from, the version, and the GPU.

    Args:
        bundle: opened and checked.
        name: of the engine; None for the only one that may be used here.

    Raises:
        EngineError: it is damaged or may not be used here, with every reason and the remedy, or the library refuses it.
        BackendError: the library cannot be used, or there is no GPU.
    """
    machine = this_machine()
    stored = choose_engine(bundle, name, machine)
    config = stored.manifest.config
    library = load_library(config.target)
    # What the library says of its version goes before what pip wrote down.
    machine = replace(machine, libraries={library.target: library.version})
    if found := incompatibilities(stored.manifest, bundle, machine):
        raise EngineError(f"engine {stored.name}: {explain(found)}")
    log = library.listen()
    runtime = library.runtime(log)
    if config.version_compatible:
        # Such a plan carries host code, which the library runs only when it is told to.
        runtime.engine_host_code_allowed = True
    plans = {plan: _deserialise(runtime, library, log, stored, plan, bundle) for plan in stored.manifest.plans}
    return Engine(stored.manifest, library, plans, stored.path, log, runtime)


def _deserialise(runtime: Any, library: Library, log: Log, stored: StoredEngine, plan: str, bundle: Bundle) -> Any:
    config = stored.manifest.config
    raw = stored.read_plan(plan)
    log.clear()
    reason = None
    if hasattr(runtime, "get_engine_validity"):
        reason = validity_problem(library.trt, *runtime.get_engine_validity(raw))
    engine = None if reason else runtime.deserialize_cuda_engine(raw)
    if engine is None or reason:
        raise EngineError(
            f"engine {stored.name}: {library.target} {library.version} refuses {plan}.plan: {reason or log.reason()}; "
            f"build it again with: {rebuild_command(bundle.path, config)}"
        )
    return engine


def validity_problem(trt: Any, validity: Any, diagnostics: Any) -> str | None:
    """Spell what `get_engine_validity` says.

    Args:
        trt: the module, which has the enums.
        validity: its first result; a plan that is only suboptimal may be loaded.
        diagnostics: its second result, a set of bits.

    Returns:
        The names of the bits, or None when the plan may be loaded.
    """
    if validity != trt.EngineValidity.INVALID:
        return None
    members = trt.EngineInvalidityDiagnostics.__members__
    names = [name for name, member in members.items() if int(diagnostics) & int(member)]
    return f"invalid, {', '.join(names) or 'without a reason'}"
