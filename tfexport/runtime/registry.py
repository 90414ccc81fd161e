"""Describe every backend without importing it, and open bundles on them."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast, get_args

from tfexport._arguments import is_one_of, is_whole, word_problems
from tfexport._io.extras import install_command
from tfexport._io.names import SHORTLIST_TABLE
from tfexport.contract import DEVICE, SHORTLIST, AlignmentHeads, Device, DeviceKind, ModelSpec, Variant, device_parts
from tfexport.errors import BackendError, ConfigError, raise_all, shortened
from tfexport.precision import Quantized
from tfexport.runtime.cpu import MAX_THREADS

if TYPE_CHECKING:
    from tfexport.bundle.bundle import Bundle
    from tfexport.runtime.session import Session
    from tfexport.runtime.shortlist import Shortlist

AUTO: Final = "auto"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to open a bundle; `tfexport.load` documents the options."""

    backend: str = AUTO
    variant: Variant | None = None
    threads: int | Literal["auto"] | None = AUTO
    device: Device = "cpu"
    engine: str | None = None
    is_shared: bool = False  # whether the process has other threads of Python
    profile: Path | None = None  # where sessions that are closed write a folder of events for each graph or engine

    def __post_init__(self) -> None:
        problems = word_problems(
            backend=(self.backend, names()),
            variant=(self.variant, (None, *get_args(Variant))),
        )
        # Callers may pass anything.
        device, threads, engine = (cast(object, each) for each in (self.device, self.threads, self.engine))
        if not (isinstance(device, str) and re.fullmatch(DEVICE.pattern, device)):
            problems.append(f"device is {shortened(device)}, expected {DEVICE.expected}")
        if not (is_one_of(threads, (None, AUTO)) or (is_whole(threads) and 1 <= threads <= MAX_THREADS)):
            problems.append(f"threads is {shortened(threads)}, expected 1 to {MAX_THREADS}, or {AUTO!r}")
        if not (engine is None or (isinstance(engine, str) and engine)):
            problems.append(f"engine is {shortened(engine)}, expected the name of an engine, or None")
        raise_all(ConfigError, "load", problems)


@dataclass(frozen=True)
class Graphs:
    """Graphs of a bundle, or of an export before its bundle exists."""

    paths: Mapping[str, Path]  # by name in the contract
    spec: ModelSpec
    weights: Quantized | None = None  # if narrower than the precision of `spec`
    bundle: Bundle | None = None  # None during an export
    alignment: AlignmentHeads | None = None  # of the alignment graph, if there is one

    def shortlist(self) -> Shortlist | None:
        """Read the shortlists that the graphs are for; None if texts may have all tokens."""
        from tfexport.runtime.shortlist import Shortlist  # needs numpy

        path = self.paths.get(SHORTLIST)
        return None if path is None else Shortlist.read(path.parent / SHORTLIST_TABLE, self.spec)

    @classmethod
    def of(cls, bundle: Bundle) -> Graphs:
        """Return the graphs of a bundle."""
        manifest = bundle.manifest
        paths = {name: bundle.file(graph.file) for name, graph in manifest.graphs.items()}
        weights = manifest.quantization.precision if manifest.quantization else None
        return cls(paths, manifest.spec, weights, bundle, manifest.alignment)


class BackendModule(Protocol):
    """The module of a backend, imported when the backend is used."""

    def open_bundle(self, bundle: Bundle, options: LoadOptions) -> Session:
        """Open a bundle that is already checked."""

    def parity_sessions(self, graphs: Graphs, options: LoadOptions) -> Iterator[tuple[str, Session]]:
        """Open every session to compare with the eager model, by stage."""


@dataclass(frozen=True)
class Requirement:
    """A library that a backend requires."""

    name: str
    module: str
    device: Literal["cpu", "gpu"] = "cpu"  # reported as broken if a probe crashes


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Facts about a backend that are known before it is imported."""

    name: str
    title: str  # name of the library in messages
    module: str  # implements `BackendModule`
    probe_module: str  # has `probe(library, model in hex) -> {device: "" or the problem}` for the doctor
    requirements: tuple[Requirement, ...]  # one of them must be installed
    # Graphs of a bundle, its weights, engines built into it, or the reference itself.
    runs: Literal["graphs", "weights", "engines", "model"]
    devices: tuple[DeviceKind, ...] = ("cpu",)

    def missing(self) -> str:
        """Return what is not installed and how to install it; "" if nothing is missing."""
        modules = [requirement.module for requirement in self.requirements]
        if not modules or any(importlib.util.find_spec(module) for module in modules):
            return ""
        return f"{' or '.join(modules)} is not installed; {' or '.join(map(install_command, modules))}"

    def load(self, options: LoadOptions) -> BackendModule:
        """Check that the backend has the options and is installed, and import it."""
        _check_options(options, self)
        if missing := self.missing():
            raise BackendError(f"{self.name}: {missing}")
        return cast(BackendModule, importlib.import_module(self.module))

    def is_fastest(self, bundle: Bundle, options: LoadOptions) -> bool:
        """Return whether "auto" takes this backend before the others of the list."""
        if self.runs != "weights" or self.missing():
            return False
        return bool(importlib.import_module(self.module).is_fastest(bundle, options))

    def cannot_run(self, bundle: Bundle, options: LoadOptions) -> str:
        """Return why a bundle does not run on this backend here; "" if it might."""
        manifest = bundle.manifest
        if missing := self.missing():
            return missing
        if device_parts(options.device)[0] not in self.devices:
            return f"has no device {options.device}"
        if self.runs == "model" and (manifest.config is None or manifest.quantization is not None):
            return "the bundle holds graphs only"
        if self.runs == "weights":
            return "; ".join(importlib.import_module(self.module).problems(bundle))
        if self.runs == "engines":
            from tfexport.tensorrt.store import engine_names

            return "" if engine_names(bundle.path) else "the bundle has no engines"
        return ""


# In the order in which "auto" tries them.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            name="ort",
            title="ONNX Runtime",
            module="tfexport.runtime.ort.backend",
            probe_module="tfexport.runtime.ort.backend",
            requirements=(Requirement("onnxruntime", "onnxruntime"),),
            runs="graphs",
            devices=get_args(DeviceKind),
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
            devices=get_args(DeviceKind),  # for "cpu", the default, the first GPU
        ),
        Backend(
            name="native",
            title="tfexport-native",
            module="tfexport.runtime.native.backend",
            probe_module="tfexport.runtime.native.backend",
            requirements=(Requirement("tfexport-native", "tfexport_native"),),
            runs="weights",
        ),
    )
}


def backends() -> tuple[Backend, ...]:
    """Return all backends, in order."""
    return tuple(BACKENDS.values())


def get(name: str) -> Backend:
    """Return a backend by its name."""
    if not is_one_of(name, BACKENDS):
        raise ConfigError(f"backend is {shortened(name)}, expected one of {', '.join(map(repr, names()))}")
    return BACKENDS[name]


def names() -> tuple[str, ...]:
    """Return the names that a user may choose: "auto" and those of all backends."""
    return (AUTO, *BACKENDS)


def comparable() -> tuple[Backend, ...]:
    """Return the backends that verification compares with the eager model."""
    return tuple(backend for backend in backends() if backend.runs != "model")


def open_session(bundle: Bundle, options: LoadOptions) -> Session:
    """Open a bundle, already checked, on the backend of the options."""
    backend = choose(bundle, options) if options.backend == AUTO else get(options.backend)
    return backend.load(options).open_bundle(bundle, options)


def choose(bundle: Bundle, options: LoadOptions) -> Backend:
    """Return the fastest backend that is installed and can run a bundle."""
    _check_options(options)
    problems = []
    for backend in sorted(backends(), key=lambda each: not each.is_fastest(bundle, options)):
        problem = backend.cannot_run(bundle, options)
        if not problem:
            return backend
        problems.append(f"{backend.name}: {problem}")
    raise BackendError(f"{bundle.path}: no backend can run it here: {'; '.join(problems)}")


def _check_options(options: LoadOptions, backend: Backend | None = None) -> None:
    """Raise `BackendError` for an engine or device that only other backends have."""
    if options.engine is not None and (backend is None or backend.runs != "engines"):
        option, others = f"engine {options.engine}", [each for each in backends() if each.runs == "engines"]
    elif backend is not None and (kind := device_parts(options.device)[0]) not in backend.devices:
        option, others = f"device {options.device}", [each for each in backends() if kind in each.devices]
    else:
        return
    titles = " and ".join(each.title for each in others)
    choice = " or ".join(f"--backend {each.name}" for each in others)
    name = AUTO if backend is None else backend.name
    raise BackendError(f"{name}: {option} is for {titles}; use it with {choice}, or leave it out")
