"""The alignment graph in ONNX Runtime: loaded when it is first asked for, for it holds weights of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort

from tfexport.contract import ALIGNMENT, SOURCE_IDS, SOURCE_MASK, TARGET_IDS, ModelSpec
from tfexport.errors import BackendError
from tfexport.runtime.ort.device import OrtDevice, check_contract, run
from tfexport.runtime.session import Floats, Ids, Mask


class OrtAligner:
    """The graph of a session that says which source tokens a target token was read from.

    Attributes:
        is_there: whether the bundle has the graph.
    """

    def __init__(self, graphs: Mapping[str, Path], spec: ModelSpec, device: OrtDevice, threads: int | None) -> None:
        """Find the graph among a bundle's; `device` and `threads` are those of the session."""
        self._path, self._spec, self._device, self._threads = graphs.get(ALIGNMENT), spec, device, threads
        self.is_there = self._path is not None
        self._graph: ort.InferenceSession | None = None
        self._lock, self._is_closed = threading.Lock(), False

    def align(self, source_ids: Ids, source_mask: Mask, target_ids: Ids) -> Floats:
        """Run the graph; see `tfexport.runtime.session.Aligns.align`."""
        graph = self._loaded()
        io = graph.io_binding()
        for name, array in ((SOURCE_IDS, source_ids), (SOURCE_MASK, source_mask), (TARGET_IDS, target_ids)):
            io.bind_ortvalue_input(name, self._device.upload(array))
        self._device.bind_output(io, ALIGNMENT)
        run(graph, io)
        weights: Floats = io.get_outputs()[0].numpy()
        return weights

    def close(self) -> None:
        """Free the graph; it cannot be loaded afterwards."""
        with self._lock:
            self._graph, self._is_closed = None, True

    def _loaded(self) -> ort.InferenceSession:
        assert self._path is not None
        with self._lock:
            if self._is_closed:
                raise BackendError("ort: this session is closed; load the bundle again")
            if self._graph is None:
                graph = self._device.load(self._path, self._path.name, self._threads)
                check_contract(graph, ALIGNMENT, self._spec)
                self._graph = graph
            return self._graph
