"""Resolve how the engines of a bundle are built: everything that was left open, and everything that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from tfexport.bundle.bundle import Bundle
from tfexport.contract import (
    DECODER,
    ENCODER,
    REORDER,
    WEIGHTS,
    Form,
    GraphSpec,
    ModelSpec,
    decoder_graph,
    encoder_graph,
    key_value_names,
    reorder_spec,
)
from tfexport.errors import ConfigError, EngineError, raise_all
from tfexport.tensorrt.build.options import BuilderOptions, resolve_options
from tfexport.tensorrt.build.profiles import Profiles, make_profiles
from tfexport.tensorrt.config import EngineConfig
from tfexport.tensorrt.cuda import Gpu
from tfexport.tensorrt.library import Library

T = TypeVar("T")


@dataclass(frozen=True)
class ResolvedBuild:
    """How the engines of a bundle are built, with nothing left open.

    Attributes:
        bundle: opened and checked.
        library: that builds.
        gpu: of this machine, None without one.
        config: with every choice made, as the manifest says it; without the timing cache, a place on this machine.
        spec: of the model in the precision of the engines.
        profiles: of every plan, and the limits that follow.
        options: what the builder is told.
        notes: on choices that may surprise, a line each.
    """

    bundle: Bundle
    library: Library
    gpu: Gpu | None
    config: EngineConfig
    spec: ModelSpec
    profiles: Profiles
    options: BuilderOptions
    notes: tuple[str, ...]

    @property
    def form(self) -> Form | None:
        """Of the decoder; None for an encoder alone."""
        return self.config.form

    @property
    def graphs(self) -> tuple[str, ...]:
        """The graphs of the bundle that become plans, by name."""
        return (ENCODER,) if self.form is None else (ENCODER, DECODER[self.form])

    @property
    def is_exported_again(self) -> bool:
        """Whether the graphs are made anew, since the bundle has another precision."""
        return self.spec.precision != self.bundle.manifest.spec.precision

    @property
    def sources(self) -> dict[str, str]:
        """The sha256 of every file of the bundle that the engines come from, by name."""
        files = self.bundle.manifest.files
        names = [self.bundle.manifest.graphs[graph].file for graph in self.graphs]
        return {name: files[name].sha256 for name in (*names, WEIGHTS) if name in files}

    def contract(self, plan: str) -> GraphSpec:
        """Return the inputs and outputs of a plan."""
        if plan == REORDER:
            return reorder_spec(self.spec.precision)
        if self.form is None or plan == ENCODER:
            return encoder_graph(self.spec)
        return decoder_graph(self.spec, self.form)

    def aliases(self, plan: str) -> dict[str, str]:
        """Return which output of a plan has the memory of which input: in the static form present that of past."""
        if self.form != "static" or plan in (ENCODER, REORDER):
            return {}
        pasts, presents = (key_value_names(prefix, self.spec.layers) for prefix in ("past", "present"))
        return dict(zip(presents, pasts, strict=True))


def resolve(bundle: Bundle, config: EngineConfig, library: Library, gpu: Gpu | None) -> ResolvedBuild:
    """Resolve what is left open against a bundle, a library and a machine; builds nothing.

    Args:
        bundle: opened and checked.
        config: what the user wants.
        library: that will build.
        gpu: of this machine, None without one.

    Raises:
        EngineError: lists everything that the bundle or the library does not have.
    """
    problems = _bundle_problems(bundle, config)
    notes: list[str] = []
    form = _form(bundle, config, library, problems, notes)
    spec = replace(bundle.manifest.spec, precision=config.precision or bundle.manifest.spec.precision)
    profiles = _collect(problems, lambda: make_profiles(spec, form or "concat", config))
    options = _collect(problems, lambda: resolve_options(library, config, gpu))
    raise_all(EngineError, "trt", problems)
    assert profiles is not None
    assert options is not None
    resolved = replace(
        config,
        target=library.target,
        form=form,
        precision=spec.precision,
        max_source_length=profiles.limits.max_source_length,
        max_target_length=profiles.limits.max_target_length or None,
        capacities=profiles.limits.capacities,
        compute_capabilities=options.compute_capabilities,
        timing_cache=None,
    )
    return ResolvedBuild(bundle, library, gpu, resolved, spec, profiles, options, tuple(notes))


def _bundle_problems(bundle: Bundle, config: EngineConfig) -> list[str]:
    """Say what the bundle cannot be made into."""
    manifest = bundle.manifest
    own = manifest.spec.precision
    is_changed = config.precision not in (None, own)
    problems = []
    if manifest.quantization is not None:
        remedy = "export it with --precision fp32 and build that with --weights"
        return [f"the bundle holds {manifest.accuracy} weights for ONNX Runtime on the CPU; {remedy}"]
    if is_changed and (manifest.config is None or WEIGHTS not in manifest.files):
        problems.append(
            f"precision is {config.precision}, the bundle has {own} and no model to export again; "
            f"export it with --precision {config.precision}"
        )
    return problems


def _form(bundle: Bundle, config: EngineConfig, library: Library, problems: list[str], notes: list[str]) -> Form | None:
    """Choose the form of the decoder, appending what speaks against it and what is to be said of it."""
    if not bundle.manifest.spec.has_decoder:
        if config.form is not None:
            problems.append(f"form is {config.form}, but an encoder alone has no decoder; leave it out")
        return None
    there = [form for form, graph in DECODER.items() if graph in bundle.manifest.graphs and form != "contrib"]
    if not there:
        problems.append(
            "the bundle has the contrib form alone, which is for ONNX Runtime; export it with --forms concat,static"
        )
        return None
    unfit = _static_problem(bundle.manifest.spec, library)
    form = config.form or (there[0] if unfit else there[-1])
    if form not in there:
        problems.append(f"form is {form}, the bundle has {there[0]} alone; export it with --forms concat,static")
    if unfit and form == "static":
        remedy = "use --form concat" if "concat" in there else "export it with --forms concat,static"
        problems.append(f"form is static, {unfit}; {remedy}")
    if unfit and config.form is None and form != there[-1]:
        notes.append(f"building the concat form, not static, {unfit}")
    return form


def _static_problem(spec: ModelSpec, library: Library) -> str | None:
    """Say why no engine of the static form can be built of a model."""
    if not library.updates_caches_in_place:
        return f"which {library.target} {library.version} has no layer for, unlike TensorRT 10.15 and newer"
    if spec.head_dim != spec.value_dim:
        return (
            f"whose attention takes keys and values of one width, and a head has {spec.head_dim} and {spec.value_dim}"
        )
    return None


def _collect(problems: list[str], read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (ConfigError, EngineError) as error:
        problems.append(str(error))
        return None
