"""From a bundle to a session: choose the backend, import it only then."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tfexport.bundle.bundle import Bundle
from tfexport.errors import BackendError, BundleError
from tfexport.install import install_command
from tfexport.runtime.session import Session
from tfexport.spec import DECODER, WEIGHTS, Backend, Device, Form, ModelSpec, WeightType

if TYPE_CHECKING:
    from tfexport.models.transformer import Transformer


def open_session(
    bundle: Bundle,
    backend: Backend,
    *,
    form: Form | None,
    threads: int | None,
    device: Device = "cpu",
    engine: str | None = None,
) -> Session:
    """Open a bundle on a backend.

    Args:
        bundle: opened and checked.
        backend: "auto" takes ONNX Runtime, and PyTorch where that is not installed.
        form: of the decoder; None takes contrib on the CPU, else static, or concat where it is the only one.
        threads: for one call on the CPU; None means one for each core.
        device: where ONNX Runtime runs the graphs and keeps the caches.
        engine: name of the TensorRT engine; None for the only one that may be used here.

    Raises:
        BackendError: the backend is not installed, or cannot run this bundle on the device.
        BundleError: the bundle lacks the form, or what the backend needs on the device.
        EngineError: the bundle has no such engine, or it may not be used here.
    """
    if backend == "trt":
        if device != "cpu":
            raise BackendError(f"trt: device {device} is for ONNX Runtime; leave it out, engines run on the GPU anyway")
        return _open_engine(bundle, engine, form)
    if engine is not None:
        raise BackendError(f"{backend}: engine {engine} is for TensorRT; use it with --backend trt, or leave it out")
    if backend == "auto":
        backend = "ort" if _installed("onnxruntime") or not _installed("torch") else "eager"
    if backend == "eager":
        if device != "cpu":
            raise BackendError(f"eager: runs on the CPU; for device {device} use --backend ort")
        return _open_eager(bundle, form)
    manifest = bundle.manifest
    weights = manifest.quantization.weights if manifest.quantization else None
    if weights is not None and device != "cpu":
        raise BackendError(
            f"ort: {bundle.path} holds {weights} weights for the CPU; for device {device} export it again with "
            "--precision fp16"
        )
    graphs = {name: bundle.file(graph.file) for name, graph in manifest.graphs.items()}
    return open_ort(graphs, manifest.spec, _choose_form(bundle, form, device), threads, device, weights=weights)


def open_ort(
    graphs: Mapping[str, Path],
    spec: ModelSpec,
    form: Form | None,
    threads: int | None = None,
    device: Device = "cpu",
    *,
    weights: WeightType | None = None,
) -> Session:
    """Open graphs in ONNX Runtime; `form` None means an encoder alone, `weights` None those of the graphs' type.

    Raises:
        BackendError: ONNX Runtime is not installed, or cannot use the device, load or run the graphs.
    """
    _need("ort", "onnxruntime")
    if form == "contrib":
        if device != "cpu":
            raise BackendError(f"ort: the contrib form runs on the CPU; for device {device} leave the form out")
        from tfexport.runtime.ort.contrib import ContribSession

        return ContribSession(graphs, spec, threads, weights=weights)
    from tfexport.runtime.ort.session import OrtSession

    return OrtSession(graphs, spec, form, threads, device, weights=weights)


def load_eager_model(bundle: Bundle) -> Transformer:
    """Rebuild the eager model from a bundle's weight file, in float32.

    Raises:
        BackendError: PyTorch is not installed.
        BundleError: the bundle holds graphs only, or narrower weights.
    """
    _need("eager", "torch")
    if bundle.manifest.quantization is not None:
        raise BundleError(
            f"{bundle.path}: holds {bundle.manifest.accuracy} weights for ONNX Runtime and no eager model; "
            "use --backend ort, or export it again with --precision fp32"
        )
    if bundle.manifest.config is None:
        raise BundleError(f"{bundle.path}: holds graphs only, no eager model; use --backend ort")
    from tfexport.models.directory import load_weights

    return load_weights(bundle.file(WEIGHTS), bundle.manifest.config)


def _open_eager(bundle: Bundle, form: Form | None) -> Session:
    if form is not None:
        raise BackendError(f"eager: form {form} belongs to graphs; leave it out")
    model = load_eager_model(bundle)
    from tfexport.runtime.eager import EagerSession

    return EagerSession(model, bundle.manifest.spec)


def _open_engine(bundle: Bundle, name: str | None, form: Form | None) -> Session:
    from tfexport.runtime.trt.session import TrtSession
    from tfexport.trt.artifact.load import load_engine
    from tfexport.trt.cuda import Cuda

    engine = load_engine(bundle, name)
    built = engine.manifest.config
    if form not in (None, built.form):
        raise BackendError(f"trt: engine {engine.path.name} has the form {built.form}; leave the form out")
    spec = dataclasses.replace(bundle.manifest.spec, precision=built.precision or bundle.manifest.spec.precision)
    form = built.form if spec.has_decoder else None

    def reason() -> str:
        # The session keeps this function, and so the log and the runtime that its plans come from.
        return engine.log.reason()

    limits, weights = engine.manifest.limits, built.weights
    return TrtSession(engine.plans, spec, form, limits, engine.library, Cuda(), weights=weights, reason=reason)


def _choose_form(bundle: Bundle, form: Form | None, device: Device) -> Form | None:
    graphs = bundle.manifest.graphs
    if not bundle.manifest.spec.has_decoder:
        return None
    if form is None:
        preferred: tuple[Form, ...] = ("contrib", "static", "concat") if device == "cpu" else ("static", "concat")
        form = next((each for each in preferred if DECODER[each] in graphs), None)
        if form is None:
            raise BundleError(
                f"{bundle.path}: has the contrib form alone, which runs on the CPU; "
                f"for device {device} export it with --forms concat,static"
            )
    if DECODER[form] not in graphs:
        raise BundleError(f"{bundle.path}: has no {form} form; export it with --forms concat,static,contrib")
    return form


def _need(backend: str, module: str) -> None:
    if not _installed(module):
        raise BackendError(f"{backend}: {module} is not installed; {install_command(module)}")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
