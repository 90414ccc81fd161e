"""The registry of backends: one entry each, which says everything about a backend without importing it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

from tfexport._arguments import is_one_of
from tfexport._io.extras import install_command
from tfexport.contract import AlignmentHeads, Device, Form, ModelSpec, WeightType
from tfexport.errors import BackendError, ConfigError, shortened
from tfexport.runtime.threads import Threads

if TYPE_CHECKING:
    from tfexport.bundle.bundle import Bundle
    from tfexport.runtime.session import Session

AUTO: Final = "auto"


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a bundle is opened, beside the backend.

    Attributes:
        form: of the decoder graph; None for the fastest that bundle and device have.
        threads: for one call on the CPU; None for as many as ONNX Runtime finds cores.
        device: where graphs are computed and caches lie.
        engine: name of an engine of the bundle; None for the only one that may be used here.
    """

    form: Form | None = None
    threads: Threads | None = None
    device: Device = "cpu"
    engine: str | None = None


@dataclass(frozen=True)
class Graphs:
    """Graphs to run: of a bundle, or of one that is still being made.

    Attributes:
        paths: of each graph by its name in the contract.
        spec: of the model, with its precision and limits.
        weights: type of the graphs' weights where it is narrower than `spec` says.
        bundle: that they lie in; None while it is being made.
        alignment: layer and heads of the graph of that name; None where there is none.
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


class Home(Protocol):
    """The module of a backend, imported when the backend is used."""

    def open_bundle(self, bundle: Bundle, options: OpenOptions) -> Session:
        """Open a bundle.

        Raises:
            BackendError: the backend cannot run the bundle so.
            BundleError: the bundle lacks what the backend needs.
            EngineError: the bundle has no such engine, or it may not be used here.
        """
        ...

    def rungs(self, graphs: Graphs, options: OpenOptions) -> Iterator[tuple[str, Session]]:
        """Open one after the other all that verification compares with the eager model, each with its name."""
        ...


@dataclass(frozen=True)
class Requirement:
    """A library that a backend runs on.

    Attributes:
        name: of the library, for the user.
        module: that must be importable.
        device: that a trial counts against which dies.
    """

    name: str
    module: str
    device: Literal["cpu", "gpu"] = "cpu"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What is known of a backend before it is imported.

    Attributes:
        name: that users ask for it by.
        title: of what it runs on, in words.
        home: module that keeps to `Home`.
        trial: module with `probe(library, model) -> {device: "" or what is wrong}`, which the doctor runs in a process.
        requirements: of which one must be installed.
        runs: the graphs of a bundle, engines that were built into it, or the model itself, which is the reference.
        devices: that it can be asked for.
    """

    name: str
    title: str
    home: str
    trial: str
    requirements: tuple[Requirement, ...]
    runs: Literal["graphs", "engines", "model"]
    devices: tuple[Device, ...] = ("cpu",)

    def missing(self) -> str:
        """Say what is not installed, with the command that installs it; "" where nothing is missing."""
        modules = [requirement.module for requirement in self.requirements]
        if not modules or any(importlib.util.find_spec(module) for module in modules):
            return ""
        return f"{' or '.join(modules)} is not installed; {' or '.join(map(install_command, modules))}"

    def open_bundle(self, bundle: Bundle, options: OpenOptions) -> Session:
        """Import the backend and open a bundle; see `Home`."""
        return self._home(options).open_bundle(bundle, options)

    def rungs(self, graphs: Graphs, options: OpenOptions) -> Iterator[tuple[str, Session]]:
        """Import the backend and open all that verification compares; see `Home`."""
        return self._home(options).rungs(graphs, options)

    def _home(self, options: OpenOptions) -> Home:
        _check_options(self.name, options, runs_engines=self.runs == "engines", devices=self.devices)
        if missing := self.missing():
            raise BackendError(f"{self.name}: {missing}")
        return cast(Home, importlib.import_module(self.home))

    def cannot_run(self, bundle: Bundle, options: OpenOptions) -> str:
        """Say why a bundle does not run on this backend here; "" where it can be tried."""
        manifest = bundle.manifest
        if missing := self.missing():
            return missing
        if options.device not in self.devices:
            return f"has no device {options.device}"
        if self.runs == "model" and (manifest.config is None or manifest.quantization is not None):
            return "the bundle holds graphs only"
        if self.runs == "engines":
            from tfexport.tensorrt.artifact.store import engine_names

            return "" if engine_names(bundle.path) else "the bundle has no engines"
        return ""


# In the order in which "auto" tries them.
_BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            name="ort",
            title="ONNX Runtime",
            home="tfexport.runtime.ort.backend",
            trial="tfexport.runtime.ort.backend",
            requirements=(Requirement("onnxruntime", "onnxruntime"),),
            runs="graphs",
            devices=("cpu", "cuda"),
        ),
        Backend(
            name="eager",
            title="PyTorch",
            home="tfexport.runtime.eager",
            trial="tfexport.runtime.eager",
            requirements=(Requirement("torch", "torch"),),
            runs="model",
        ),
        Backend(
            name="trt",
            title="TensorRT",
            home="tfexport.tensorrt.session.backend",
            trial="tfexport.tensorrt.build.probe",
            requirements=(
                Requirement("tensorrt", "tensorrt", "gpu"),
                Requirement("tensorrt-rtx", "tensorrt_rtx", "gpu"),
            ),
            runs="engines",
        ),
    )
}


def backends() -> tuple[Backend, ...]:
    """Return all that are registered, in order."""
    return tuple(_BACKENDS.values())


def get(name: str) -> Backend:
    """Return a backend by its name.

    Raises:
        ConfigError: there is none of that name; lists those that there are.
    """
    if not is_one_of(name, _BACKENDS):
        raise ConfigError(f"backend is {shortened(name)}, expected one of {', '.join(map(repr, names()))}")
    return _BACKENDS[name]


def names() -> tuple[str, ...]:
    """Return all that a user may ask for: "auto" and the names of all backends."""
    return (AUTO, *_BACKENDS)


def comparable() -> tuple[Backend, ...]:
    """Return those that verification compares with the eager model; an export is verified on the first."""
    return tuple(backend for backend in _BACKENDS.values() if backend.runs != "model")


@contextmanager
def registered(backend: Backend) -> Iterator[Backend]:
    """Add a backend behind all others, or in the place of the one of its name, until the block ends."""
    before = dict(_BACKENDS)
    _BACKENDS[backend.name] = backend
    try:
        yield backend
    finally:
        _BACKENDS.clear()
        _BACKENDS.update(before)


def open_session(bundle: Bundle, name: str = AUTO, options: OpenOptions | None = None) -> Session:
    """Open a bundle on a backend.

    Args:
        bundle: opened and checked.
        name: of the backend; "auto" takes the first that is installed and can run the bundle.
        options: how; None for all as it comes.

    Raises:
        ConfigError: no backend has that name.
        BackendError: the backend is not installed, or cannot run this bundle on the device.
        BundleError: the bundle lacks the form, or what the backend needs on the device.
        EngineError: the bundle has no such engine, or it may not be used here.
    """
    options = options or OpenOptions()
    backend = choose(bundle, options) if name == AUTO else get(name)
    return backend.open_bundle(bundle, options)


def choose(bundle: Bundle, options: OpenOptions) -> Backend:
    """Return the first backend that is installed and can run a bundle.

    Raises:
        BackendError: none can; lists the reasons of all.
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


def _check_options(name: str, options: OpenOptions, *, runs_engines: bool, devices: tuple[Device, ...]) -> None:
    """Refuse options that belong to other backends, and say to which.

    Raises:
        BackendError: there is an engine or a device that the backend called `name` does not take.
    """
    others = _BACKENDS.values()
    if options.engine is not None and not runs_engines:
        theirs = [each for each in others if each.runs == "engines"]
        raise BackendError(f"{name}: engine {options.engine} is for {_spell(theirs)}, or leave it out")
    if options.device not in devices:
        theirs = [each for each in others if options.device in each.devices]
        raise BackendError(f"{name}: device {options.device} is for {_spell(theirs)}, or leave it out")


def _spell(theirs: list[Backend]) -> str:
    titles = " and ".join(each.title for each in theirs)
    return f"{titles}; use it with {' or '.join(f'--backend {each.name}' for each in theirs)}"
