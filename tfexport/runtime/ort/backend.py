"""Open bundles in ONNX Runtime and check that the library works.

CUDA graphs (the provider option `enable_cuda_graph`) are not used: a captured graph belongs to one thread, but threads
share a session, and it is bound to shapes and addresses, which change as texts end.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort

from tfexport import contract
from tfexport._io.device_memory import check_fits
from tfexport.bundle.bundle import Bundle
from tfexport.contract import Device, Variant, device_parts
from tfexport.errors import BackendError, BundleError
from tfexport.precision import FLOAT, Accuracy
from tfexport.runtime.checked import CheckedAligner, CheckedBatch, check_sources
from tfexport.runtime.cpu import Threads, available_cores, choose_threads
from tfexport.runtime.ort._concat import ConcatBatch
from tfexport.runtime.ort._contrib import ContribBatch, encode_ahead
from tfexport.runtime.ort._device import STEP_SPIN_US, OrtDevice, OrtGraphs, RowGather, check_contract, run
from tfexport.runtime.ort._providers import PROVIDERS, PlacementError, Provider
from tfexport.runtime.ort._shortlist import ShortlistBatch
from tfexport.runtime.ort._static import StaticBatch
from tfexport.runtime.registry import Graphs, LoadOptions
from tfexport.runtime.session import Floats, Ids, Limits, Session
from tfexport.runtime.sources import Sources

_log = logging.getLogger(__name__)

# The encoder graph and the batch class of each decoder variant.
VARIANTS: dict[Variant, tuple[str, Callable[[OrtGraphs, int], CheckedBatch]]] = {
    "concat": (contract.ENCODER, ConcatBatch),
    "static": (contract.ENCODER, StaticBatch),
    "contrib": (contract.ENCODER_CONTRIB, ContribBatch),
}


class OrtSession(CheckedAligner):
    """An exported model in ONNX Runtime."""

    backend = "ort"

    def __init__(
        self,
        graphs: Graphs,
        variant: Variant | None,
        threads: Threads | int | None = None,
        device: Device = "cpu",
        *,
        host_caches: bool | None = None,
        profile: Path | None = None,
    ) -> None:
        """Load the graphs; `host_caches` False tests the code for a GPU on the CPU.

        If `profile` is given, each graph writes the events of its runs there when it is closed.
        """
        self.spec, self.variant, spec, paths = graphs.spec, variant, graphs.spec, graphs.paths
        self.threads = Threads(threads, threads) if isinstance(threads, int) else threads
        provider = PROVIDERS[device_parts(device)[0]]
        if self.threads and not provider.is_host:  # a second copy would take the device's memory
            self.threads = Threads(self.threads.encoder, self.threads.decoder)
        if variant is not None and variant not in provider.variants:
            raise BackendError(f"ort: decoder variant {variant} runs on the CPU only; for device {device} leave it out")
        if spec.precision not in provider.precisions:
            raise BackendError(
                f"ort: ONNX Runtime has no {FLOAT[spec.precision]} kernels on device {device}; use --device cuda or "
                f"--backend eager, or export with {' or '.join(provider.precisions)}"
            )
        self.limits, self.has_alignment = Limits.of(spec), contract.ALIGNMENT in paths
        self.accuracy: Accuracy = graphs.weights or spec.precision
        self._paths, self._device = paths, OrtDevice(device, graphs.weights, profile)
        if memory := provider.memory(self._device.place[1]):
            files = {path.parent / contract.WEIGHTS for path in paths.values()}
            size = sum(path.stat().st_size for path in files if path.exists())
            check_fits("ort", device, size, memory, "use device cpu")
        decoder = gather = None
        if variant is not None:
            # The decoder, the larger graph, first: weights are in memory twice while they are packed.
            decoder = self._load(contract.DECODER[variant], alone=True)
            if not (provider.is_host if host_caches is None else host_caches):
                if contract.REORDER not in paths:
                    raise BundleError(
                        f"ort: the bundle has no graph {contract.REORDER}, which moves caches on a GPU; "
                        "export it again: tfexport onnx SOURCE --output BUNDLE --force"
                    )
                gather = RowGather(self._device, paths[contract.REORDER], FLOAT[spec.precision])
        names = {"encoder": contract.ENCODER if variant is None else VARIANTS[variant][0]}
        if variant is not None:
            names["decoder"] = contract.DECODER[variant]
        encoder = self._load(names["encoder"], alone=True)
        self.shortlist = graphs.shortlist()
        if self.shortlist:
            self.limits = self.shortlist.limits(self.limits)
        lookup = self._load(contract.SHORTLIST, alone=True) if self.shortlist else None
        self._graphs = OrtGraphs(
            spec,
            self._device,
            encoder,
            decoder,
            gather,
            self.threads,
            lambda side: self._load(names[side]),
            self.shortlist,
            lookup,
        )
        # The alignment graph is loaded at its first use, because it has its own weights.
        self._aligner: ort.InferenceSession | None = None
        self._lock = threading.Lock()

    @property
    def _is_open(self) -> bool:
        return self._graphs.encoder is not None

    def _batch(self, width: int) -> CheckedBatch:
        assert self.variant is not None
        # Rows with states need not have one length in any variant.
        joins = self.variant == "concat" and not self.spec.cache.grows
        if self.shortlist:
            return ShortlistBatch(self._graphs, width)
        return VARIANTS["static" if joins else self.variant][1](self._graphs, width)

    def _encode(self, sources: Sources, output: str) -> Floats:
        io = self._graphs.bind_encoder(sources)
        io.bind_output(output, *self._device.place)
        self._graphs.run_encoder(io, sources)
        found: Floats = io.get_outputs()[0].numpy()
        return found

    @property
    def can_encode_ahead(self) -> bool:
        """Whether encoder and decoder have cores of their own."""
        if self.variant != "contrib" or self.threads is None:
            return False
        return self.threads.encoder + self.threads.decoder <= available_cores()

    def encode_ahead(self, sources: Sources) -> Sources:
        """Encode sources for a batch."""
        self._check_open()
        check_sources(self.spec, sources)
        return encode_ahead(self._graphs, sources)

    def _align(self, sources: Sources, target_ids: Ids) -> Floats:
        with self._lock:
            self._check_open()
            if self._aligner is None:
                self._aligner = self._load(contract.ALIGNMENT)
            graph = self._aligner
        io = self._device.bind_inputs(graph, {**sources.inputs, contract.TARGET_IDS: target_ids})
        io.bind_output(contract.ALIGNMENT, *self._device.place)
        run(graph, io)
        weights: Floats = io.get_outputs()[0].numpy()
        return weights

    def close(self) -> None:
        """Free the graphs, including those of open batches."""
        with self._lock:
            self._aligner = None
            self._graphs.close()

    def _load(self, name: str, *, alone: bool = False) -> ort.InferenceSession:
        """Load a graph; with `alone` for one thread, if small runs use one."""
        is_decoder = name in contract.DECODER.values()
        threads = None
        if given := self.threads:
            several, most_alone = (
                (given.decoder, given.decoder_alone) if is_decoder else (given.encoder, given.encoder_alone)
            )
            threads = 1 if alone and most_alone else several
        spin_us = STEP_SPIN_US if is_decoder else 0
        graph = self._device.load(self._paths[name], name, threads, spin_us=spin_us)
        check_contract(graph, name, self.spec)
        return graph


def open_bundle(bundle: Bundle, options: LoadOptions) -> OrtSession:
    """Open the graphs of a bundle."""
    graphs = Graphs.of(bundle)
    if graphs.weights is not None and options.device != "cpu":
        raise BackendError(
            f"ort: {bundle.path} has {graphs.weights} weights for the CPU; for device {options.device} export it again "
            "with --precision fp16"
        )
    threads = choose_threads(options.threads, bundle, is_shared=options.is_shared)
    variant = _choose_variant(bundle, options)
    try:
        return OrtSession(graphs, variant, threads, options.device, profile=options.profile)
    except PlacementError as problem:
        # CUDA 12 ends with onnxruntime-gpu 1.26, which has no kernels for the static variant.
        if options.variant is not None or variant == "concat" or contract.DECODER["concat"] not in graphs.paths:
            raise
        session = OrtSession(graphs, "concat", threads, options.device, profile=options.profile)
        _log.warning(
            "%s; runs the concat decoder variant instead; update onnxruntime-gpu to %s or newer for the static one",
            str(problem).partition(";")[0],
            PROVIDERS[device_parts(options.device)[0]].minimum,
        )
        return session


def _choose_variant(bundle: Bundle, options: LoadOptions) -> Variant | None:
    """Return the requested or the fastest decoder variant; None without a decoder."""
    if not bundle.manifest.spec.has_decoder:
        return None
    graphs, variant = bundle.manifest.graphs, options.variant
    if variant is None:
        return _variants(graphs, options.device, bundle.path)[0]
    if contract.DECODER[variant] not in graphs:
        raise BundleError(
            f"{bundle.path}: has no decoder variant {variant}; export it with --variants concat,static,contrib"
            + " and without --shortlist" * bundle.manifest.has_shortlist
        )
    return variant


def parity_sessions(graphs: Graphs, options: LoadOptions) -> Iterator[tuple[str, Session]]:
    """Open every decoder variant that the device runs, by name."""
    variants: list[Variant | None] = [None]
    if graphs.spec.has_decoder:
        runnable = _variants(graphs.paths, options.device, "verify")
        variants = [variant for variant in contract.DECODER if variant in runnable]
    where = "" if options.device == "cpu" else f" {options.device}"
    for variant in variants:
        try:
            session = OrtSession(graphs, variant, None, options.device)
        except PlacementError as problem:
            if variant == "concat" or "concat" not in variants:
                raise
            _log.warning("%s; does not verify the %s decoder variant", str(problem).partition(";")[0], variant)
            continue
        yield f"ort {variant or 'encoder'}{where}", session


def _variants(graphs: Container[str], device: Device, subject: object) -> list[Variant]:
    variants = [
        variant for variant in PROVIDERS[device_parts(device)[0]].variants if contract.DECODER[variant] in graphs
    ]
    if not variants:
        raise BundleError(
            f"{subject}: has only the decoder variant contrib, which runs on the CPU; for device {device} export it "
            "with --variants concat,static"
        )
    return variants


def probe(library: str, model: str) -> dict[str, str]:
    """Run y = x + x on each device; return the problem by device, or ""."""
    if not hasattr(ort, "InferenceSession"):
        sys.exit("onnxruntime can be imported, but its native library is missing; install it again")
    ort.set_default_logger_severity(4)
    offered = ort.get_available_providers()
    return {device: _probe(provider, model) for device, provider in PROVIDERS.items() if provider.ort_name in offered}


def unused_providers() -> list[str]:
    """Return the execution providers that are offered and not used."""
    used = {provider.ort_name for provider in PROVIDERS.values()} | {"AzureExecutionProvider"}  # which computes nothing
    return [name.removesuffix("ExecutionProvider") for name in ort.get_available_providers() if name not in used]


def _probe(provider: Provider, model: str) -> str:
    try:
        provider.prepare(0)
        session = ort.InferenceSession(bytes.fromhex(model), providers=[provider.ort_name])
        (result,) = session.run(None, {"x": np.array([1, 2], np.float32)})
    except Exception as error:  # noqa: BLE001 - the doctor reports any failure
        return str(error)
    got = session.get_providers()
    is_right = provider.ort_name in got and result.tolist() == [2, 4]
    return "" if is_right else f"asked for {provider.ort_name}, got {got} and {result.tolist()}, expected [2, 4]"
