"""Find the stage, the tensor and the layers where an engine differs from float32.

Every stage runs on recorded inputs, in float32 on the CPU and as the engine that a build would make. Without a GPU, it
runs in ONNX Runtime, which rounds every tensor. The search then adds layers that are computed in float32 until all
outputs agree, and drops those that are not needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import Device
from tfexport.debug.diagnosis import Diagnosis, LayerError, StageError
from tfexport.debug.stages import Arrays, Stage, read_sources, record_stages, widened
from tfexport.errors import EngineError
from tfexport.export.mixed import all_fp32, keep_fp32, layer_names, show_tensors, tensor_layers
from tfexport.precision import FORMATS
from tfexport.runtime.ort.host_graph import HostGraph
from tfexport.tensorrt.build.builder import build_engine
from tfexport.tensorrt.build.network import Graph, parse_graph
from tfexport.tensorrt.build.resolve import ResolvedBuild, prepare_graphs
from tfexport.tensorrt.compatibility import rebuild_command
from tfexport.tensorrt.config import EngineConfig, cache_aliases
from tfexport.tensorrt.cuda import Cuda
from tfexport.tensorrt.pipeline import resolve_build

# Largest finite values. A layer whose values come within a factor of HEADROOM of them stays in float32.
_LARGEST = {"fp16": 65504.0, "bf16": 3.39e38, "fp32": 3.4e38}
HEADROOM = 2.0


class Runner(Protocol):
    """Runs a variation of a stage's graph on the inputs of the stage."""

    name: str

    def run(self, stage: Stage, graph: bytes) -> Arrays:
        """Return all outputs by name."""


class HostRunner:
    """ONNX Runtime in place of an engine: products and sums in float32, rounded."""

    name = "ONNX Runtime with rounding after every operator, because there is no GPU"

    def run(self, stage: Stage, graph: bytes) -> Arrays:
        """Return all outputs by name."""
        return HostGraph(stage.name, all_fp32(graph, rounds=True), stage.graph.path.parent).run(widened(stage.inputs))


class EngineRunner:
    """The library and the GPU of a build."""

    def __init__(self, resolved: ResolvedBuild, cuda: Cuda) -> None:
        self._resolved, self._cuda = resolved, cuda
        self.name = f"{resolved.library} on the GPU"

    def run(self, stage: Stage, graph: bytes) -> Arrays:
        """Build an engine with the profile of the stage, and run it."""
        from tfexport.tensorrt.session.run_once import run_once

        resolved, plan, cuda = self._resolved, stage.graph.name, self._cuda
        aliases = cache_aliases(plan, resolved.spec, resolved.config.variant)
        with cuda.current():
            network = parse_graph(resolved.library, Graph(plan, graph, stage.graph.path))
            reason = network.log.reason
            data = build_engine(network, [stage.profile], resolved.options, gpu=resolved.gpu)
            runtime = resolved.library.runtime(network.log)
            if resolved.config.version_compatible:
                runtime.engine_host_code_allowed = True
            engine = runtime.deserialize_cuda_engine(data)
            if engine is None:
                raise EngineError(f"{network.subject}: the engine cannot be loaded: {reason()}")
            return run_once(plan, engine, resolved.library, cuda, stage.inputs, aliases=aliases, reason=reason)


def diagnose(
    path: Path,
    config: EngineConfig,
    *,
    texts: Sequence[str] = (),
    device: Device | None = None,
    trusted_keys: Sequence[Any] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Compare every stage of a build with float32, and search for layers to widen.

    `texts` are the sources; by default recorded texts of the bundle, or random sources. Layers of `config.fp32_layers`
    are computed in float32 from the beginning.
    """
    resolved = resolve_build(path, config, device, trusted_keys, report)
    runner: Runner = EngineRunner(resolved, Cuda(resolved.gpu.index)) if resolved.gpu else HostRunner()
    with tempfile.TemporaryDirectory(dir=resolved.bundle.path.parent) as scratch:
        # The layers to widen are named after the graphs without any.
        plain = replace(resolved, config=replace(resolved.config, fp32_layers=()))
        graphs = prepare_graphs(plain, Path(scratch), report)
        sources, kind = read_sources(resolved.bundle, resolved, texts)
        stages = record_stages(resolved, graphs, sources, report)
        search = _Search(stages, runner, _tolerance(resolved), _LARGEST[resolved.spec.precision], report)
        found = search.errors(config.fp32_layers)
        differing = [stage for stage, error in zip(stages, found, strict=True) if error.error > search.tolerance]
        layers = search.layer_errors(differing[0], config.fp32_layers) if differing else []
        chosen = search.find(differing, config.fp32_layers) if differing else []
        mended = search.errors(chosen) if chosen else []
    command = rebuild_command(path, replace(config, fp32_layers=tuple(chosen))) if chosen else None
    return Diagnosis(
        name=resolved.name,
        sources=kind,
        runner=runner.name,
        tolerance=search.tolerance,
        limit=search.limit,
        stages=found,
        layers=layers,
        fp32_layers=chosen,
        mended=mended,
        command=command,
    )


def _tolerance(resolved: ResolvedBuild) -> float:
    return FORMATS[resolved.accuracy].tolerance


@dataclass(frozen=True)
class _Search:
    stages: Sequence[Stage]
    runner: Runner
    tolerance: float
    limit: float
    report: Callable[[str], None]

    def errors(self, layers: Sequence[str], stages: Sequence[Stage] | None = None) -> list[StageError]:
        """Return the largest error of every stage with some layers in float32."""
        found = []
        for stage in self.stages if stages is None else stages:
            self.report(f"comparing {stage.name}, {len(layers)} layers in float32")
            got = self.runner.run(stage, keep_fp32(stage.graph.data, layers) if layers else stage.graph.data)
            by_output = {name: error_of(x, got[name]) for name, x in stage.reference.items() if x.dtype.kind == "f"}
            worst = max(by_output, key=lambda name: by_output[name])
            found.append(StageError(stage.name, worst, by_output[worst]))
        return found

    def layer_errors(self, stage: Stage, layers: Sequence[str]) -> list[LayerError]:
        """Return the errors of a stage's layers, from the first that differs."""
        of_tensor, expected = self._reference(stage)
        data = keep_fp32(stage.graph.data, layers) if layers else stage.graph.data
        data, outputs = show_tensors(data, of_tensor)
        self.report(f"comparing {len(of_tensor)} tensors of {stage.name}")
        got = self.runner.run(stage, data)
        worst: dict[str, LayerError] = {}
        for tensor, layer in of_tensor.items():
            error, largest = error_of(expected[tensor], got[outputs[tensor]]), _largest(expected[tensor])
            if not worst and error <= self.tolerance:
                continue
            known = worst.get(layer, LayerError(layer, tensor, error, largest))
            worst[layer] = replace(known, error=max(known.error, error), largest=max(known.largest, largest))
        return list(worst.values())

    def find(self, differing: Sequence[Stage], given: Sequence[str]) -> list[str] | None:
        """Return layers whose computation in float32 mends all stages, or None."""
        ranked, needed = self._ranked(differing)
        ranked = [*given, *(layer for layer in ranked if layer not in given)]
        if not self._mends(ranked, differing):
            return None
        # The smallest number of the first layers that is enough, and of these only those that are needed.
        least, most = len(given), len(ranked)
        while least < most:
            middle = (least + most) // 2
            if self._mends(ranked[:middle], differing):
                most = middle
            else:
                least = middle + 1
        chosen = [*ranked[:most], *(layer for layer in ranked[most:] if layer in needed)]
        for layer in [layer for layer in chosen if layer not in needed and layer not in given]:
            fewer = [other for other in chosen if other != layer]
            if self._mends(fewer, differing):
                chosen = fewer
        return chosen

    def _mends(self, layers: Sequence[str], stages: Sequence[Stage]) -> bool:
        return all(stage.error <= self.tolerance for stage in self.errors(layers, stages))

    def _ranked(self, stages: Sequence[Stage]) -> tuple[list[str], set[str]]:
        """Return all layers, the likeliest cause first, and those that overflow.

        After layers whose values are too large come those that read them, because a value is rounded on its way to a
        layer in half precision; then those whose error exceeds most that of their inputs.
        """
        overflowing: dict[str, None] = {}
        readers: dict[str, None] = {}
        growth: dict[str, float] = {}
        for stage in stages:
            of_tensor, expected = self._reference(stage)
            names = layer_names(stage.graph.data)
            big = {of_tensor[tensor] for tensor, x in expected.items() if _largest(x) > self.limit / HEADROOM}
            overflowing |= dict.fromkeys(layer for layer in names if layer in big)
            readers |= dict.fromkeys(b for a, b in pairwise(names) if a in big and b not in big)
            before = 0.0
            for each in self.layer_errors(stage, ()):
                growth[each.layer] = max(growth.get(each.layer, 0.0), each.error / max(before, 1e-9))
                before = each.error
        rest = sorted(growth, key=lambda layer: -growth[layer])
        every = [name for stage in stages for name in layer_names(stage.graph.data)]
        return list(dict.fromkeys([*overflowing, *readers, *rest, *every])), set(overflowing)

    def _reference(self, stage: Stage) -> tuple[Mapping[str, str], Arrays]:
        """Return the layer of each tensor of floats, and its values in float32."""
        layers = tensor_layers(stage.graph.data)
        shown, outputs = show_tensors(all_fp32(stage.graph.data), layers)
        values = HostGraph(stage.name, shown, stage.graph.path.parent).run(widened(stage.inputs))
        return layers, {name: values[output] for name, output in outputs.items()}


def error_of(expected: NDArray[Any], got: NDArray[Any]) -> float:
    """Return the largest difference as a share of the largest expected value.

    It is infinite if a finite value is expected where NaN or infinity is. Masks may contain infinity.
    """
    is_finite = np.isfinite(expected)
    wanted, found = expected[is_finite].astype(np.float64), got[is_finite].astype(np.float64)
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - wanted).max(initial=0.0) / (np.abs(wanted).max(initial=0.0) or 1.0))


def _largest(values: NDArray[Any]) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
