"""Building: what TensorRT does without a word is an error or is never done, and the options are what they say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import TensorProto

from tests.trt.engine_graphs import add, attention, cache_update, project
from tfexport.bundle.manifest import Manifest
from tfexport.errors import BackendError, EngineError
from tfexport.graph.passes.capacity import fix_capacity
from tfexport.trt.build import timing_cache
from tfexport.trt.build.builder import SerializedEngine, build_engine
from tfexport.trt.build.network import parse_graph
from tfexport.trt.build.options import apply_options, choose_options
from tfexport.trt.build.profiles import make_profiles
from tfexport.trt.build.progress import Progress
from tfexport.trt.build.timing_cache import attach_timing_cache, save_timing_cache, timing_cache_file
from tfexport.trt.config import EngineConfig
from tfexport.trt.cuda import Gpu, find_gpus
from tfexport.trt.library import PORTABLE, Library, load_library
from tfexport.trt.log import Logger
from tfexport.trt.profile import PREFILL, STEP, Profile, ShapeRange

pytest.importorskip("tensorrt_rtx")

GRAPH = Path("graph.onnx")
ADD: Profile = {"x": ShapeRange((2, 1), (2, 4), (2, 9))}
no_gpu = pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU here")


@pytest.fixture(scope="module")
def rtx() -> Library:
    return load_library("tensorrt-rtx")


def build(rtx: Library, graph: bytes, *profiles: Profile, **settings: Any) -> SerializedEngine:
    ours = rtx.choose_compute_capabilities(settings.pop("compute_capabilities", ()))
    return build_engine(rtx, "toy", graph, GRAPH, profiles, EngineConfig(**settings), ours)


def refusal(rtx: Library, graph: bytes, *profiles: Profile, **settings: Any) -> str:
    with pytest.raises(EngineError) as caught:
        build(rtx, graph, *profiles, **settings)
    return str(caught.value)


def profile_of(rtx: Library, graph: bytes, *, queries: int = 5) -> Profile:
    """Give every input of a toy graph a range that fits; free sizes are 8 to 20, those of queries one number."""
    network = parse_graph(rtx, rtx.listen(), graph, GRAPH)

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
    steps: list[tuple[str, int, int]] = []
    settings = EngineConfig(workspace_mib=64, builder_optimization_level=2)
    plan = build_engine(rtx, "toy", add(), GRAPH, [ADD], settings, ("8.6",), lambda *step: steps.append(step))
    assert plan.name == "toy"
    assert len(plan.data) > 1000
    assert [(t.name, t.dtype, t.shape) for t in plan.inputs] == [("x", "float32", (2, -1))]
    assert [t.name for t in plan.outputs] == ["y"]
    assert plan.layers == {"ELEMENTWISE": 1}
    assert plan.options.compute_capabilities == ("8.6",)
    assert plan.options.workspace_bytes == 64 * 1024 * 1024
    assert plan.options.optimization_level == 2
    assert plan.flags == ("noTF32", "REQUIRE_USER_ALLOCATION")
    assert any("Engine generation completed" in line for line in plan.log)
    assert not any("cudaError" in line for line in plan.log)
    phase, _, total = steps[0]
    assert steps[-1] == (phase, total, total)
    assert all(0 <= step <= total for _, step, total in steps)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the display is gone")])
def test_what_the_display_raises_cancels_the_build(rtx: Library, error: BaseException) -> None:
    calls = []

    def tell(phase: str, step: int, total: int) -> None:
        calls.append(phase)
        raise error

    with pytest.raises(type(error)):
        build_engine(rtx, "toy", add(), GRAPH, [ADD], EngineConfig(), PORTABLE, tell)
    assert len(calls) == 1


def test_the_library_is_told_to_stop_after_an_error_of_the_display() -> None:
    def fail(phase: str, step: int, total: int) -> None:
        raise KeyboardInterrupt

    broken, sound = Progress(fail), Progress(lambda phase, step, total: None)
    for progress in (broken, sound):
        progress.phase_start("building", None, 3)
    assert broken.step_complete("building", 0) is False
    assert sound.step_complete("building", 0) is True
    assert isinstance(broken.error, KeyboardInterrupt)


def test_a_step_and_a_prefill_share_one_engine(rtx: Library, dates_bundle: Path) -> None:
    spec = Manifest.from_bytes((dates_bundle / "manifest.json").read_bytes()).spec
    profiles = make_profiles(spec, "static", EngineConfig(max_batch=4)).engines["decoder_static"]
    path = dates_bundle / "decoder_static.onnx"
    graph = fix_capacity(path, spec.max_target_length)
    plan = build_engine(rtx, "decoder_static", graph, path, profiles, EngineConfig(), PORTABLE)
    assert plan.layers["KV_CACHE_UPDATE"] == plan.layers["ATTENTION_INPUT"] == 2 * spec.layers
    assert sum(line.startswith("INFO Total Activation Memory") for line in plan.log) == len((STEP, PREFILL))
    assert {t.name for t in plan.inputs} == set(profiles[STEP])


# The library by itself says nothing, or None.


def test_a_build_that_fails_returns_nothing_and_raises_nothing(rtx: Library) -> None:
    """The trap, without a profile for an input of free size."""
    memory, reason = raw_build(rtx, add())
    assert memory is None
    assert "optimization profile" in reason


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
    if not plan.kernels:
        pytest.skip("this version does not show its kernels")
    assert any("mha" in kernel for kernel in plan.kernels)


def test_attention_without_a_fused_kernel_builds_too(rtx: Library) -> None:
    graph = attention("fp16", width=6)
    plan = build(rtx, graph, profile_of(rtx, graph))
    assert not any("mha" in kernel for kernel in plan.kernels)


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


def test_the_library_takes_any_shape_of_any_name(rtx: Library) -> None:
    """The trap: an unknown name and a minimum above the maximum are taken without a word."""
    builder = rtx.builder(rtx.listen())
    made = builder.create_optimization_profile()
    made.set_shape("nobody", (1, 1), (1, 1), (1, 1))
    made.set_shape("x", (2, 9), (2, 4), (2, 1))
    assert not made
    assert builder.create_builder_config().add_optimization_profile(made) == -1


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


def test_a_second_profile_is_checked_like_the_first(rtx: Library) -> None:
    message = refusal(rtx, add(), {"y": ADD["x"]}, {})
    for part in ("profile 0 has y", "profile 0 has no shapes for x", "profile 1 has no shapes for x"):
        assert part in message


def test_no_profile_for_an_input_of_free_size_is_refused_by_the_library(rtx: Library) -> None:
    assert "optimization profile" in refusal(rtx, add())


def test_a_shape_input_without_values_is_refused(rtx: Library, dates_bundle: Path) -> None:
    spec = Manifest.from_bytes((dates_bundle / "manifest.json").read_bytes()).spec
    step, _ = make_profiles(spec, "concat", EngineConfig()).engines["decoder"]
    path = dates_bundle / "decoder.onnx"
    for broken, message in (
        ({name: shapes for name, shapes in step.items() if name != "num_candidates"}, "no shapes for num_candidates"),
        ({**step, "num_candidates": ShapeRange((1, 1), (1, 1), (9, 9))}, "gives num_candidates the shapes"),
    ):
        with pytest.raises(EngineError, match=message):
            build_engine(rtx, "decoder", path.read_bytes(), path, [broken], EngineConfig(), PORTABLE)


# Options.


def test_tf32_is_on_by_itself_and_cleared(rtx: Library) -> None:
    config = rtx.builder(rtx.listen()).create_builder_config()
    flags = rtx.trt.BuilderFlag
    assert config.get_flag(flags.TF32)
    options = choose_options(rtx, EngineConfig(workspace_mib=3, builder_optimization_level=1), ("8.6", "12.0"))
    apply_options(rtx, config, options)
    assert not config.get_flag(flags.TF32)
    assert config.get_flag(flags.REQUIRE_USER_ALLOCATION)
    assert config.max_aux_streams == 0
    assert config.builder_optimization_level == 1
    assert config.get_memory_pool_limit(rtx.trt.MemoryPoolType.WORKSPACE) == 3 * 1024 * 1024
    assert config.num_compute_capabilities == 2
    kinds = rtx.trt.ComputeCapability
    assert [config.get_compute_capability(i) for i in range(2)] == [kinds.SM86, kinds.SM120]


def test_what_is_not_asked_for_is_left_to_the_library(rtx: Library) -> None:
    config, untouched = (rtx.builder(rtx.listen()).create_builder_config() for _ in range(2))
    apply_options(rtx, config, choose_options(rtx, EngineConfig(), PORTABLE))
    workspace = rtx.trt.MemoryPoolType.WORKSPACE
    assert config.get_memory_pool_limit(workspace) == untouched.get_memory_pool_limit(workspace)
    assert config.builder_optimization_level == untouched.builder_optimization_level


def test_a_compute_capability_that_the_library_refuses_is_named(rtx: Library) -> None:
    config = SimpleNamespace(
        clear_flag=lambda flag: None, set_flag=lambda flag: None, set_compute_capability=lambda kind, i: i == 0
    )
    with pytest.raises(EngineError, match=r"refuses compute capability 8\.6"):
        apply_options(rtx, config, choose_options(rtx, EngineConfig(), ("8.0", "8.6")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version_compatible": True}, "leave --version-compatible out"),
        ({"timing_cache": "cache"}, "a timing cache has no effect"),
        ({"hardware_compatibility": "ampere_plus"}, "name the GPUs with --compute-capability"),
    ],
)
def test_what_would_fail_or_do_nothing_is_refused(rtx: Library, settings: dict[str, Any], message: str) -> None:
    assert message in refusal(rtx, add(), ADD, **settings)


def test_all_refused_options_are_named_at_once(rtx: Library) -> None:
    message = refusal(rtx, add(), ADD, version_compatible=True, timing_cache="x", hardware_compatibility="ampere_plus")
    assert message.count(";") >= 3
    for part in ("hardware compatibility", "--version-compatible", "timing cache"):
        assert part in message


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


class Flags:
    """Names of the flags of TensorRT 10, as far as they are asked for."""

    TF32, VERSION_COMPATIBLE = "TF32", "VERSION_COMPATIBLE"


def plain_tensorrt(*levels: str) -> Library:
    """Return TensorRT 10 as far as its names go: it builds on a GPU, for that GPU."""
    trt = SimpleNamespace(
        IBuilderConfig=object,
        BuilderFlag=Flags,
        HardwareCompatibilityLevel=SimpleNamespace(**{level: level for level in levels}),
    )
    return Library("tensorrt", trt, "10.0.1", Logger())


def test_tensorrt_takes_what_rtx_does_not() -> None:
    settings = EngineConfig(
        version_compatible=True,
        timing_cache="cache",
        hardware_compatibility="ampere_plus",
    )
    library = plain_tensorrt("NONE", "AMPERE_PLUS")
    options = choose_options(library, settings, ())
    assert options.flags == ("noTF32", "VERSION_COMPATIBLE")
    calls: list[tuple[str, str]] = []
    config = SimpleNamespace(
        set_flag=lambda flag: calls.append(("set", flag)), clear_flag=lambda flag: calls.append(("clear", flag))
    )
    apply_options(library, config, options)
    assert calls == [("clear", "TF32"), ("set", "VERSION_COMPATIBLE")]
    assert config.hardware_compatibility_level == "AMPERE_PLUS"
    assert not hasattr(config, "num_compute_capabilities")


def test_a_level_that_a_version_does_not_know_is_refused() -> None:
    """It came with 10.13 or before; 10.0 has two."""
    settings = EngineConfig(hardware_compatibility="same_compute_capability")
    with pytest.raises(EngineError, match="same_compute_capability is newer than this version; upgrade it"):
        choose_options(plain_tensorrt("NONE", "AMPERE_PLUS"), settings, ())


# The timing cache of TensorRT.


class CachingConfig:
    """An `IBuilderConfig` as far as timing caches go: it takes those that begin with `mark`."""

    def __init__(self, mark: bytes = b"", takes: bool = True) -> None:
        self.mark, self.takes, self.cache = mark, takes, b""

    def create_timing_cache(self, known: bytes) -> bytes | None:
        return known if known.startswith(self.mark) or not known else None

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return self.takes

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.cache + b"more")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_cache, "need_gpu", lambda: Gpu(0, "NVIDIA L4", "8.9", 1 << 34, "13.0"))


def test_a_timing_cache_is_kept_for_each_version_and_gpu(tmp_path: Path) -> None:
    names = {
        timing_cache_file(str(tmp_path), version, gpu).name
        for version in ("10.16.1.11", "11.0.0.114")
        for gpu in ("NVIDIA L4", "NVIDIA GeForce RTX 4090/../x")
    }
    assert "10.16.1.11-NVIDIA-L4.timing" in names
    assert len(names) == 4
    assert not any("/" in name for name in names)


@pytest.mark.usefixtures("gpu")
def test_a_timing_cache_is_read_used_and_written(tmp_path: Path) -> None:
    directory = str(tmp_path / "new" / "caches")
    for expected in (b"more", b"moremore"):
        config = CachingConfig()
        path = attach_timing_cache(plain_tensorrt(), config, directory)
        save_timing_cache(config, path)
        assert path is not None
        assert path.read_bytes() == expected
    assert [file.name for file in path.parent.iterdir()] == ["10.0.1-NVIDIA-L4.timing"]
    assert attach_timing_cache(plain_tensorrt(), CachingConfig(), None) is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("config", [CachingConfig(mark=b"other"), CachingConfig(takes=False)])
def test_a_timing_cache_that_is_refused_is_named(tmp_path: Path, config: CachingConfig) -> None:
    (tmp_path / "10.0.1-NVIDIA-L4.timing").write_bytes(b"strange")
    with pytest.raises(EngineError, match=r"10\.0\.1-NVIDIA-L4\.timing: tensorrt 10\.0\.1 does not take it; remove it"):
        attach_timing_cache(plain_tensorrt(), config, str(tmp_path))


@pytest.mark.usefixtures("gpu")
def test_a_timing_cache_that_is_no_file_or_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "10.0.1-NVIDIA-L4.timing"
    path.mkdir()
    with pytest.raises(EngineError, match="no file of at most"):
        attach_timing_cache(plain_tensorrt(), CachingConfig(), str(tmp_path))
    path.rmdir()
    path.write_bytes(b"12345")
    monkeypatch.setattr(timing_cache, "MAX_BYTES", 4)
    with pytest.raises(EngineError, match="no file of at most 4 bytes; remove it"):
        attach_timing_cache(plain_tensorrt(), CachingConfig(), str(tmp_path))


@no_gpu
def test_a_timing_cache_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no GPU"):
        attach_timing_cache(plain_tensorrt(), CachingConfig(), str(tmp_path))


def test_a_timing_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot be written"):
        save_timing_cache(CachingConfig(), tmp_path / "file" / "cache.timing")


def test_integers_are_taken_as_they_are(rtx: Library) -> None:
    assert build(rtx, add(TensorProto.INT64), ADD).inputs[0].dtype == "int64"
