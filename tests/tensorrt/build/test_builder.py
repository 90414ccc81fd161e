"""Builds of small graphs with TensorRT-RTX, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tensorrt.artifact.stored import L4
from tests.tensorrt.conftest import no_gpu
from tests.tensorrt.engine_graphs import add, attention, cache_update, kernels, project
from tfexport.errors import EngineError
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.build.builder import Monitor, build_engine, resolve_options
from tfexport.tensorrt.build.network import Graph, Network, parse_graph
from tfexport.tensorrt.config import EngineConfig, Profile, ShapeRange

GRAPH = Path("graph.onnx")
ADD: Profile = {"x": ShapeRange((2, 1), (2, 4), (2, 9))}


def parse(rtx: Library, graph: bytes, path: Path = GRAPH) -> Network:
    return parse_graph(rtx, Graph("toy", graph, path))


def build(rtx: Library, graph: bytes, *profiles: Profile, **settings: Any) -> bytes:
    options = resolve_options(rtx, EngineConfig(**settings), None)
    return build_engine(parse(rtx, graph), profiles, options)


def refusal(rtx: Library, graph: bytes, *profiles: Profile, **settings: Any) -> str:
    with pytest.raises(EngineError) as caught:
        build(rtx, graph, *profiles, **settings)
    return str(caught.value)


@no_gpu
def test_a_build_for_the_gpu_at_hand_reaches_the_library(rtx: Library) -> None:
    hopper = resolve_options(rtx, EngineConfig(), replace(L4, compute_capability="9.0"))
    with pytest.raises(EngineError, match=r"the engine cannot be built: .*cudaError 35") as caught:
        build_engine(parse(rtx, add()), (ADD,), hopper)
    assert "9.0" in caught.value.remedy
    assert "--target tensorrt " in caught.value.remedy, "the library may have no kernels for this GPU"


def profile_of(rtx: Library, graph: bytes, *, queries: int = 5) -> Profile:
    """Return a profile; free sizes are 8 to 20, except the number of queries."""

    def shape(tensor: Any, free: int) -> tuple[int, ...]:
        sizes = [queries if (tensor.name, axis) in (("q", 2), ("mask", 2)) else free for axis in range(4)]
        return tuple(known if known >= 0 else size for known, size in zip(tensor.shape, sizes, strict=False))

    return {t.name: ShapeRange(shape(t, 8), shape(t, 8), shape(t, 20)) for t in parse(rtx, graph).inputs}


def test_a_build_has_progress_layers_and_a_log(rtx: Library) -> None:
    parts: list[float] = []
    network = parse(rtx, add())
    plan = build_engine(network, [ADD], resolve_options(rtx, EngineConfig(), None), parts.append)
    assert len(plan) > 1000
    assert [(t.name, tuple(t.shape)) for t in network.inputs] == [("x", (2, -1))]
    assert [t.name for t in network.outputs] == ["y"]
    assert network.layers == {"ELEMENTWISE": 1}
    assert any("Engine generation completed" in line for line in network.log.lines())
    assert not any("cudaError" in line for line in network.log.lines())
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the display is gone")])
def test_an_error_of_on_progress_cancels_the_build(rtx: Library, error: BaseException) -> None:
    calls = []

    def on_progress(part: float) -> None:
        calls.append(part)
        raise error

    with pytest.raises(type(error)):
        build_engine(parse(rtx, add()), [ADD], resolve_options(rtx, EngineConfig(), None), on_progress)
    assert len(calls) == 1


def test_attention_in_float32_builds(rtx: Library) -> None:
    """Unless it is marked as decomposable, the library refuses it."""
    graph = attention()
    assert parse(rtx, graph).layers["ATTENTION_INPUT"] == 1
    assert build(rtx, graph, profile_of(rtx, graph))


def test_a_profile_that_the_library_refuses_is_named(rtx: Library) -> None:
    shapes = ShapeRange((2, 1), (2, 4), (3, 9))
    assert "profile" in refusal(rtx, add(), {"x": shapes})
    assert "optimization profile" in refusal(rtx, add())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_decomposable_attention_is_still_fused(rtx: Library, precision: str) -> None:
    graph = attention(precision, width=32)
    plan = build(rtx, graph, profile_of(rtx, graph))
    if not kernels(plan):
        pytest.skip("this version does not show its kernels")
    assert any("mha" in kernel for kernel in kernels(plan))


def test_a_graph_that_parses_and_does_not_build_gives_the_reason(rtx: Library) -> None:
    """The result of an update must be an output; the parser does not check this."""
    graph = cache_update(through="Neg")
    message = refusal(rtx, graph, profile_of(rtx, graph))
    assert message.startswith(f"tensorrt-rtx {rtx.version}: toy: the engine cannot be built: ")
    assert "The output tensor must be a network output" in message
    assert "cudaError" not in message


def test_too_little_workspace_gives_the_reason(rtx: Library) -> None:
    profile = {"x": ShapeRange((1, 8), (4096, 8), (65536, 8))}
    assert build(rtx, project(), profile, workspace_mib=512)
    graph = attention(width=64)
    assert "workspace" in refusal(rtx, graph, profile_of(rtx, graph, queries=4000), workspace_mib=1)


def test_nested_phases_become_one_number_that_never_falls() -> None:
    shown: list[float] = []
    monitor = Monitor(shown.append)
    monitor.phase_start("build", None, 4)
    monitor.step_complete("build", 0)
    assert shown[-1] == 1 / 4
    monitor.phase_start("inner", "build", 2)
    monitor.step_complete("inner", 0)
    assert shown[-1] == (1 + 1 / 2) / 4
    monitor.phase_finish("inner")
    monitor.step_complete("build", 1)
    assert shown[-1] == 2 / 4
    monitor.step_complete("never begun", 3)
    monitor.phase_start("empty", "build", 0)
    monitor.step_complete("empty", 0)
    monitor.step_complete("build", 3)
    assert shown[-1] == 1
    assert shown == sorted(shown)
