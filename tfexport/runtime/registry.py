"""Describe every backend without importing it, and open bundles on them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast, get_args

from tfexport._arguments import is_one_of, is_whole, word_problems
from tfexport._io.extras import install_command
from tfexport.contract import AlignmentHeads, Device, Form, ModelSpec
from tfexport.errors import BackendError, ConfigError, raise_all, shortened
from tfexport.precision import WeightType
from tfexport.runtime.cpu import MAX_THREADS

if TYPE_CHECKING:
    from tfexport.bundle.bundle import Bundle
    from tfexport.runtime.session import Session

AUTO: Final = "auto"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of `tfexport.load`, which documents them."""

    backend: str = AUTO
    form: Form | None = None
    threads: int | Literal["auto"] | None = AUTO
    device: Device = "cpu"
    engine: str | None = None
    trusted_keys: Sequence[str | PathLike[str]] | None = None
    warm_up: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        problems = word_problems(
            backend=(self.backend, names()),
            form=(self.form, (None, *get_args(Form))),
            device=(self.device, get_args(Device)),
        )
        threads, engine = cast(object, self.threads), cast(object, self.engine)  # callers may pass anything
        if not (is_one_of(threads, (None, AUTO)) or (is_whole(threads) and 1 <= threads <= MAX_THREADS)):
            problems.append(f"threads is {shortened(threads)}, expected 1 to {MAX_THREADS}, or {AUTO!r}")
        if not (engine is None or (isinstance(engine, str) and engine)):
            problems.append(f"engine is {shortened(engine)}, expected the name of an engine, or None")
        raise_all(ConfigError, "load", problems)


@dataclass(frozen=True)
class Graphs:
    """Graphs of a bundle, or of an export before its bundle exists.

    Attributes:
        paths: path of each graph by its name in the contract.
        weights: type of the graphs' weights if narrower than the precision of `spec`.
        bundle: None during an export.
        alignment: layer and heads of the alignment graph; None if there is no such graph.
    """

    paths: Mapping[str, Path]
    spec: ModelSpec
    weights: WeightType | None = None
    bundle: Bundle | None = None
    alignment: AlignmentHeads | None = None

    @classmethod
    def of(cls, bundle: Bundle) -> Graphs:
        """Return the graphs of a bundle."""
        manifest = bundle.manifest
        paths = {name: bundle.file(graph.file) for name, graph in manifest.graphs.items()}
        weights = manifest.quantization.weights if manifest.quantization else None
        return cls(paths, manifest.spec, weights, bundle, manifest.alignment)


class BackendModule(Protocol):
    """The module of a backend, imported when the backend is used."""

    def open_bundle(self, bundle: Bundle, options: LoadOptions) -> Session:
        """Open a bundle.

        Raises:
            BackendError: the backend cannot run the bundle with these options.
            BundleError: the bundle lacks a part that the backend needs.
            EngineError: the bundle has no such engine, or the engine cannot be used on this machine.
        """
        ...

    def parity_sessions(self, graphs: Graphs, options: LoadOptions) -> Iterator[tuple[str, Session]]:
        """Open every session that verification compares with the eager model, by stage."""
        ...


@dataclass(frozen=True)
class Requirement:
    """A library that a backend requires."""

    name: str
    module: str
    device: Literal["cpu", "gpu"] = "cpu"  # reported as broken if a probe crashes


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Facts about a backend that are known before it is imported.

    Attributes:
        title: name of the library in messages.
        module: implements `BackendModule`.
        probe_module: has `probe(library, model) -> {device: "" or the problem}`, which the doctor runs.
        requirements: libraries, one of which must be installed.
        runs: graphs of a bundle, engines built into it, or the model itself, which is the reference.
        devices: devices that a user may choose.
    """

    name: str
    title: str
    module: str
    probe_module: str
    requirements: tuple[Requirement, ...]
    runs: Literal["graphs", "engines", "model"]
    devices: tuple[Device, ...] = ("cpu",)

    def missing(self) -> str:
        """Return what is not installed and how to install it; "" if nothing is missing."""
        modules = [requirement.module for requirement in self.requirements]
        if not modules or any(importlib.util.find_spec(module) for module in modules):
            return ""
        return f"{' or '.join(modules)} is not installed; {' or '.join(map(install_command, modules))}"

    def load(self, options: LoadOptions) -> BackendModule:
        """Check that the backend has the options and is installed, and import it."""
        _check_options(self.name, options, runs_engines=self.runs == "engines", devices=self.devices)
        if missing := self.missing():
            raise BackendError(f"{self.name}: {missing}")
        return cast(BackendModule, importlib.import_module(self.module))

    def cannot_run(self, bundle: Bundle, options: LoadOptions) -> str:
        """Return why a bundle does not run on this backend here; "" if it might."""
        manifest = bundle.manifest
        if missing := self.missing():
            return missing
        if options.device not in self.devices:
            return f"has no device {options.device}"
        if self.runs == "model" and (manifest.config is None or manifest.quantization is not None):
            return "the bundle holds graphs only"
        if self.runs == "engines":
            from tfexport.tensorrt.store import engine_names

            return "" if engine_names(bundle.path) else "the bundle has no engines"
        return ""


# In the order in which "auto" tries them.
_BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            name="ort",
            title="ONNX Runtime",
            module="tfexport.runtime.ort.backend",
            probe_module="tfexport.runtime.ort.backend",
            requirements=(Requirement("onnxruntime", "onnxruntime"),),
            runs="graphs",
            devices=get_args(Device),
        ),
        Backend(
            name="eager",
            title="PyTorch",
            module="tfexport.runtime.eager",
            probe_module="tfexport.runtime.eager",
            requirements=(Requirement("torch", "torch"),),
            runs="model",
        ),
        Backend(
            name="trt",
            title="TensorRT",
            module="tfexport.tensorrt.session.session",
            probe_module="tfexport.tensorrt.build.builder",
            requirements=(
                Requirement("tensorrt", "tensorrt", "gpu"),
                Requirement("tensorrt-rtx", "tensorrt_rtx", "gpu"),
            ),
            runs="engines",
        ),
    )
}


def backends() -> tuple[Backend, ...]:
    """Return all registered backends, in order."""
    return tuple(_BACKENDS.values())


def get(name: str) -> Backend:
    """Return a backend by its name; raise `ConfigError` for an unknown name."""
    if not is_one_of(name, _BACKENDS):
        raise ConfigError(f"backend is {shortened(name)}, expected one of {', '.join(map(repr, names()))}")
    return _BACKENDS[name]


def names() -> tuple[str, ...]:
    """Return the names that a user may choose: "auto" and those of all backends."""
    return (AUTO, *_BACKENDS)


def comparable() -> tuple[Backend, ...]:
    """Return the backends that verification compares with the eager model."""
    return tuple(backend for backend in _BACKENDS.values() if backend.runs != "model")


@contextmanager
def registered(backend: Backend) -> Iterator[Backend]:
    """Register a backend, or replace the one with its name, until the block ends."""
    before = dict(_BACKENDS)
    _BACKENDS[backend.name] = backend
    try:
        yield backend
    finally:
        _BACKENDS.clear()
        _BACKENDS.update(before)


def open_session(bundle: Bundle, options: LoadOptions | None = None) -> Session:
    """Open a bundle, already checked, on the backend of the options."""
    options = options or LoadOptions()
    backend = choose(bundle, options) if options.backend == AUTO else get(options.backend)
    return backend.load(options).open_bundle(bundle, options)


def choose(bundle: Bundle, options: LoadOptions) -> Backend:
    """Return the first backend that is installed and can run a bundle.

    Raises:
        BackendError: no backend can; lists the reasons of all.
    """
    all_devices = tuple(device for backend in _BACKENDS.values() for device in backend.devices)
    _check_options(AUTO, options, runs_engines=False, devices=all_devices)
    problems = []
    for backend in _BACKENDS.values():
        problem = backend.cannot_run(bundle, options)
        if not problem:
            return backend
        problems.append(f"{backend.name}: {problem}")
    raise BackendError(f"{bundle.path}: no backend can run it here: {'; '.join(problems)}")


def _check_options(name: str, options: LoadOptions, *, runs_engines: bool, devices: tuple[Device, ...]) -> None:
    if options.engine is not None and not runs_engines:
        others = [each for each in _BACKENDS.values() if each.runs == "engines"]
        option = f"engine {options.engine}"
    elif options.device not in devices:
        others = [each for each in _BACKENDS.values() if options.device in each.devices]
        option = f"device {options.device}"
    else:
        return
    titles, names = (
        " and ".join(each.title for each in others),
        " or ".join(f"--backend {each.name}" for each in others),
    )
    raise BackendError(f"{name}: {option} is for {titles}; use it with {names}, or leave it out")
