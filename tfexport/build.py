"""From a bundle to engines inside it: the way read aloud."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.manifest import ENGINES, FileEntry
from tfexport.errors import EngineError, raise_all
from tfexport.spec import (
    ENCODER,
    REORDER,
    TensorSpec,
    key_value_names,
)
from tfexport.trt.artifact.manifest import (
    ENGINE_FORMAT_VERSION,
    ENGINE_MANIFEST,
    BuildMachine,
    EngineManifest,
    PlanEntry,
)
from tfexport.trt.artifact.store import BUILD_LOG, add_engine
from tfexport.trt.build.builder import SerializedEngine, build_engine
from tfexport.trt.build.estimate import Estimate, estimate
from tfexport.trt.build.gauge import Gauge
from tfexport.trt.build.graphs import Graph, prepare_graphs
from tfexport.trt.build.interrupt import interruptible
from tfexport.trt.build.network import Tensor
from tfexport.trt.build.resolve import ResolvedBuild, resolve
from tfexport.trt.config import EngineConfig, engine_key
from tfexport.trt.cuda import find_gpus
from tfexport.trt.library import load_library


@dataclass(frozen=True)
class BuiltEngine:
    """What `build_engines` made.

    Attributes:
        name: of the engine in its bundle.
        path: of its folder.
        manifest: what it says of itself.
    """

    name: str
    path: Path
    manifest: EngineManifest

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"name": self.name, "path": str(self.path), "manifest": self.manifest.to_dict()}

    def lines(self) -> list[str]:
        """Say what was built, in one line."""
        size = sum(plan.content.bytes for plan in self.manifest.plans.values())
        kinds = f"{self.manifest.config.target} {self.manifest.library_version}"
        return [f"{self.path}: {kinds}, {', '.join(self.manifest.plans)}, {size / 1e6:.1f} MB"]


def build_engines(
    path: Path,
    config: EngineConfig,
    *,
    force: bool = False,
    report: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> BuiltEngine:
    """Build the engines of a bundle and put them into it.

    Args:
        path: of the bundle.
        config: what to build; what is left open is decided by bundle, library and machine.
        force: replace the engine of the same target, form, precision and weight type.
        report: told what happens, a line at a time.
        on_progress: told which part is done, from 0 to 1; what it raises cancels the build.

    Raises:
        BundleError: the bundle is damaged or cannot be written.
        EngineError: lists all that does not fit the bundle or the library, or says why the library cannot build.
        GraphError: a graph cannot be made from the bundle.
        BackendError: the library is not usable, or needs a GPU that is not there.
    """
    resolved = resolve_build(path, config)
    bundle, name = resolved.bundle, engine_key(resolved.config)
    with add_engine(bundle.path, name, force=force) as folder:
        plans: dict[str, PlanEntry] = {}
        # On the disk of the bundle: weights of another precision can be larger than /tmp.
        with tempfile.TemporaryDirectory(dir=folder) as scratch, (folder / BUILD_LOG).open("w") as log:
            graphs = prepare_graphs(resolved, Path(scratch), report)
            gauge = Gauge(len(graphs), on_progress)
            for graph in graphs:
                report(f"building {graph.name}")
                plan = _build(resolved, graph, gauge)
                plans[graph.name] = _write(resolved, plan, folder)
                log.writelines(f"{line}\n" for line in (f"== {graph.name}", *plan.log))
                gauge.finish_build()
        manifest = _manifest(resolved, plans)
        (folder / ENGINE_MANIFEST).write_bytes(manifest.to_bytes())
    return BuiltEngine(name, bundle.path / ENGINES / name, manifest)


def estimate_engines(
    path: Path, config: EngineConfig, *, report: Callable[[str], None] = lambda line: None
) -> Estimate:
    """Say what `build_engines` would build and need; builds nothing and leaves the bundle alone.

    Args:
        path: of the bundle.
        config: what to build.
        report: told what happens, a line at a time.

    Raises:
        As `build_engines`, for everything that can be known before.
    """
    resolved = resolve_build(path, config)
    with tempfile.TemporaryDirectory() as scratch:
        return estimate(resolved, prepare_graphs(resolved, Path(scratch), report))


def resolve_build(path: Path, config: EngineConfig) -> ResolvedBuild:
    """Open a bundle and decide how its engines are built; builds nothing.

    Raises:
        BundleError: the bundle is damaged.
        EngineError: lists all that does not fit the bundle or the library.
        BackendError: the library is not usable.
    """
    bundle = open_bundle(path)
    gpus = find_gpus()
    return resolve(bundle, config, load_library(config.target), gpus[0] if gpus else None)


def _build(resolved: ResolvedBuild, graph: Graph, gauge: Gauge) -> SerializedEngine:
    with interruptible() as check:

        def tell(phase: str, step: int, total: int) -> None:
            check()
            gauge.tell(phase, step, total)

        return build_engine(
            resolved.library,
            graph.name,
            graph.data,
            graph.path,
            resolved.profiles.engines[graph.name],
            resolved.settings,
            resolved.options.compute_capabilities,
            tell,
        )


def _write(resolved: ResolvedBuild, plan: SerializedEngine, folder: Path) -> PlanEntry:
    """Write a plan and say what it is; only one at a time is in memory."""
    contract = resolved.contract(plan.name)
    problems = [*_differences(plan.inputs, contract.inputs), *_differences(plan.outputs, contract.outputs)]
    raise_all(EngineError, f"{resolved.library.target} {resolved.library.version}: {plan.name}", problems)
    file = f"{plan.name}.plan"
    (folder / file).write_bytes(plan.data)
    in_place = resolved.form == "static" and plan.name not in (ENCODER, REORDER)
    pasts, presents = (key_value_names(prefix, resolved.spec.layers) for prefix in ("past", "present"))
    return PlanEntry(
        file=file,
        content=FileEntry(bytes=len(plan.data), sha256=hashlib.sha256(plan.data).hexdigest()),
        inputs=contract.inputs,
        outputs=contract.outputs,
        aliases=dict(zip(presents, pasts, strict=True)) if in_place else {},
        profiles=resolved.profiles.engines[plan.name],
        layers=plan.layers,
    )


def _differences(found: tuple[Tensor, ...], expected: tuple[TensorSpec, ...]) -> list[str]:
    got = {tensor.name: tensor.dtype for tensor in found}
    wanted = {tensor.name: tensor.dtype for tensor in expected}
    return [
        f"{name} is {got.get(name, 'missing')}, expected {wanted.get(name, 'nothing of this name')}"
        for name in sorted(got.keys() | wanted.keys())
        if got.get(name) != wanted.get(name)
    ]


def _manifest(resolved: ResolvedBuild, plans: dict[str, PlanEntry]) -> EngineManifest:
    gpus = find_gpus()
    machine = BuildMachine(
        system=platform.system(),
        architecture=platform.machine(),
        gpu=gpus[0].name if gpus else None,
        compute_capability=gpus[0].compute_capability if gpus else None,
        driver=gpus[0].driver_version if gpus else None,
    )
    tools = ["tfexport", "onnx", *(["torch"] if resolved.is_exported_again else [])]
    return EngineManifest(
        format_version=ENGINE_FORMAT_VERSION,
        library_version=resolved.library.version,
        config=resolved.config,
        limits=resolved.profiles.limits,
        flags=resolved.options.flags,
        machine=machine,
        sources=resolved.sources,
        plans=plans,
        versions={name: importlib.metadata.version(name) for name in tools},
    )
