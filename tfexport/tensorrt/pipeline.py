"""From a bundle to engines inside it: resolve what is left open, take the graphs, parse and build each, store them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport._io.interrupts import interrupts_held
from tfexport._io.names import BUILD_LOG, ENGINE_MANIFEST, ENGINE_SIGNATURE
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.signature import SigningKey, TrustedKeys
from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.contents import ENGINE_FORMAT_VERSION
from tfexport.bundle.manifest import ENGINES
from tfexport.tensorrt.artifact.manifest import BuildMachine, EngineManifest, PlanEntry
from tfexport.tensorrt.artifact.store import add_engine
from tfexport.tensorrt.build.builder import SerializedEngine, build_engine
from tfexport.tensorrt.build.estimate import Estimate, estimate
from tfexport.tensorrt.build.graphs import prepare_graphs
from tfexport.tensorrt.build.network import Graph, check_contract, parse_graph
from tfexport.tensorrt.build.progress import Progress
from tfexport.tensorrt.build.resolve import ResolvedBuild, resolve
from tfexport.tensorrt.config import EngineConfig, engine_key
from tfexport.tensorrt.cuda import find_gpus
from tfexport.tensorrt.library import load_library


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
        size = sum(plan.bytes for plan in self.manifest.plans.values())
        kinds = f"{self.manifest.config.target} {self.manifest.library_version}"
        return [f"{self.path}: {kinds}, {', '.join(self.manifest.plans)}, {size / 1e6:.1f} MB"]


def build_engines(
    path: Path,
    config: EngineConfig,
    *,
    force: bool = False,
    sign_key: Path | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> BuiltEngine:
    """Build the engines of a bundle and put them into it.

    Args:
        path: of the bundle.
        config: what to build; what is left open is decided by bundle, library and machine.
        force: replace the engine of the same target, form, precision and weight type.
        sign_key: private key that signs the engine; None leaves it unsigned.
        trusted_keys: files of public keys, one of which must have signed the bundle; None builds of whosever.
        report: told what happens, a line at a time.
        on_progress: told which part is done, from 0 to 1; what it raises cancels the build.

    Raises:
        BundleError: the bundle is damaged or cannot be written.
        ConfigError: a key is none.
        EngineError: lists all that does not fit the bundle or the library, or says why the library cannot build.
        GraphError: a graph cannot be made from the bundle.
        BackendError: the library is not usable, or needs a GPU that is not there.
    """
    key = None if sign_key is None else SigningKey.read(sign_key)
    resolved = resolve_build(path, config, trusted_keys=trusted_keys, report=report)
    bundle, name = resolved.bundle, engine_key(resolved.config)
    former = bundle.path / ENGINES / name / ENGINE_SIGNATURE
    if key is None and (bundle.is_signed or (force and os.path.lexists(former))):
        whole = "bundle is" if bundle.is_signed else "engine was"
        report(f"the {whole} signed and this engine will not be; sign it with --sign-key")
    with add_engine(bundle.path, name, force=force, key=key) as folder:
        plans: dict[str, PlanEntry] = {}
        # On the disk of the bundle: weights of another precision can be larger than /tmp.
        with tempfile.TemporaryDirectory(dir=folder) as scratch, (folder / BUILD_LOG).open("w") as log:
            graphs = prepare_graphs(resolved, Path(scratch), report)
            progress = Progress(len(graphs), on_progress)
            for graph in graphs:
                report(f"building {graph.name}")
                engine = _build(resolved, graph, progress)  # one at a time is in memory
                plans[graph.name] = _write(resolved, engine, folder)
                log.writelines(f"{line}\n" for line in (f"== {graph.name}", *engine.log))
        manifest = _manifest(resolved, plans, _entry((folder / BUILD_LOG).read_bytes()))
        (folder / ENGINE_MANIFEST).write_bytes(manifest.to_bytes())
    return BuiltEngine(name, bundle.path / ENGINES / name, manifest)


def estimate_engines(
    path: Path,
    config: EngineConfig,
    *,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Estimate:
    """Say what `build_engines` would build and need; builds nothing and leaves the bundle alone.

    Args:
        path: of the bundle.
        config: what to build.
        trusted_keys: as in `build_engines`.
        report: told what happens, a line at a time.

    Raises:
        As `build_engines`, for everything that can be known before.
    """
    resolved = resolve_build(path, config, trusted_keys=trusted_keys, report=report)
    with tempfile.TemporaryDirectory() as scratch:
        return estimate(resolved, prepare_graphs(resolved, Path(scratch), report))


def resolve_build(
    path: Path,
    config: EngineConfig,
    *,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> ResolvedBuild:
    """Open a bundle and resolve how its engines are built; builds nothing.

    Args:
        path: of the bundle.
        config: what to build.
        trusted_keys: as in `build_engines`.
        report: told of choices that may surprise, a line at a time.

    Raises:
        BundleError: the bundle is damaged.
        ConfigError: a key is none.
        EngineError: lists all that does not fit the bundle or the library.
        BackendError: the library is not usable.
    """
    bundle = open_bundle(path, trusted_keys=None if trusted_keys is None else TrustedKeys.read(trusted_keys))
    gpus = find_gpus()
    resolved = resolve(bundle, config, load_library(config.target), gpus[0] if gpus else None)
    for note in resolved.notes:
        report(note)
    return resolved


def _build(resolved: ResolvedBuild, graph: Graph, progress: Progress) -> SerializedEngine:
    with interrupts_held() as check:

        def on_step(phase: str, step: int, total: int) -> None:
            check()
            progress.step(phase, step, total)

        network = parse_graph(resolved.library, graph)
        check_contract(network, resolved.contract(graph.name))
        engine = build_engine(network, resolved.profiles.engines[graph.name], resolved.options, on_step)
    progress.finish_build()
    return engine


def _write(resolved: ResolvedBuild, engine: SerializedEngine, folder: Path) -> PlanEntry:
    """Write a plan and say what it is."""
    contract, file = resolved.contract(engine.name), f"{engine.name}.plan"
    (folder / file).write_bytes(engine.data)
    return PlanEntry(
        file=file,
        **_entry(engine.data).to_dict(),
        inputs=contract.inputs,
        outputs=contract.outputs,
        aliases=resolved.aliases(engine.name),
        profiles=resolved.profiles.engines[engine.name],
        layers=engine.layers,
    )


def _entry(data: bytes) -> FileEntry:
    return FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _manifest(resolved: ResolvedBuild, plans: Mapping[str, PlanEntry], log: FileEntry) -> EngineManifest:
    gpu = resolved.gpu
    tools = ["tfexport", "onnx", *(["torch"] if resolved.is_exported_again else [])]
    return EngineManifest(
        format_version=ENGINE_FORMAT_VERSION,
        library_version=resolved.library.version,
        config=resolved.config,
        limits=resolved.profiles.limits,
        flags=resolved.options.flags,
        machine=BuildMachine(
            system=platform.system(),
            architecture=platform.machine(),
            gpu=gpu.name if gpu else None,
            compute_capability=gpu.compute_capability if gpu else None,
            driver=gpu.driver_version if gpu else None,
        ),
        sources=resolved.sources,
        plans=plans,
        versions={name: importlib.metadata.version(name) for name in tools},
        log=log,
    )
