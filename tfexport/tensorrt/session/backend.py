"""TensorRT as a backend: an engine of a bundle becomes a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tfexport.bundle.bundle import Bundle
from tfexport.errors import BackendError
from tfexport.runtime.registry import Graphs, OpenOptions
from tfexport.runtime.session import Session


def open_bundle(bundle: Bundle, options: OpenOptions) -> Session:
    """Open an engine of a bundle; see `tfexport.runtime.registry.Home`."""
    from tfexport.tensorrt.artifact.kernels import KernelStore
    from tfexport.tensorrt.artifact.load import load_engine
    from tfexport.tensorrt.cuda import Cuda, need_gpu
    from tfexport.tensorrt.session.session import TrtSession

    engine = load_engine(bundle, options.engine)
    built = engine.manifest.config
    if options.form not in (None, built.form):
        raise BackendError(f"trt: engine {engine.path.name} has the form {built.form}; leave the form out")
    spec = dataclasses.replace(bundle.manifest.spec, precision=built.precision or bundle.manifest.spec.precision)
    form = built.form if spec.has_decoder else None

    def reason() -> str:
        # The session keeps this function, and so the log and the runtime that its plans come from.
        return engine.log.reason()

    sums = {plan: entry.sha256 for plan, entry in engine.manifest.plans.items()}
    return TrtSession(
        engine.plans,
        spec,
        form,
        engine.manifest.limits,
        engine.library,
        Cuda(),
        weights=built.weights,
        reason=reason,
        # Kernels are code that nobody has signed: where keys are trusted, they are compiled again.
        kernels=None if bundle.trusted_keys else KernelStore(engine.path, sums, engine.library.version, need_gpu()),
    )


def rungs(graphs: Graphs, options: OpenOptions) -> Iterator[tuple[str, Session]]:
    """Open the engine of a bundle; see `tfexport.runtime.registry.Home`."""
    if graphs.bundle is None:
        raise BackendError("trt: engines are built from a bundle, and here are graphs alone")
    session = open_bundle(graphs.bundle, options)
    yield f"trt {session.accuracy}", session
