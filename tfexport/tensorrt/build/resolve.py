"""Resolve the build options of a bundle's engines, and prepare their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from tfexport.bundle.bundle import Bundle
from tfexport.contract import DECODER, ENCODER, QUANTIZED_WEIGHTS, REORDER, WEIGHTS, ModelSpec, Variant
from tfexport.errors import ConfigError, EngineError, raise_all, shortened
from tfexport.export.mixed import keep_fp32, layer_names
from tfexport.export.passes import fix_capacity
from tfexport.export.quantize.qdq import quantize_graphs
from tfexport.export.reorder import reorder_graph
from tfexport.precision import Accuracy
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.build._profiles import Profiles, make_profiles
from tfexport.tensorrt.build.builder import resolve_options
from tfexport.tensorrt.build.network import Graph
from tfexport.tensorrt.config import EngineConfig, decoder_plans, engine_key, updates_in_place
from tfexport.tensorrt.cuda import Gpu

T = TypeVar("T")
_EXPORT_BOTH = "export it with --variants concat,static"


@dataclass(frozen=True)
class ResolvedBuild:
    """Resolved build options of the engines of a bundle."""

    bundle: Bundle
    library: Library
    gpu: Gpu | None
    config: EngineConfig  # for the manifest; without the timing cache, which is a path on this machine
    spec: ModelSpec  # in the precision of the engines
    profiles: Profiles
    options: EngineConfig  # for the builder
    notes: tuple[str, ...]  # about choices that may be unexpected

    @property
    def name(self) -> str:
        """Name of the engine's folder."""
        quantization = self.bundle.manifest.quantization
        return engine_key(self.config, quantization.precision if quantization else None)

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of the bundle's graphs that become plans."""
        return (ENCODER,) if self.config.variant is None else (ENCODER, DECODER[self.config.variant])

    @property
    def is_exported_again(self) -> bool:
        """Whether the engines have a precision that the bundle's graphs do not have."""
        return self.spec.precision != self.bundle.manifest.spec.precision

    @property
    def accuracy(self) -> Accuracy:
        """The data type that limits the numerical accuracy of the engines."""
        manifest = self.bundle.manifest
        return self.config.weights or (manifest.accuracy if manifest.quantization else self.spec.precision)

    @property
    def sources(self) -> dict[str, str]:
        """The sha256 of every bundle file that the engines are made from, by name."""
        files = self.bundle.manifest.files
        names = [self.bundle.manifest.graphs[graph].file for graph in self.graphs]
        return {name: files[name].sha256 for name in (*names, WEIGHTS, QUANTIZED_WEIGHTS) if name in files}


def resolve(bundle: Bundle, config: EngineConfig, library: Library, gpu: Gpu | None) -> ResolvedBuild:
    """Resolve all build options; raise `EngineError` with every problem."""
    if bundle.manifest.has_shortlist:
        raise EngineError(f"trt: {bundle.path} is for ONNX Runtime on the CPU; export it again without --shortlist")
    problems = _bundle_problems(bundle, config)
    notes: list[str] = []
    variant = _variant(bundle, config, library, problems, notes)
    spec = replace(bundle.manifest.spec, precision=config.precision or bundle.manifest.spec.precision)
    profiles = _collect(problems, lambda: make_profiles(spec, variant or "concat", config))
    quantization = bundle.manifest.quantization
    narrow = config.weights if quantization is None else quantization.weights
    options = _collect(problems, lambda: resolve_options(library, replace(config, weights=narrow), gpu))
    if config.fp32_layers and spec.precision == "fp32":
        problems.append("fp32_layers is given, but all layers have the precision fp32; leave it out")
    raise_all(EngineError, "trt", problems)
    if config.weights is not None:
        notes.append(
            f"weights {config.weights} make the plans smaller; whether steps are faster depends on the GPU and was not "
            "measured, so compare both with tfexport bench"
        )
    assert profiles is not None
    assert options is not None
    options = replace(options, weights=config.weights)  # what is left to quantize
    resolved = replace(
        options,
        target=library.target,
        variant=variant,
        precision=spec.precision,
        max_source_length=profiles.limits.max_source_length,
        max_target_length=profiles.limits.max_target_length or None,
        capacities=profiles.limits.capacities,
        timing_cache=None,
    )
    return ResolvedBuild(bundle, library, gpu, resolved, spec, profiles, options, tuple(notes))


def prepare_graphs(resolved: ResolvedBuild, directory: Path, report: Callable[[str], None]) -> list[Graph]:
    """Create the graph of every plan; `directory` receives files the bundle lacks."""
    config, manifest, folder = resolved.config, resolved.bundle.manifest, resolved.bundle.path
    entries = {name: manifest.graphs[name] for name in resolved.graphs}
    if resolved.is_exported_again:
        from tfexport.export.write import write_precision

        (folder := directory / resolved.spec.precision).mkdir()
        entries = write_precision(resolved.bundle, resolved.spec.precision, config.variant, folder, report=report)
    if config.weights is not None:
        source = folder
        (folder := directory / config.weights).mkdir()
        entries = quantize_graphs(source, entries, folder, config.weights, report=report)
    files = {name: folder / entry.file for name, entry in entries.items()}
    graphs = [Graph(ENCODER, files[ENCODER].read_bytes(), files[ENCODER])]
    if config.variant is not None:
        path = files[DECODER[config.variant]]
        for plan, capacity in decoder_plans(config.variant, resolved.profiles.limits).items():
            is_fixed = updates_in_place(resolved.spec, config.variant)
            data = fix_capacity(path, capacity) if is_fixed else path.read_bytes()
            graphs.append(Graph(plan, data, path))
        graphs.append(Graph(REORDER, reorder_graph(resolved.spec.precision), directory / f"{REORDER}.onnx"))
    return _with_fp32_layers(graphs, config.fp32_layers)


def _with_fp32_layers(graphs: Sequence[Graph], patterns: Sequence[str]) -> list[Graph]:
    """Compute the layers that match a pattern in float32; each must match one."""
    if not patterns:
        return list(graphs)
    names = {name: None for graph in graphs for name in layer_names(graph.data)}
    problems = [
        f"fp32_layers has {shortened(pattern)}, which matches none of {len(names)} layers, such as {next(iter(names))}"
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    raise_all(ConfigError, "engine", problems)
    return [replace(graph, data=keep_fp32(graph.data, patterns)) for graph in graphs]


def _bundle_problems(bundle: Bundle, config: EngineConfig) -> list[str]:
    manifest = bundle.manifest
    own = manifest.spec.precision
    if manifest.quantization is not None and manifest.quantization.calibration is None:
        remedy = "export it with --precision fp32 and build that with --weights"
        return [f"the bundle holds {manifest.accuracy} weights for ONNX Runtime on the CPU; {remedy}"]
    if manifest.quantization is not None and config.weights is not None:
        return [f"weights is {config.weights}, but the bundle is quantized to {manifest.accuracy}; leave it out"]
    if config.precision not in (None, own) and (manifest.config is None or WEIGHTS not in manifest.files):
        problem = f"precision is {config.precision}, the bundle has {own} and no model to export again"
        return [f"{problem}; export it with --precision {config.precision}"]
    return []


def _variant(
    bundle: Bundle, config: EngineConfig, library: Library, problems: list[str], notes: list[str]
) -> Variant | None:
    if not bundle.manifest.spec.has_decoder:
        if config.variant is not None:
            problems.append(f"variant is {config.variant}, but an encoder-only bundle has no decoder; leave it out")
        return None
    available = [
        variant for variant, graph in DECODER.items() if graph in bundle.manifest.graphs and variant != "contrib"
    ]
    if not available:
        problems.append(f"the bundle has only the contrib variant, which is for ONNX Runtime; {_EXPORT_BOTH}")
        return None
    unfit = _static_problem(bundle.manifest.spec, library)
    variant = config.variant or (available[0] if unfit else available[-1])
    if variant not in available:
        problems.append(f"variant is {variant}, the bundle has only {available[0]}; {_EXPORT_BOTH}")
    if unfit and variant == "static":
        problems.append(
            f"variant is static, {unfit}; {'use --variant concat' if 'concat' in available else _EXPORT_BOTH}"
        )
    if unfit and config.variant is None and variant != available[-1]:
        notes.append(f"building the concat variant, not static, {unfit}")
    return variant


def _static_problem(spec: ModelSpec, library: Library) -> str | None:
    if not library.updates_caches_in_place:
        return f"which {library} does not support; TensorRT 10.15 and newer do"
    if spec.head_dim != spec.value_dim:
        return f"which needs keys and values of the same width, and a head has {spec.head_dim} and {spec.value_dim}"
    return None


def _collect(problems: list[str], read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (ConfigError, EngineError) as error:
        problems.append(str(error))
        return None
