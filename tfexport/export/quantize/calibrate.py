"""Decode texts and find the range of every activation that a linear map reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import (
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    DECODER,
    ENCODER,
    NUM_CANDIDATES,
    SOURCE_MASK,
    TARGET_IDS,
    Dim,
    GraphEntry,
    ModelSpec,
)
from tfexport.errors import GraphError
from tfexport.export.graph_file import Span, load_graph, span
from tfexport.export.mixed import show_tensors
from tfexport.export.quantize._linear import linear_maps
from tfexport.precision import CalibrationMethod
from tfexport.runtime.ort.calibration import Ranges
from tfexport.runtime.ort.host_graph import HostGraph
from tfexport.runtime.sources import Source, pad_sources

Arrays = Mapping[str, NDArray[Any]]


def calibrate(
    folder: Path,
    graphs: Mapping[str, GraphEntry],
    spec: ModelSpec,
    sources: Sequence[Source],
    prefix: Sequence[int],
    method: CalibrationMethod,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> dict[Span, float]:
    """Decode sources greedily; return the range of activations by matrix.

    The range is the largest magnitude of the activations that a matrix is multiplied with. `prefix` begins every
    target. All decoder variants compute the same activations, so one of them is run.
    """
    report(f"calibrating with {len(sources)} texts, {method}")
    ranges, decoder = Ranges(method), None
    encoder = _ObservedGraph(folder / graphs[ENCODER].file)
    if spec.has_decoder:
        entry = next(graphs[name] for name in (DECODER["concat"], DECODER["static"]) if name in graphs)
        decoder = _ObservedGraph(folder / entry.file)
    for source in sources:
        padded = pad_sources(spec.source, [source])
        outputs = encoder.run(padded.inputs)
        ranges.collect(encoder.take())
        if decoder is not None:
            cross = {name: outputs[name] for name in spec.cross.names("cross")}
            _decode(decoder, entry, spec, {**cross, SOURCE_MASK: padded.mask}, prefix)
            ranges.collect(decoder.take())
    found: dict[Span, float] = {}
    largest = ranges.compute()
    for graph in filter(None, (encoder, decoder)):
        for places in graph.maps.values():
            for place in places:
                found[place] = max(found.get(place, 0.0), largest[places])
    if not np.isfinite(list(found.values())).all():
        raise GraphError("an activation is NaN or infinite in fp16; export it in fp32 or bf16")
    return found


class _ObservedGraph:
    """A graph that keeps the activations that its linear maps read."""

    def __init__(self, path: Path) -> None:
        maps: dict[str, list[Span]] = defaultdict(list)  # matrices by the activation that they are multiplied with
        for found in linear_maps(load_graph(path).graph):
            activation = found.node.inputs[0]
            if activation is not None and activation.producer() is not None:
                maps[activation.name or ""].append(span(found.weight))
        self.maps = {name: tuple(places) for name, places in maps.items()}
        data, self._outputs = show_tensors(path.read_bytes(), self.maps)
        self._graph = HostGraph(path.name, data, path.parent)
        self._seen: dict[tuple[Span, ...], list[NDArray[Any]]] = defaultdict(list)

    def run(self, inputs: Arrays) -> Arrays:
        outputs = self._graph.run(inputs)
        for name, places in self.maps.items():
            self._seen[places].append(outputs[self._outputs[name]].reshape(-1))
        return outputs

    def take(self) -> dict[tuple[Span, ...], NDArray[Any]]:
        """Return the activations since the last call, by the matrices that read them."""
        seen = {places: np.concatenate(arrays) for places, arrays in self._seen.items()}
        self._seen.clear()
        return seen


def _decode(graph: _ObservedGraph, entry: GraphEntry, spec: ModelSpec, fixed: Arrays, prefix: Sequence[int]) -> None:
    sizes: dict[Dim, int] = {"rows": 1, "past_len": 0, "capacity": spec.max_target_length}
    past = {
        tensor.name: np.zeros([dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape], tensor.dtype)
        for tensor in entry.inputs
        if tensor.name.startswith("past_")
    }
    forced, token = list(prefix), spec.tokens.start
    for position in range(spec.max_target_length):
        given = {
            **fixed,
            **past,
            TARGET_IDS: np.array([[token]]),
            CACHE_LENGTHS: np.array([position]),
            NUM_CANDIDATES: np.array([1]),
        }
        outputs = graph.run({tensor.name: given[tensor.name] for tensor in entry.inputs})
        past = {name.replace("present_", "past_"): x for name, x in outputs.items() if name.startswith("present_")}
        token = forced.pop(0) if forced else int(outputs[CANDIDATE_IDS][0, 0])
        if token == spec.tokens.eos:
            break
