"""`EngineRunner` builds with TensorRT-RTX, loads on a double, and finds what ONNX Runtime with rounding finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

from tests.debug.engine_double import GraphEngine
from tests.debug.planted import FC1, FC2, exported
from tests.debug.test_accuracy import CONFIG
from tests.tensorrt.artifact.stored import L4
from tests.tensorrt.cuda_double import CudaDouble
from tfexport.debug import accuracy
from tfexport.debug.accuracy import EngineRunner, HostRunner, diagnose
from tfexport.debug.stages import Stage, read_sources, record_stages
from tfexport.errors import EngineError
from tfexport.precision import Precision
from tfexport.tensorrt import cuda
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.build.network import Graph, Network
from tfexport.tensorrt.build.resolve import prepare_graphs
from tfexport.tensorrt.config import cache_aliases
from tfexport.tensorrt.pipeline import resolve_build

SECOND = replace(L4, index=1)


class Gpu:
    """The second of two GPUs: plans are names of graphs, and the first of them is really built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda, self.builds = CudaDouble(1), 0
        self._graphs: dict[bytes, tuple[Graph, Any]] = {}
        self._parse, self._build = accuracy.parse_graph, accuracy.build_engine
        self._parsed: Graph | None = None
        monkeypatch.setattr(cuda, "_probe", lambda: ([L4, SECOND], ""))
        monkeypatch.setattr(accuracy, "Cuda", lambda number: self.cuda if number == 1 else None)
        monkeypatch.setattr(accuracy, "parse_graph", self.parse)
        monkeypatch.setattr(accuracy, "build_engine", self.build)
        runtime = SimpleNamespace(deserialize_cuda_engine=self.load)
        monkeypatch.setattr(Library, "runtime", lambda library, log: runtime)

    def parse(self, library: Library, graph: Graph) -> Network:
        self._parsed = graph
        return self._parse(library, graph)

    def build(self, network: Network, profiles: Any, options: Any, *, gpu: Any) -> bytes:
        self.cuda.check_current()
        assert gpu == SECOND
        assert self._parsed is not None
        if not self.builds:
            assert self._build(network, profiles, options, gpu=gpu)
        self.builds += 1
        plan = f"plan {self.builds}".encode()
        self._graphs[plan] = self._parsed, profiles
        return plan

    def load(self, plan: bytes) -> GraphEngine:
        self.cuda.check_current()
        graph, (profile,) = self._graphs[plan]
        stage = next(stage for stage in self.stages if stage.graph.name == graph.name)
        aliases = cache_aliases(graph.name, self.spec, "static")
        return GraphEngine(graph, stage.contract.inputs, profile, self.cuda, aliases)

    stages: list[Stage]
    spec: Any


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(monkeypatch)
    record = accuracy.record_stages

    def recorded(resolved: Any, *arguments: Any) -> list[Stage]:
        made.stages, made.spec = record(resolved, *arguments), resolved.spec
        return made.stages

    monkeypatch.setattr(accuracy, "record_stages", recorded)
    return made


def test_an_engine_finds_the_layers_that_rounding_finds(inner: Path, gpu: Gpu) -> None:
    found = diagnose(inner, CONFIG, device="cuda:1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "EngineRunner", lambda resolved, cuda: HostRunner())
        expected = diagnose(inner, CONFIG, device="cuda:1")
    assert found.runner.startswith("tensorrt-rtx")
    assert gpu.builds > 5
    assert gpu.cuda.is_empty
    assert replace(found, runner="") == replace(expected, runner="")
    assert found.fp32_layers == [FC1, FC2]


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_every_stage_runs_in_its_types(inner: Path, tmp_path: Path, gpu: Gpu, precision: Precision) -> None:
    bundle = inner if precision == "fp16" else exported(tmp_path, "inner", "fp32")
    resolved = resolve_build(bundle, replace(CONFIG, precision=precision), "cuda:1")
    (tmp_path / "graphs").mkdir()
    graphs = prepare_graphs(resolved, tmp_path / "graphs", lambda line: None)
    sources, _ = read_sources(resolved.bundle, resolved, ())
    gpu.stages, gpu.spec = record_stages(resolved, graphs, sources, lambda line: None), resolved.spec
    runner = EngineRunner(resolved, gpu.cuda)  # type: ignore[arg-type]
    for stage in gpu.stages:
        found, expected = (each.run(stage, stage.graph.data) for each in (runner, HostRunner()))
        assert found.keys() == expected.keys() == {tensor.name for tensor in stage.contract.outputs}
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name].astype(array.dtype), array)
    assert gpu.cuda.is_empty


def test_an_engine_that_is_refused_has_the_reason(inner: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: None)
    monkeypatch.setattr(Library, "runtime", lambda library, log: runtime)
    with pytest.raises(EngineError, match="cannot be loaded"):
        diagnose(inner, CONFIG, device="cuda:1")
    assert gpu.cuda.is_empty
