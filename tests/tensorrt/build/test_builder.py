"""Building: what TensorRT does without a word is an error or is never done, and the options are what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tensorrt.artifact.stored import L4
from tests.tensorrt.engine_graphs import add, attention, cache_update, kernels, project
from tfexport.bundle.manifest import Manifest
from tfexport.errors import EngineError
from tfexport.export.passes import fix_capacity
from tfexport.tensorrt._library import Library, load_library
from tfexport.tensorrt.build._profiles import make_profiles
from tfexport.tensorrt.build.builder import SerializedEngine, build_engine, resolve_options
from tfexport.tensorrt.build.network import Graph, Network, parse_graph
from tfexport.tensorrt.config import PREFILL, STEP, EngineConfig, Profile, ShapeRange
from tfexport.tensorrt.cuda import find_gpus

pytest.importorskip("tensorrt_rtx")

GRAPH = Path("graph.onnx")
ADD: Profile = {"x": ShapeRange((2, 1), (2, 4), (2, 9))}
no_gpu = pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU here")


@pytest.fixture(scope="module")
def rtx() -> Library:
    return load_library("tensorrt-rtx")


def parse(rtx: Library, graph: bytes, path: Path = GRAPH) -> Network:
    return parse_graph(rtx, Graph("toy", graph, path))


def build(rtx: Library, graph: bytes, *profiles: Profile, **settings: Any) -> SerializedEngine:
    options = resolve_options(rtx, EngineConfig(**settings), None)
    return build_engine(parse(rtx, graph), profiles, options)


def refusal(rtx: Library, graph: bytes, *profiles: Profile, **settings: Any) -> str:
    with pytest.raises(EngineError) as caught:
        build(rtx, graph, *profiles, **settings)
    return str(caught.value)


@no_gpu
def test_a_build_for_the_gpu_at_hand_reaches_the_library(rtx: Library) -> None:
    """Nobody else knows whether it takes a GPU that its enum does not name; without one it asks the driver."""
    hopper = resolve_options(rtx, EngineConfig(), replace(L4, compute_capability="9.0"))
    with pytest.raises(EngineError, match=r"the engine cannot be built: .*cudaError 35"):
        build_engine(parse(rtx, add()), (ADD,), hopper)


def profile_of(rtx: Library, graph: bytes, *, queries: int = 5) -> Profile:
    """Give every input of a toy graph a range that fits; free sizes are 8 to 20, those of queries one number."""
    network = parse(rtx, graph)

    def size(name: str, axis: int, free: int, given: int) -> int:
        if given >= 0:
            return given
        return queries if (name, axis) in (("q", 2), ("mask", 2)) else free

    def shape(tensor: Any, free: int) -> tuple[int, ...]:
        return tuple(size(tensor.name, axis, free, given) for axis, given in enumerate(tensor.shape))

    return {t.name: ShapeRange(shape(t, 8), shape(t, 8), shape(t, 20)) for t in network.inputs}


def raw_build(rtx: Library, graph: bytes, change: Any = lambda config: None, profile: Any = None) -> tuple[Any, str]:
    """Build as the library does by itself; return what it returns, and what it says."""
    log = rtx.listen()
    builder = rtx.builder(log)
    network = builder.create_network(rtx.strongly_typed())
    parser = rtx.trt.OnnxParser(network, rtx.logger)
    assert parser.parse(graph)
    config = builder.create_builder_config()
    change(config)
    if profile is not None:
        made = builder.create_optimization_profile()
        for name, shapes in profile.items():
            made.set_shape(name, shapes.min, shapes.opt, shapes.max)
        assert config.add_optimization_profile(made) == 0
    return builder.build_serialized_network(network, config), log.reason()


# A plan.


def test_a_plan_says_what_it_is_and_how_it_was_built(rtx: Library) -> None:
    parts: list[float] = []
    network = parse(rtx, add())
    plan = build_engine(network, [ADD], resolve_options(rtx, EngineConfig(), None), parts.append)
    assert plan.name == "toy"
    assert len(plan.data) > 1000
    assert [(t.name, t.dtype, t.shape) for t in network.inputs] == [("x", "float32", (2, -1))]
    assert [t.name for t in network.outputs] == ["y"]
    assert plan.layers == {"ELEMENTWISE": 1}
    assert any("Engine generation completed" in line for line in plan.log)
    assert not any("cudaError" in line for line in plan.log)
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the display is gone")])
def test_what_the_display_raises_cancels_the_build(rtx: Library, error: BaseException) -> None:
    calls = []

    def on_progress(part: float) -> None:
        calls.append(part)
        raise error

    with pytest.raises(type(error)):
        build_engine(parse(rtx, add()), [ADD], resolve_options(rtx, EngineConfig(), None), on_progress)
    assert len(calls) == 1


def test_a_step_and_a_prefill_share_one_engine(rtx: Library, dates_bundle: Path) -> None:
    spec = Manifest.from_bytes((dates_bundle / "manifest.json").read_bytes()).spec
    profiles = make_profiles(spec, "static", EngineConfig(max_batch=4)).engines["decoder_static"]
    path = dates_bundle / "decoder_static.onnx"
    graph = fix_capacity(path, spec.max_target_length)
    network = parse(rtx, graph, path)
    plan = build_engine(network, profiles, resolve_options(rtx, EngineConfig(), None))
    assert plan.layers["KV_CACHE_UPDATE"] == plan.layers["ATTENTION_INPUT"] == 2 * spec.layers
    assert sum(line.startswith("INFO Total Activation Memory") for line in plan.log) == len((STEP, PREFILL))
    assert {t.name for t in network.inputs} == set(profiles[STEP])


# The library by itself says nothing, or None.


def test_float32_attention_does_not_build_by_itself(rtx: Library) -> None:
    """The trap that marking attention as decomposable repairs."""
    graph = attention()
    profile = profile_of(rtx, graph)
    memory, reason = raw_build(rtx, graph, profile=profile)
    assert memory is None
    assert "is_decomposable" in reason
    assert build(rtx, graph, profile).layers["ATTENTION_INPUT"] == 1


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_mark_does_not_keep_attention_from_being_fused(rtx: Library, precision: str) -> None:
    graph = attention(precision, width=32)
    plan = build(rtx, graph, profile_of(rtx, graph))
    if not kernels(plan.data):
        pytest.skip("this version does not show its kernels")
    assert any("mha" in kernel for kernel in kernels(plan.data))


def test_a_graph_that_parses_and_does_not_build_gives_the_reason(rtx: Library) -> None:
    """The result of an update must be an output itself; the parser does not look."""
    graph = cache_update(through="Neg")
    message = refusal(rtx, graph, profile_of(rtx, graph))
    assert message.startswith(f"tensorrt-rtx {rtx.version}: toy: the engine cannot be built: ")
    assert "The output tensor must be a network output" in message
    assert "cudaError" not in message


def test_too_little_workspace_gives_the_reason(rtx: Library) -> None:
    profile = {"x": ShapeRange((1, 8), (4096, 8), (65536, 8))}
    assert build(rtx, project(), profile, workspace_mib=512).data
    graph = attention(width=64)
    assert "workspace" in refusal(rtx, graph, profile_of(rtx, graph, queries=4000), workspace_mib=1)


def test_turing_is_told_why_it_cannot_have_float32(rtx: Library) -> None:
    profile = {"x": ShapeRange((1, 8), (4, 8), (8, 8))}
    assert "Turing (SM75)" in refusal(rtx, project(), profile, compute_capabilities=("7.5",))


# Profiles that do not fit.


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({}, "profile 0 has no shapes for x"),
        ({**ADD, "nobody": ADD["x"]}, "profile 0 has nobody, which is no input"),
        ({"x": ShapeRange((2, 9), (2, 4), (2, 1))}, "profile 0 gives x (2, 9), (2, 4) and (2, 1) out of order"),
        ({"x": ShapeRange((2, 1), (2, 4), (3, 9))}, "expected such as (2, -1)"),
        ({"x": ShapeRange((2,), (2,), (2,))}, "profile 0 gives x the shapes (2,), (2,) and (2,), expected such as"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_before_the_build(rtx: Library, profile: Profile, message: str) -> None:
    assert message in refusal(rtx, add(), profile)


def test_no_profile_for_an_input_of_free_size_is_refused_by_the_library(rtx: Library) -> None:
    assert "optimization profile" in refusal(rtx, add())


def test_a_shape_input_without_values_is_refused(rtx: Library, dates_bundle: Path) -> None:
    spec = Manifest.from_bytes((dates_bundle / "manifest.json").read_bytes()).spec
    step, _ = make_profiles(spec, "concat", EngineConfig()).engines["decoder"]
    path = dates_bundle / "decoder.onnx"
    network = parse(rtx, path.read_bytes(), path)
    for broken, message in (
        ({name: shapes for name, shapes in step.items() if name != "num_candidates"}, "no shapes for num_candidates"),
        ({**step, "num_candidates": ShapeRange((1, 1), (1, 1), (9, 9))}, "gives num_candidates the shapes"),
    ):
        with pytest.raises(EngineError, match=message):
            build_engine(network, [broken], resolve_options(rtx, EngineConfig(), None))


# Options that are refused, since the library by itself fails or ignores them.


def set_flag(rtx: Library, name: str) -> Any:
    return lambda config: config.set_flag(getattr(rtx.trt.BuilderFlag, name))


def test_version_compatibility_does_fail(rtx: Library) -> None:
    memory, reason = raw_build(rtx, add(), set_flag(rtx, "VERSION_COMPATIBLE"), ADD)
    assert memory is None
    assert "lean" in reason


def test_hardware_compatibility_is_ignored(rtx: Library) -> None:
    log = rtx.listen()

    def change(config: Any) -> None:
        config.hardware_compatibility_level = rtx.trt.HardwareCompatibilityLevel.AMPERE_PLUS

    memory, _ = raw_build(rtx, add(), change, ADD)
    assert memory is not None
    assert any("unsupported in TensorRT-RTX" in line for line in log.lines())
