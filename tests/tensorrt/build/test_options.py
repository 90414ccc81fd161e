"""Test the options of the builder, and that all unsupported ones are refused at once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tensorrt.artifact.stored import L4
from tfexport.errors import EngineError
from tfexport.tensorrt._library import PORTABLE, Library, Logger
from tfexport.tensorrt.build.builder import apply_options, builder_flags, resolve_options
from tfexport.tensorrt.config import EngineConfig

pytest.importorskip("tensorrt_rtx")


def test_tf32_is_on_by_itself_and_cleared(rtx: Library) -> None:
    config = rtx.builder(rtx.listen()).create_builder_config()
    flags = rtx.trt.BuilderFlag
    assert config.get_flag(flags.TF32)
    given = EngineConfig(workspace_mib=3, builder_optimization_level=1, compute_capabilities=("8.6", "12.0"))
    apply_options(rtx, config, resolve_options(rtx, given, None))
    assert not config.get_flag(flags.TF32)
    assert config.get_flag(flags.REQUIRE_USER_ALLOCATION)
    assert config.max_aux_streams == 0
    assert config.builder_optimization_level == 1
    assert config.get_memory_pool_limit(rtx.trt.MemoryPoolType.WORKSPACE) == 3 * 1024 * 1024
    assert config.num_compute_capabilities == 2
    kinds = rtx.trt.ComputeCapability
    assert [config.get_compute_capability(i) for i in range(2)] == [kinds.SM86, kinds.SM120]


def test_a_compute_capability_that_the_library_refuses_is_named(rtx: Library) -> None:
    config = SimpleNamespace(
        clear_flag=lambda flag: None, set_flag=lambda flag: None, set_compute_capability=lambda kind, i: i == 0
    )
    with pytest.raises(EngineError, match=r"refuses compute capability 8\.6"):
        apply_options(rtx, config, resolve_options(rtx, EngineConfig(compute_capabilities=("8.0", "8.6")), None))


def capabilities(library: Library, *wanted: str, gpu: Any = None) -> tuple[str, ...]:
    return resolve_options(library, EngineConfig(compute_capabilities=wanted), gpu).compute_capabilities


def test_engines_are_built_for_named_local_or_all_gpus(rtx: Library) -> None:
    assert capabilities(rtx) == PORTABLE
    assert capabilities(rtx, gpu=L4) == ("8.9",)
    assert capabilities(rtx, "12.0", "8.6", "12.0", gpu=L4) == ("8.6", "12.0")


HOPPER = replace(L4, name="NVIDIA H100 80GB HBM3", compute_capability="9.0")


@pytest.mark.parametrize("wanted", [(), ("9.0",)])
def test_a_gpu_that_the_enum_does_not_name_is_the_local_one(rtx: Library, wanted: tuple[str, ...]) -> None:
    options = resolve_options(rtx, EngineConfig(compute_capabilities=wanted), HOPPER)
    assert options.compute_capabilities == ("9.0",)
    config = rtx.builder(rtx.listen()).create_builder_config()
    apply_options(rtx, config, options)
    assert config.num_compute_capabilities == 1
    assert config.get_compute_capability(0) == rtx.trt.ComputeCapability.CURRENT


@pytest.mark.parametrize(
    ("wanted", "gpu", "message"),
    [
        (("9.0",), None, "or for a local GPU, and there is none; choose one of them, or --target tensorrt on such a"),
        (("9.0",), L4, "or for only the local GPU; choose one of them, or --target tensorrt on such a GPU"),
        (("8.9", "9.0"), HOPPER, "or for only the local GPU; choose one of them"),
    ],
)
def test_an_unnamed_gpu_excludes_named_ones(rtx: Library, wanted: tuple[str, ...], gpu: Any, message: str) -> None:
    with pytest.raises(EngineError) as caught:
        capabilities(rtx, *wanted, gpu=gpu)
    listed = f"compute capability {wanted[-1]}: it builds for 7.5, 8.0, 8.6, 8.9, 12.0, 12.1"
    assert f"{listed}, {message}" in str(caught.value)


def test_a_library_for_the_gpu_at_hand_takes_no_compute_capability() -> None:
    library = plain_tensorrt()
    assert capabilities(library, gpu=L4) == ()
    with pytest.raises(EngineError, match="builds only for the local GPU; leave it out or choose --target"):
        capabilities(library, "8.6", gpu=L4)


def test_all_refused_options_are_named_at_once(rtx: Library) -> None:
    settings = EngineConfig(version_compatible=True, timing_cache="x", hardware_compatibility="ampere_plus")
    with pytest.raises(EngineError, match=r"hardware compatibility.*--version-compatible.*timing cache"):
        resolve_options(rtx, settings, None)


class Flags:
    TF32, VERSION_COMPATIBLE = "TF32", "VERSION_COMPATIBLE"


def plain_tensorrt(*levels: str) -> Library:
    """Return the names of TensorRT 10, which builds only for the local GPU."""
    trt = SimpleNamespace(
        IBuilderConfig=object,
        BuilderFlag=Flags,
        HardwareCompatibilityLevel=SimpleNamespace(**{level: level for level in levels}),
        ProfilingVerbosity=SimpleNamespace(DETAILED="DETAILED"),
    )
    return Library("tensorrt", trt, "10.0.1", Logger())


def test_options_that_only_tensorrt_supports() -> None:
    settings = EngineConfig(version_compatible=True, timing_cache="cache", hardware_compatibility="ampere_plus")
    library = plain_tensorrt("NONE", "AMPERE_PLUS")
    options = resolve_options(library, settings, L4)
    assert builder_flags(library, options) == ("noTF32", "VERSION_COMPATIBLE")
    calls: list[tuple[str, str]] = []
    config = SimpleNamespace(
        set_flag=lambda flag: calls.append(("set", flag)), clear_flag=lambda flag: calls.append(("clear", flag))
    )
    apply_options(library, config, options)
    assert calls == [("clear", "TF32"), ("set", "VERSION_COMPATIBLE")]
    assert config.hardware_compatibility_level == "AMPERE_PLUS"
    assert config.profiling_verbosity == "DETAILED"
    assert not hasattr(config, "num_compute_capabilities")


def test_a_level_that_a_version_does_not_know_is_refused() -> None:
    """It came with 10.13 or before; 10.0 has two."""
    settings = EngineConfig(hardware_compatibility="same_compute_capability")
    with pytest.raises(EngineError, match="same_compute_capability is newer than this version; upgrade it"):
        resolve_options(plain_tensorrt("NONE", "AMPERE_PLUS"), settings, L4)
