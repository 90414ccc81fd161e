"""ONNX Runtime as a backend: IO binding, the caches in the device's memory, every step bound to them.

CUDA graphs (the provider option `enable_cuda_graph`) are not used, though every operator of the static form has a
kernel that a graph can hold. A captured graph belongs to the thread that captured it, while threads share a session;
the capture is global, so no other thread may use CUDA meanwhile; and it is bound to shapes and addresses, while here
the rows, the source and the capacity change as texts end, and graphs are never freed before onnxruntime 1.27
(onnxruntime/core/providers/cuda/cuda_graph.cc). The trt session has a graph for each bucket of shapes instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort

from tfexport.contract import (
    DECODER,
    ENCODER,
    FLOAT,
    HIDDEN_STATES,
    REORDER,
    Accuracy,
    Device,
    Form,
    ModelSpec,
    WeightType,
)
from tfexport.errors import BackendError, BundleError
from tfexport.runtime.checked import CheckedAligner
from tfexport.runtime.ort.alignment import OrtAligner
from tfexport.runtime.ort.concat import ConcatBatch
from tfexport.runtime.ort.device import STEP_SPIN_US, OrtDevice, check_contract
from tfexport.runtime.ort.gather import RowGather
from tfexport.runtime.ort.graphs import OrtGraphs
from tfexport.runtime.ort.static import StaticBatch
from tfexport.runtime.session import Floats, Ids, Limits, Mask
from tfexport.runtime.threads import Threads, threads_of


class OrtSession(CheckedAligner):
    """An exported model in ONNX Runtime.

    Attributes:
        spec: sizes, limits and token ids.
        backend: "ort".
        form: of the decoder that runs; None for an encoder alone.
        accuracy: what bounds how exactly it computes.
        limits: those of the model.
        has_alignment: whether the bundle has that graph.
    """

    backend = "ort"

    def __init__(
        self,
        graphs: Mapping[str, Path],
        spec: ModelSpec,
        form: Form | None,
        threads: Threads | int | None = None,
        device: Device = "cpu",
        *,
        weights: WeightType | None = None,
        host_caches: bool | None = None,
    ) -> None:
        """Load the graphs.

        Args:
            graphs: path of each graph by its name in the contract.
            spec: of the model.
            form: of the decoder to use; None for an encoder alone.
            threads: for one call on the CPU; None for as many as ONNX Runtime finds cores, a number for both graphs.
            device: where the graphs run and the caches lie.
            weights: their type where it is narrower than that of the graphs.
            host_caches: whether numpy keeps and moves the caches; None means on
                the CPU. False there runs what a GPU runs.

        Raises:
            BackendError: ONNX Runtime cannot use the device, run the precision or load a graph.
            BundleError: the graph is missing that moves caches on the device.
        """
        if spec.precision == "bf16" and device == "cpu":
            raise BackendError(
                "ort: ONNX Runtime has no bfloat16 kernels on the CPU; use --device cuda or --backend eager, "
                "or export with fp32 or fp16"
            )
        self.spec, self.form, self.limits = spec, form, Limits.of(spec)
        self.accuracy: Accuracy = weights or spec.precision
        opened = OrtDevice(device, weights)

        encoder_threads, decoder_threads = threads_of(threads)
        self._aligner = OrtAligner(graphs, spec, opened, encoder_threads)
        self.has_alignment = self._aligner.is_there
        on_host = device == "cpu" if host_caches is None else host_caches
        self._graphs = OrtGraphs(
            spec=spec,
            device=opened,
            # The larger one first: while a weight is packed, it lies in memory twice.
            decoder=None if form is None else _load_decoder(opened, graphs[DECODER[form]], decoder_threads),
            encoder=opened.load(graphs[ENCODER], graphs[ENCODER].name, encoder_threads),
            gather=None if form is None or on_host else _load_gather(graphs, spec, opened),
        )
        check_contract(self._graphs.encoder, ENCODER, spec)
        if form is not None:
            check_contract(self._graphs.decoder, DECODER[form], spec)

    @property
    def _is_open(self) -> bool:
        return self._graphs.encoder is not None

    def _batch(self, width: int) -> StaticBatch | ConcatBatch:
        return (ConcatBatch if self.form == "concat" else StaticBatch)(self._graphs, width)

    def _hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        io = self._graphs.bind_encoder(source_ids, source_mask)
        self._graphs.device.bind_output(io, HIDDEN_STATES)
        self._graphs.run_encoder(io, *source_ids.shape)
        hidden: Floats = io.get_outputs()[0].numpy()
        return hidden

    def _align(self, source_ids: Ids, source_mask: Mask, target_ids: Ids) -> Floats:
        return self._aligner.align(source_ids, source_mask, target_ids)

    def close(self) -> None:
        """Free the graphs; the session cannot be used afterwards."""
        self._aligner.close()
        self._graphs.encoder = self._graphs.decoder = None


def _load_decoder(device: OrtDevice, graph: Path, threads: int | None) -> ort.InferenceSession:
    return device.load(graph, graph.name, threads, spin_us=STEP_SPIN_US)


def _load_gather(graphs: Mapping[str, Path], spec: ModelSpec, device: OrtDevice) -> RowGather:
    if REORDER not in graphs:
        raise BundleError(
            f"ort: the bundle has no graph {REORDER}, which moves caches on a GPU; "
            "export it anew: tfexport onnx SOURCE --output BUNDLE --force"
        )
    return RowGather(device, graphs[REORDER], FLOAT[spec.precision])
