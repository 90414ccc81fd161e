"""Build the engines of a bundle, or estimate the result and its memory."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfexport._io.atomic import interrupts_held
from tfexport._io.names import BUILD_LOG, ENGINE_LAYERS, ENGINE_MANIFEST, ENGINE_SIGNATURE
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.signature import SigningKey, TrustedKeys
from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.contents import ENGINE_FORMAT_VERSION
from tfexport.bundle.manifest import ENGINES
from tfexport.contract import REORDER, Device
from tfexport.export.graph_file import weight_bytes
from tfexport.export.memory import activation_bytes
from tfexport.tensorrt._library import load_library
from tfexport.tensorrt._manifest import BuildMachine, EngineManifest, PlanEntry
from tfexport.tensorrt.build.builder import build_engine, builder_flags
from tfexport.tensorrt.build.network import Graph, check_contract, parse_graph
from tfexport.tensorrt.build.resolve import ResolvedBuild, prepare_graphs, resolve
from tfexport.tensorrt.config import EngineConfig, EngineLimits, Profile, cache_aliases, cache_bytes, plan_contract
from tfexport.tensorrt.cuda import choose_gpu, on_gpu
from tfexport.tensorrt.inspector import inspect_plan, kernels_of
from tfexport.tensorrt.store import EngineBundle, add_engine


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Resolved options of a build, and the device memory of its engines in bytes."""

    name: str
    library_version: str
    config: EngineConfig
    limits: EngineLimits
    flags: tuple[str, ...]
    profiles: Mapping[str, tuple[Profile, ...]]
    memory: dict[str, int]  # at the largest shapes, computed node by node

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        config = self.config
        kind = ", ".join(part for part in (config.variant, config.precision, config.weights) if part)
        lines = [
            f"would build {self.name} with {config.target} {self.library_version}: {kind}",
            f"  for    {', '.join(config.compute_capabilities) or 'the local GPU'}",
            f"  flags  {', '.join(self.flags)}",
            "",
            "Limits",
        ]
        for name, limit in asdict(self.limits).items():
            spelled = limit if isinstance(limit, int) else ", ".join(map(str, limit)) or "none"
            lines.append(f"  {name:<18} {spelled}")
        for plan, profiles in self.profiles.items():
            kinds = (", step", ", prefill") if len(profiles) > 1 else ("",)
            for of_profile, profile in zip(kinds, profiles, strict=True):
                lines += ["", f"Plan {plan}{of_profile}", *_ranges(profile)]
        sizes = (f"  {name:<12} {size / 1e6:>10.1f} MB" for name, size in self.memory.items())
        return [*lines, "", "Device memory at these limits, about", *sizes]


def build_engines(
    path: Path,
    config: EngineConfig,
    *,
    force: bool = False,
    sign_key: Path | None = None,
    device: Device | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> EngineBundle:
    """Build the engines of a bundle and add them to it.

    Args:
        path: directory of the bundle.
        config: build options; unset options are chosen for the bundle, library and machine.
        force: replace the engine of the same target, variant, precision and weight type.
        sign_key: private key that signs the engine; None leaves it unsigned.
        device: GPU to build on, such as "cuda:1"; None is the first one, or none at all for TensorRT-RTX.
        trusted_keys: files of public keys, one of which must have signed the bundle; None accepts every bundle.
        report: called with a line about each step.
        on_progress: called with the finished fraction, 0 to 1; an exception cancels the build.

    Raises:
        BundleError: the bundle is damaged or not writable.
        ConfigError: a key is invalid.
        EngineError: the bundle or the library does not support an option, or the library cannot build; lists every
            problem.
        GraphError: a graph cannot be made from the bundle.
        BackendError: the library is not usable, or needs a GPU and there is none.
    """
    key = None if sign_key is None else SigningKey.read(sign_key)
    resolved = resolve_build(path, config, device, trusted_keys, report)
    bundle, name = resolved.bundle, resolved.name
    target = bundle.path / ENGINES / name
    if key is None and (bundle.is_signed or (force and os.path.lexists(target / ENGINE_SIGNATURE))):
        signed = "bundle is" if bundle.is_signed else "engine was"
        report(f"the {signed} signed and this engine will not be; sign it with --sign-key")
    with add_engine(bundle.path, name, force=force, key=key) as folder:
        plans: dict[str, PlanEntry] = {}
        inspected: dict[str, Any] = {}
        # On the bundle's disk, because weights of another precision may not fit into /tmp.
        with tempfile.TemporaryDirectory(dir=folder) as scratch, (folder / BUILD_LOG).open("w") as log:
            graphs = prepare_graphs(resolved, Path(scratch), report)
            for index, graph in enumerate(graphs):
                report(f"building {graph.name}")

                def on_part(part: float, index: int = index) -> None:
                    on_progress((index + part) / len(graphs))

                plans[graph.name], lines, found = _build(resolved, graph, on_part, folder)
                kernels = [f"KERNEL {count} {name}" for name, count in plans[graph.name].kernels.items()]
                log.writelines(f"{line}\n" for line in (f"== {graph.name}", *lines, *kernels))
                if found:
                    inspected[graph.name] = json.loads(found)
                elif resolved.gpu:
                    report(f"{graph.name} could not be inspected, because it cannot be loaded on this GPU now")
        if inspected:
            (folder / ENGINE_LAYERS).write_text(json.dumps(inspected, indent=1))
        manifest = _manifest(resolved, plans, folder)
        (folder / ENGINE_MANIFEST).write_bytes(manifest.to_bytes())
    return EngineBundle(name, target, manifest)


def estimate_engines(
    path: Path,
    config: EngineConfig,
    *,
    device: Device | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Estimate:
    """Estimate a build of `build_engines`, which has the same arguments and errors."""
    resolved = resolve_build(path, config, device, trusted_keys, report)
    limits = resolved.profiles.limits
    with tempfile.TemporaryDirectory() as scratch:
        graphs = prepare_graphs(resolved, Path(scratch), report)
        activations = [_activations(resolved, graph) for graph in graphs if graph.name != REORDER]
        memory = {
            "weights": sum(weight_bytes(graph.data) for graph in graphs),
            "caches": cache_bytes(resolved.spec, limits),
            "activations": max(first for first, *_ in activations),
            "prefill": max((prefill for _, *more in activations for prefill in more), default=0),
        }
    return Estimate(
        name=resolved.name,
        library_version=resolved.library.version,
        config=resolved.config,
        limits=limits,
        flags=builder_flags(resolved.library, resolved.config),
        profiles=resolved.profiles.engines,
        memory=memory,
    )


def resolve_build(
    path: Path,
    config: EngineConfig,
    device: Device | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> ResolvedBuild:
    """Open a bundle and resolve all build options, without building."""
    bundle = open_bundle(path, trusted_keys=None if trusted_keys is None else TrustedKeys.read(trusted_keys))
    resolved = resolve(bundle, config, load_library(config.target), choose_gpu(device))
    for note in resolved.notes:
        report(note)
    return resolved


def _build(
    resolved: ResolvedBuild, graph: Graph, on_progress: Callable[[float], None], folder: Path
) -> tuple[PlanEntry, list[str], str]:
    profiles = resolved.profiles.engines[graph.name]
    contract = plan_contract(graph.name, resolved.spec, resolved.config.variant)
    with interrupts_held() as check, on_gpu(resolved.gpu):

        def on_part(part: float) -> None:
            check()
            on_progress(part)

        network = parse_graph(resolved.library, graph)
        check_contract(network, contract)
        data = build_engine(network, profiles, resolved.options, on_part, resolved.gpu)
        inspected = ""
        if resolved.gpu:
            inspected = inspect_plan(resolved.library, data, has_host_code=resolved.config.version_compatible)
    on_progress(1.0)
    path = folder / f"{graph.name}.plan"
    path.write_bytes(data)
    entry = PlanEntry(
        file=path.name,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        inputs=contract.inputs,
        outputs=contract.outputs,
        aliases=cache_aliases(graph.name, resolved.spec, resolved.config.variant),
        profiles=profiles,
        layers=network.layers,
        kernels=kernels_of(data, inspected),
    )
    return entry, network.log.lines(), inspected


def _manifest(resolved: ResolvedBuild, plans: dict[str, PlanEntry], folder: Path) -> EngineManifest:
    gpu = resolved.gpu
    tools = ["tfexport", "onnx", *(["torch"] if resolved.is_exported_again else [])]
    facts = {"gpu": gpu.name, "compute_capability": gpu.compute_capability, "driver": gpu.driver_version} if gpu else {}
    machine = BuildMachine(system=platform.system(), architecture=platform.machine(), **facts)
    return EngineManifest(
        format_version=ENGINE_FORMAT_VERSION,
        library_version=resolved.library.version,
        config=resolved.config,
        limits=resolved.profiles.limits,
        flags=builder_flags(resolved.library, resolved.config),
        machine=machine,
        sources=resolved.sources,
        plans=plans,
        versions={name: importlib.metadata.version(name) for name in tools},
        log=FileEntry.of(folder / BUILD_LOG),
        layers=FileEntry.of(layers) if (layers := folder / ENGINE_LAYERS).exists() else None,
    )


def _activations(resolved: ResolvedBuild, graph: Graph) -> list[int]:
    # By profile: the only one or the step, and the prefill.
    inputs = plan_contract(graph.name, resolved.spec, resolved.config.variant).inputs
    found = []
    for profile in resolved.profiles.engines[graph.name]:
        dims = [pair for tensor in inputs for pair in zip(tensor.shape, profile[tensor.name].max, strict=True)]
        found.append(activation_bytes(graph.path, {dim: size for dim, size in dims if isinstance(dim, str)}))
    return found


def _ranges(profile: Profile) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("", "min", "opt", "max")]
    for name, shape in profile.items():
        stem, _, layer = name.partition(".")  # all layers share a line
        if layer in ("", "0"):
            spelled = ("x".join(map(str, sizes)) for sizes in (shape.min, shape.opt, shape.max))
            rows.append((f"{stem}.*" if layer else stem, *spelled))
    width = max(len(row[0]) for row in rows)
    for name, *shapes in rows:
        yield f"  {name:<{width}}" + "".join(f"{shape:>16}" for shape in shapes)
