"""ONNX Runtime as a backend: which form of a bundle is opened where, and whether the library works at all."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from tfexport.bundle.bundle import Bundle
from tfexport.contract import DECODER, Device, Form, ModelSpec, WeightType
from tfexport.errors import BackendError, BundleError
from tfexport.runtime.ort.device import MINIMUM, PlacementError, prepare_cuda
from tfexport.runtime.registry import Graphs, OpenOptions
from tfexport.runtime.session import Session
from tfexport.runtime.threads import Threads

_log = logging.getLogger(__name__)


def open_bundle(bundle: Bundle, options: OpenOptions) -> Session:
    """Open the graphs of a bundle; see `tfexport.runtime.registry.Home`."""
    graphs = Graphs.of(bundle)
    if graphs.weights is not None and options.device != "cpu":
        raise BackendError(
            f"ort: {bundle.path} holds {graphs.weights} weights for the CPU; for device {options.device} export it "
            "again with --precision fp16"
        )

    def open_form(form: Form | None) -> Session:
        return open_graphs(graphs.paths, graphs.spec, form, options.threads, options.device, weights=graphs.weights)

    form = choose_form(bundle, options.form, options.device)
    try:
        return open_form(form)
    except PlacementError as problem:
        if options.form is not None or form != "static" or DECODER["concat"] not in graphs.paths:
            raise
        session = open_form("concat")
        _log.warning(
            "%s; the concat form runs instead; update onnxruntime-gpu to %s or newer for the static form",
            str(problem).partition(";")[0],
            MINIMUM["cuda"],
        )
        return session


def choose_form(bundle: Bundle, form: Form | None, device: Device) -> Form | None:
    """Return the form to open: the one asked for, else the fastest that bundle and device have.

    Returns:
        None for an encoder alone.

    Raises:
        BundleError: the bundle has no such form.
    """
    graphs = bundle.manifest.graphs
    if not bundle.manifest.spec.has_decoder:
        return None
    if form is None:
        preferred: tuple[Form, ...] = ("contrib", "static", "concat") if device == "cpu" else ("static", "concat")
        form = next((each for each in preferred if DECODER[each] in graphs), None)
        if form is None:
            raise BundleError(f"{bundle.path}: {_contrib_alone(device)}")
    if DECODER[form] not in graphs:
        raise BundleError(f"{bundle.path}: has no {form} form; export it with --forms concat,static,contrib")
    return form


def rungs(graphs: Graphs, options: OpenOptions) -> Iterator[tuple[str, Session]]:
    """Open every form that the device takes; see `tfexport.runtime.registry.Home`."""
    device = options.device
    forms: list[Form | None] = [form for form, name in DECODER.items() if name in graphs.paths]
    if device != "cpu" and "contrib" in forms:
        forms.remove("contrib")
        if not forms:
            raise BundleError(f"verify: {_contrib_alone(device)}")
    where = "" if device == "cpu" else f" {device}"
    for form in forms or [None]:
        try:
            session = open_graphs(graphs.paths, graphs.spec, form, options.threads, device, weights=graphs.weights)
        except PlacementError as problem:
            if form != "static" or "concat" not in forms:
                raise
            _log.warning("%s; the static form is not verified", str(problem).partition(";")[0])
            continue
        yield f"ort {form or 'encoder'}{where}", session


def _contrib_alone(device: Device) -> str:
    return (
        f"has the contrib form alone, which runs on the CPU; for device {device} export it with --forms concat,static"
    )


def open_graphs(
    graphs: Mapping[str, Path],
    spec: ModelSpec,
    form: Form | None,
    threads: Threads | int | None = None,
    device: Device = "cpu",
    *,
    weights: WeightType | None = None,
) -> Session:
    """Open graphs; `form` None means an encoder alone, `weights` None those of the graphs' type.

    `threads` None is as many as ONNX Runtime finds cores, a number is for encoder and decoder.

    Raises:
        BackendError: ONNX Runtime cannot use the device, load or run the graphs.
    """
    if form == "contrib":
        if device != "cpu":
            raise BackendError(f"ort: the contrib form runs on the CPU; for device {device} leave the form out")
        from tfexport.runtime.ort.contrib import ContribSession

        return ContribSession(graphs, spec, threads, weights=weights)
    from tfexport.runtime.ort.session import OrtSession

    return OrtSession(graphs, spec, form, threads, device, weights=weights)


def probe(library: str, model: bytes) -> dict[str, str]:
    """Run a graph on each device that the build has.

    Args:
        library: its name.
        model: y = x + x on float32 [2].

    Returns:
        "" under each device where that is right, else what is wrong.
    """
    if not hasattr(ort, "InferenceSession"):
        sys.exit("hollow: the module is there, its library is not")
    ort.set_default_logger_severity(4)
    providers = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
    offered = ort.get_available_providers()
    return {device: _try(provider, model) for device, provider in providers.items() if provider in offered}


def _try(provider: str, model: bytes) -> str:
    try:
        if provider != "CPUExecutionProvider":
            prepare_cuda()
        session = ort.InferenceSession(model, providers=[provider])
        (result,) = session.run(None, {"x": np.array([1, 2], np.float32)})
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is what is asked for
        return str(error)
    got = session.get_providers()
    right = provider in got and result.tolist() == [2, 4]
    return "" if right else f"asked for {provider}, got {got} and {result.tolist()}"
